"""noted: what a program has read from Python, and whether that is still so before it runs.

`Reads.changes` looks at all places in a few calls of C: about 50 ns a place. Only where a value is another object, it
is compared by its worth, and its place is told the new object.
"""

from __future__ import annotations

import enum
import operator
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import nn

from fzero.capture.reads.module_parts import ModuleParts
from fzero.capture.reads.read_places import ATTRIBUTE, COPY, ENTRY, ITEM, ReadPlace
from fzero.capture.reads.worth import DESCRIPTORS, FIXED, MISSING, apart, same_code, shown

REMEDY = (
    "A program reads it once, when it is traced. Pass what changes in the batch, keep it in the state, or trace a new "
    "program for each change with Spec(on_change='retrace') (docs/read-once.md)"
)


@dataclass(frozen=True)
class Change:
    """A place whose value is another now. within: of an object that shows nothing but its address, the first part that
    differs."""

    place: ReadPlace
    now: Any
    within: Change | None = None

    def __str__(self) -> str:
        if self.within is not None:
            if self.place.key == "__dict__":
                return str(self.within)
            return f"{self.place.name}, which {self.place.where} reads, is another object: {self.within}"
        old = self.place.behind if self.place.value is MISSING else self.place.value
        parts = getattr(self.place.key, "__self__", None)
        told = parts.told if isinstance(parts, ModuleParts) else apart
        name, old, new = told(self.place.name, old, self.now)
        was, now = shown(old), shown(new)
        return f"{name}, which {self.place.where} reads, was {was} and is {'another ' * (was == now)}{now}"


@dataclass
class Reads:
    """The places that a trace has read. Only `forget` and `changes` write to it."""

    places: list[ReadPlace] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._group()

    def changes(self) -> list[Change]:
        """The places whose values are not what they were."""
        return [] if self._untouched() else list(self._compared())

    def change(self) -> tuple[str, str] | None:
        """(the first change, the remedy); None if there is none."""
        changes = self.changes()
        return (str(changes[0]), REMEDY) if changes else None

    def forget(self, places: Iterable[ReadPlace]) -> None:
        """Watches these no more."""
        gone = set(places)
        self.places = [place for place in self.places if place not in gone]
        self._group()

    def with_tensors(self, closed: Iterable[torch.Tensor]) -> Reads:
        """These, and the places in which modules that were read hold tensors that the program reads."""
        ids, more = set(map(id, closed)), []
        for place in [p for p in self.places if p.kind == COPY and isinstance(p.holder, nn.Module)]:
            for path, part in place.holder.named_modules(prefix=place.name.partition("'")[0]):
                for held in (part._parameters, part._buffers):
                    names = [name for name, x in held.items() if id(x) in ids]
                    more += [ReadPlace(ENTRY, held, n, f"{path}.{n}", place.where, held[n]) for n in names]
        return Reads([*self.places, *{(id(p.holder), p.key): p for p in more}.values()])

    def numbers(self) -> dict[str, str]:
        """The numbers and texts that were read, by name, as messages show them."""
        return {
            p.name: shown(p.value) for p in self.places if isinstance(p.value, (int, float, str)) and p.kind != COPY
        }

    def _group(self) -> None:
        """Columns of holders, keys and values, for each kind of place."""
        self._columns = [
            tuple(zip(*((p.holder, p.key, p.value) for p in self.places if p.kind == kind), strict=True))
            or ((), (), ())
            for kind in (ENTRY, ATTRIBUTE, ITEM, COPY)
        ]

    def _untouched(self) -> bool:
        """Whether every place holds the very object that it held."""
        try:
            entries, attributes, items, copies = self._columns
            return (
                all(map(operator.is_, map(dict.get, entries[0], entries[1], repeat(MISSING)), entries[2]))
                and all(map(operator.is_, map(getattr, attributes[0], attributes[1], repeat(MISSING)), attributes[2]))
                and all(map(operator.is_, map(operator.getitem, items[0], items[1]), items[2]))
                and all(copy(holder) == value for holder, copy, value in zip(*copies, strict=True))
            )
        except Exception:
            return False

    def _compared(self) -> Iterator[Change]:
        """The changes, one place after another. Places that hold another object of the same worth learn it."""
        parts: dict[int, list[ReadPlace]] = {}
        for place in self.places:
            parts.setdefault(id(place.holder), []).append(place)
        learnt = False
        for place in self.places:
            now = place.now()
            if now is place.value or (place.filled and now is MISSING):
                continue
            if _rebuilt(place, now, parts):
                place.value, learnt = now, True
            else:
                yield Change(place, now, _within(place, now, parts, frozenset()))
        if learnt:
            self._group()


def _rebuilt(place: ReadPlace, now: Any, parts: dict[int, list[ReadPlace]]) -> bool:
    """Whether a value of the same worth is in this place, or an object of the same kind in which all that was read of
    the old one is the same. Its places then lie in the new one. parts: places, by the ids of their holders."""
    moved: dict[ReadPlace, tuple[Any, Any]] = {place: (place.holder, now)}
    if not _holds(place, now, parts, moved):
        return False
    for part, (holder, value) in moved.items():
        part.holder, part.value = holder, value
    return True


def _holds(
    place: ReadPlace, now: Any, parts: dict[int, list[ReadPlace]], moved: dict[ReadPlace, tuple[Any, Any]]
) -> bool:
    """Whether a value is what it was. The parts of a function or a tuple that was made again move, as an object's."""
    again = now is not place.value and place.kind != COPY and isinstance(now, (types.FunctionType, tuple))
    has_parts = again and bool(_parts(place.value, now, parts))
    return (not has_parts and place.holds(now)) or _fits(place, now, parts, moved)


def _fits(
    place: ReadPlace, now: Any, parts: dict[int, list[ReadPlace]], moved: dict[ReadPlace, tuple[Any, Any]]
) -> bool:
    """Whether that is so, as long as it is of those in `moved`; adds to them."""
    old = place.value
    if place.kind == COPY or not _alike(old, now):
        return False
    mine = _parts(old, now, parts)
    if place.whole and (not mine or isinstance(old, nn.Module)):
        return False
    for part, holder in mine:
        value = part.on(holder)
        if part in moved:
            if moved[part][1] is not value:
                return False
            continue
        moved[part] = holder, value
        if not _holds(part, value, parts, moved):
            return False
    return True


def _parts(old: Any, now: Any, parts: dict[int, list[ReadPlace]]) -> list[tuple[ReadPlace, Any]]:
    """What was read of an old object, each with its holder in a new one."""
    return [(part, new) for holder, new in _holders(old, now) for part in parts.get(id(holder), ())]


def _within(
    place: ReadPlace, now: Any, parts: dict[int, list[ReadPlace]], outer: frozenset[ReadPlace]
) -> Change | None:
    """The innermost change of what was read of an object that shows nothing but its address, or of its `__dict__`; None
    if that is not known."""
    outer |= {place}
    plain: Any = object.__repr__
    if type(place.value).__repr__ is not plain and place.key != "__dict__":
        return None
    for part, holder in [] if place.kind == COPY or not _alike(place.value, now) else _parts(place.value, now, parts):
        value = part.on(holder)
        if part not in outer and not _holds(part, value, parts, {}):
            return _within(part, value, parts, outer) or Change(part, value)
    return None


def _alike(old: Any, new: Any) -> bool:
    """Whether an object may be another of the same kind: of a class that may have been defined again."""
    if isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType):
        return same_code(old.__code__, new.__code__) and old.__globals__ is new.__globals__
    if isinstance(old, (type, *_NO_PARTS)):
        return False
    return _named(type(old)) == _named(type(new))


def _named(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _holders(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """What holds the parts of an old object, with what holds those of a new one."""
    yield old, new
    if type(old) is not type(new):
        yield type(old), type(new)
    if hasattr(old, "__dict__") and old.__dict__ is not old:
        yield old.__dict__, new.__dict__
    if isinstance(old, types.FunctionType):
        yield from zip(old.__closure__ or (), new.__closure__ or (), strict=True)


_NO_PARTS = (
    *FIXED,
    *DESCRIPTORS,
    enum.Enum,
    torch.Tensor,
    types.CodeType,
    types.ModuleType,
    types.MethodType,
    types.BuiltinFunctionType,
)


@contextmanager
def own_changes_forgotten(programs: Sequence[Reads]) -> Iterator[None]:
    """Around a trace: what the traced functions themselves change (a cache that they fill) is watched no more."""
    before = [{change.place for change in reads.changes()} for reads in programs]
    yield
    for reads, known in zip(programs, before, strict=True):
        reads.forget({change.place for change in reads.changes()} - known)
