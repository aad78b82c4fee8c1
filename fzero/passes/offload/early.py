"""early: ops moved to right behind what they need, in an order that keeps what every op reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from fzero.ir.op import Op
from fzero.ir.records import Ref


def last_of_losses(ops: Sequence[Op]) -> int:
    """The number of the last op of a loss; that behind the last op where there is none."""
    return max((i for i, op in enumerate(ops) if op.in_region), default=len(ops))


def moved_early(ops: Sequence[Op], movable: AbstractSet[int], ends: Callable[[Op], bool]) -> tuple[list[Op], int]:
    """(the ops in their new order, how many moved): those of `movable` that `ends` says, and what only these need.

    An op moves if what it needs last is no work of the step's end: it was there before the first of `movable`, or is a
    transfer.
    """
    first = min(movable, default=0)
    while True:
        behind = _behind(ops, movable)
        early = _early(ops, movable, behind, first, ends)
        if early == movable:
            break
        movable = early
    order = sorted(range(len(ops)), key=lambda i: (behind[i], i))
    return [ops[i] for i in order], len(movable)


def _behind(ops: Sequence[Op], movable: AbstractSet[int]) -> list[int]:
    """Of each op, behind which of those that stay it may come: of one that stays, itself."""
    touched = _Touched()
    behind: list[int] = []
    for index, op in enumerate(ops):
        reads, writes = touched.by(op)
        behind.append(touched.last_before(reads, writes) if index in movable else index)
        touched.note(reads, writes, behind[-1])
    return behind


def _early(
    ops: Sequence[Op], movable: AbstractSet[int], behind: Sequence[int], first: int, ends: Callable[[Op], bool]
) -> set[int]:
    early: set[int] = set()
    needed: set[str] = set()
    for index in sorted(movable, reverse=True):
        op, after = ops[index], behind[index]
        soon = after >= 0 and (after < first or not ops[after].computes)
        if soon and (ends(op) or any(ref.name in needed for ref in op.writes)):
            early.add(index)
            needed.update(ref.name for ref in op.reads)
    return early


class _Touched:
    """By buffer, the references so far and the place of the op that made each. A wait touches all that its transfer
    does. Only the methods here write the fields."""

    def __init__(self) -> None:
        self.reads: dict[str, list[tuple[Ref, int]]] = {}
        self.writes: dict[str, list[tuple[Ref, int]]] = {}
        self.flight: dict[str, Op] = {}

    def by(self, op: Op) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
        """What an op reads and writes."""
        if op.transfers:
            self.flight[op.target] = op
        started = self.flight.get(op.target, op) if op.is_mark else op
        return started.reads, started.writes

    def last_before(self, reads: tuple[Ref, ...], writes: tuple[Ref, ...]) -> int:
        """The place of the last op that must come before one with these references; -1 if there is none."""
        return max(self._conflicts(reads, writes), default=-1)

    def _conflicts(self, reads: tuple[Ref, ...], writes: tuple[Ref, ...]) -> Iterator[int]:
        for ref in (*reads, *writes):
            yield from (place for other, place in self.writes.get(ref.name, ()) if ref.overlaps(other))
        for ref in writes:
            yield from (place for other, place in self.reads.get(ref.name, ()) if ref.overlaps(other))

    def note(self, reads: tuple[Ref, ...], writes: tuple[Ref, ...], place: int) -> None:
        """Remembers an op's references."""
        for into, refs in ((self.reads, reads), (self.writes, writes)):
            for ref in refs:
                into.setdefault(ref.name, []).append((ref, place))
