"""moving: what gives another value each time that it is asked: iterators, files, queues, containers that a line takes
from. A step is traced once, so every step would get what the trace got: that is refused."""

from __future__ import annotations

import functools
import io
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fzero.capture.reads.chains import NameChain
from fzero.capture.reads.frames import USER, kind_of_code
from fzero.capture.reads.read_places import CONTAINERS, ReadPlace
from fzero.capture.reads.worth import is_traced
from fzero.errors import CaptureError

CHANGES = {"append", "extend", "insert", "clear", "update", "setdefault", "add", "remove", "discard", "pop", "popitem"}
CHANGES |= {"appendleft", "extendleft", "popleft", "rotate"}  # of a deque
_TAKES = {"pop", "popitem", "popleft"}
_GIVES = {"__next__", "send"}
_READS = {"read", "readline", "readlines"}
_RECEIVES = {"get", "get_nowait", "recv", "recv_bytes"}
METHODS = CHANGES | _GIVES | _READS | _RECEIVES
_QUEUES = ("queue", "_queue", "multiprocessing.", "torch.multiprocessing.")  # modules of queues and pipes
_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)
_PRINT = NameChain("print", "global")


@dataclass
class _Moved:
    """Something that gave a value, its name and the line. items: of a container, those before its first change."""

    it: Any
    name: str
    where: str
    items: list[Any] | None = None

    def changed(self) -> bool:
        """Whether the step ends with other items than it began with: a stack that is left as it was is none."""
        if self.items is None:
            return True
        now = _items(self.it)
        return len(now) != len(self.items) or any(a is not b for a, b in zip(now, self.items, strict=True))


@dataclass
class Moves:
    """What the lines of one trace took. `before`: containers that they change, with the items before."""

    moved: list[_Moved] = field(default_factory=list)
    before: dict[int, tuple[Any, list[Any]]] = field(default_factory=dict)

    def given(self, value: Any, name: str, where: str, callee: NameChain | None) -> None:
        """Before a line that gives a value to what may ask it: a loop, or a function that is not the user's."""
        if callee != _PRINT:
            self.moved += [_Moved(it, name, where) for it in _iterators(value)]
        if isinstance(value, (*_METHODS, types.MethodType)) and value.__name__ in METHODS - _GIVES:
            self.asked(value.__self__, value.__name__, name, where, False)  # `take = stack.pop`

    def asked(self, owner: Any, method: str, name: str, where: str, dropped: bool) -> None:
        """Before a line that names a method of METHODS. dropped: its result is not used."""
        if isinstance(owner, CONTAINERS):
            items = _items(owner)
            if not any(map(is_traced, items)):
                self.before.setdefault(id(owner), (owner, items))
            if id(owner) in self.before and ((method in _TAKES and not dropped) or method == "rotate"):
                self.moved.append(_Moved(owner, name, where, self.before[id(owner)][1]))
        elif method in _GIVES:
            self.given(owner, name, where, None)
        elif (isinstance(owner, io.IOBase) and method in _READS) or (_is_queue(owner) and method in _RECEIVES):
            self.moved.append(_Moved(owner, name, where))

    def check(self, kept: Iterable[ReadPlace]) -> None:
        """Raises CaptureError for what was there before the trace, and still is: the places say so."""
        values = (place.value for place in kept)
        held = {id(x.__self__ if isinstance(x, (*_METHODS, types.MethodType)) else x) for x in values}
        for moved in self.moved:
            if id(moved.it) in held and moved.changed():
                raise CaptureError(
                    f"{moved.where} takes a value from {moved.name}, which gives another the next time: that "
                    "happens once, when the step is traced, and every step would get the same. Take it outside of the "
                    "step and pass it in the batch, or count in the state (docs/read-once.md)"
                )
        self.moved.clear()
        self.before.clear()


def _items(container: Any) -> list[Any]:
    """Its items; a dict's keys and values in turn."""
    return [x for item in container.items() for x in item] if isinstance(container, dict) else [*container]


def _iterators(value: Any) -> Iterator[Any]:
    """The iterators that a value is, is a method of, or hands to a function; not those of the user's own classes, whose
    lines say what they read."""
    if isinstance(value, types.FunctionType):
        return
    if isinstance(value, _METHODS):
        value = value.__self__ if value.__name__ in _GIVES else None
    parts = [*value.args, *value.keywords.values()] if isinstance(value, functools.partial) else [value]
    for part in parts:
        step = getattr(type(part), "__next__", None)
        of_user = isinstance(step, types.FunctionType) and kind_of_code(step.__code__, step.__globals__) == USER
        if step is not None and not of_user and (not isinstance(part, io.IOBase) or part.readable()):
            yield part


def _is_queue(owner: Any) -> bool:
    return type(owner).__module__.startswith(_QUEUES)
