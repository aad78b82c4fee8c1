"""collector: what a lowering asks of Python's garbage collector and of malloc."""

from __future__ import annotations

import ctypes
import gc
import sys
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


def return_freed() -> None:
    """Returns to the system the memory that `init` and a lowering freed. What a step needs comes from elsewhere, so
    malloc would keep it for nothing (18 MB of a pipeline's rank). It does nothing where malloc is not glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
