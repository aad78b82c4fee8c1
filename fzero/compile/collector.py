"""collector: keeps Python's garbage collector off while a step is lowered."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """A context without garbage collection. The collector would walk the graphs of a lowering, hundreds of thousands of
    objects, again and again: a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
