"""collector: what a lowering asks of Python's garbage collector and of malloc."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 300_000  # objects, some 30 MB; of a small step there are fewer
FEW = 10_000  # to collect garbage among them takes a millisecond
_lock = threading.RLock()
_depth = 0  # contexts that are open, in all threads: the first pauses, the last resumes
_enabled = True  # whether it was on before the first
_frozen = False  # whether the first has frozen what there was
_others = False  # whether somebody else has frozen objects
_made = 0  # objects of the contexts since the last collection of all: Python's own count of these knows nothing of them


@contextmanager
def collector_paused() -> Iterator[None]:
    """A context without garbage collection but by `collect`. The collector would walk the graphs of a lowering,
    hundreds of thousands of objects, again and again: a third of the time. What was there before is not walked at all,
    unless somebody else has frozen objects. (Python counts frozen objects one by one: it is not asked in a context
    within a context, and never again once somebody else has.)

    Objects that were frozen count as old ever after, and Python walks old ones only after many new. So all is collected
    here, once contexts have left `MANY` objects together; at the end of each, the garbage that it made itself."""
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            _pause()
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _resume()


def _pause() -> None:
    global _enabled, _frozen, _others
    _others = _others or gc.get_freeze_count() > 0
    _enabled, _frozen = gc.isenabled(), not _others
    gc.disable()
    if _frozen:
        gc.freeze()


def _resume() -> None:
    global _made
    if _frozen:
        _made += _left(gc.get_count()[0])
        gc.unfreeze()
        if _enabled and _made > MANY:
            gc.collect()
            _made = 0
    if _enabled:
        gc.enable()


def _left(made: int) -> int:
    """How many objects are left of so many that contexts made. Garbage among them is collected here, where Python walks
    no others: to walk all takes ten times as long."""
    return max(made - gc.collect(), 0) if _enabled and made > FEW else made


def collect() -> None:
    """A collection, if there are many new objects. In `collector_paused` it stands where graphs were dropped: Python
    seldom returns the memory of objects, so a lowering must not take much at one time (9 MB less of a pipeline's rank).
    What is left is not walked again until the context ends: a large lowering would walk it a dozen times."""
    global _made
    if (made := gc.get_count()[0]) > MANY:
        _made += max(made - gc.collect(), 0)  # what is left is old now: Python's count forgets it
        if _frozen:
            gc.freeze()


def functions_of(codes: set[types.CodeType]) -> list[types.FunctionType]:
    """The functions of codes, among all objects. Python does not see those that are frozen: where one may be among
    them, they are thawed, and frozen again with what was made since."""
    global _made
    with _lock:
        found = _functions_seen(codes)
        left = codes - {fn.__code__ for fn in found}
        if left and ((_frozen and _depth) or gc.get_freeze_count()):
            _made += gc.get_count()[0]
            gc.unfreeze()
            found += _functions_seen(left)
            gc.freeze()
        return found


def _functions_seen(codes: set[types.CodeType]) -> list[types.FunctionType]:
    return [x for x in gc.get_referrers(*codes) if isinstance(x, types.FunctionType) and x.__code__ in codes]


def return_freed() -> None:
    """Returns to the system the memory that `init` and a lowering freed. What a step needs comes from elsewhere, so
    malloc would keep it for nothing (18 MB of a pipeline's rank). It does nothing where malloc is not glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
