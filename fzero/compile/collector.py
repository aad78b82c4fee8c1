"""collector: what a lowering asks of Python's garbage collector and of malloc."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 300_000  # objects, some 30 MB; of a small step there are fewer
_frozen = False  # whether a `collector_paused` around this one has frozen what there is
_others = False  # whether somebody else has frozen objects
_made = 0  # objects of the contexts since the last collection of all: Python's own count of these knows nothing of them


@contextmanager
def collector_paused() -> Iterator[None]:
    """A context without garbage collection but by `collect`. The collector would walk the graphs of a lowering,
    hundreds of thousands of objects, again and again: a third of the time. What was there before is not walked at all,
    unless somebody else has frozen objects. (Python counts frozen objects one by one: it is not asked in a context
    within a context, and never again once somebody else has.)

    Objects that were frozen count as old ever after, and Python walks old ones only after many new. So all is collected
    here, once contexts have left `MANY` objects together."""
    global _frozen, _others, _made
    _others = _others or (not _frozen and gc.get_freeze_count() > 0)
    was, freezes = gc.isenabled(), not _frozen and not _others
    gc.disable()
    if freezes:
        _frozen = True
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            _made += gc.get_count()[0]
            gc.unfreeze()
            _frozen = False
            if was and _made > MANY:
                gc.collect()
                _made = 0
        if was:
            gc.enable()


def collect() -> None:
    """A collection, if there are many new objects. In `collector_paused` it stands where graphs were dropped: Python
    seldom returns the memory of objects, so a lowering must not take much at one time (9 MB less of a pipeline's rank).
    """
    global _made
    if (made := gc.get_count()[0]) > MANY:
        _made += max(made - gc.collect(), 0)  # what is left is old now: Python's count forgets it


def return_freed() -> None:
    """Returns to the system the memory that `init` and a lowering freed. What a step needs comes from elsewhere, so
    malloc would keep it for nothing (18 MB of a pipeline's rank). It does nothing where malloc is not glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
