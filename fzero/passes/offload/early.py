"""early: ops moved to right behind what they need, in an order that keeps what every op reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from fzero.ir.op import Op
from fzero.passes.common.touched import Touched


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
    touched = Touched()
    behind: list[int] = []
    for index, op in enumerate(ops):
        reads, writes = touched.by(op)
        behind.append(max(touched.before(reads, writes), default=-1) if index in movable else index)
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
