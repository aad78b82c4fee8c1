"""noted: what a program has read from Python, and whether that is still so before it runs.

`Reads.changes` looks at all places in a few calls of C: about 50 ns a place. Only where a value is another object, it
is compared by its worth, and its place is told the new object.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from fzero.capture.reads.places import ATTRIBUTE, COPY, ENTRY, ITEM, MISSING, Place, shown

REMEDY = (
    "A program reads it once, when it is traced. Pass what changes in the batch, keep it in the state, or trace a new "
    "program for each change with Spec(on_change='retrace') (docs/read-once.md)"
)


@dataclass(frozen=True)
class Change:
    """A place whose value is another now."""

    place: Place
    now: Any

    def __str__(self) -> str:
        old = self.place.behind if self.place.value is MISSING else self.place.value
        was, now = shown(old), shown(self.now)
        return f"{self.place.name}, which {self.place.where} reads, was {was} and is {'another ' * (was == now)}{now}"


@dataclass
class Reads:
    """The places that a trace has read. Only `forget` and `changes` write to it."""

    places: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._group()

    def changes(self) -> list[Change]:
        """The places whose values are not what they were."""
        return [] if self._untouched() else list(self._compared())

    def change(self) -> tuple[str, str] | None:
        """(the first change, the remedy); None if there is none."""
        changes = self.changes()
        return (str(changes[0]), REMEDY) if changes else None

    def forget(self, places: Iterable[Place]) -> None:
        """Watches these no more."""
        gone = set(places)
        self.places = [place for place in self.places if place not in gone]
        self._group()

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
        parts: dict[Place | None, list[Place]] = {}
        for place in self.places:
            parts.setdefault(place.parent, []).append(place)
        learnt = False
        for place in self.places:
            now = place.now()
            if now is place.value:
                continue
            if place.holds(now) or _rebuilt(place, now, parts):
                place.value, learnt = now, True
            else:
                yield Change(place, now)
        if learnt:
            self._group()


def _rebuilt(place: Place, now: Any, parts: dict[Place | None, list[Place]]) -> bool:
    """Whether an object of the same type is in this place, and all that was read of the old one is the same in it. Its
    places then lie in the new one."""
    mine = parts.get(place, [])
    if type(place.value) is not type(now) or not mine:
        return False
    moved = []
    for part in mine:
        holder = _holder(part, place.value, now)
        value = MISSING if holder is None else part.on(holder)
        if holder is None or not (part.holds(value) or _rebuilt(part, value, parts)):
            return False
        moved.append((part, holder, value))
    for part, holder, value in moved:
        part.holder, part.value = holder, value
    return True


def _holder(part: Place, old: Any, new: Any) -> Any:
    """The holder in a new object of what an old one held; None where that cannot be told."""
    if part.holder is old:
        return new
    if part.holder is getattr(old, "__dict__", None):
        return new.__dict__
    return part.holder if part.holder is type(new) else None


@contextmanager
def own_changes_forgotten(programs: Sequence[Reads]) -> Iterator[None]:
    """Around a trace: what the traced functions themselves change (a cache that they fill) is watched no more."""
    before = [{change.place for change in reads.changes()} for reads in programs]
    yield
    for reads, known in zip(programs, before, strict=True):
        reads.forget({change.place for change in reads.changes()} - known)
