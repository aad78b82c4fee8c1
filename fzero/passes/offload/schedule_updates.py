"""schedule_updates: an update of what is held off the device comes right behind what it needs, amid the backward.

A gradient then lives from its reduction to its update, not until all updates at the step's end. The update waits for
every op before it that writes what it reads, and for every use of what it writes: with clipping by a norm over all
all gradients, or a test that all are finite, it stays where it was. A step that holds all on the device keeps its
order: there a loss that fails in its backward leaves the state as it was.

    run bwd1; reduce g1; run bwd0; wait g1; reduce g0; wait g0; update g0 -> p0; update g1 -> p1
    becomes   run bwd1; reduce g1; run bwd0; wait g1; update g1 -> p1; reduce g0; wait g0; update g0 -> p0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from fzero.ir import rewrite
from fzero.ir.program import Program
from fzero.ir.records import Op, Ref
from fzero.passes.offload.to_spaces import copies_of


def schedule_updates(program: Program) -> Program:
    """The program with updates behind the last segment of a loss moved to where their operands are there, and with them
    what only they need; itself where nothing is held off the device."""
    if not copies_of(program):
        return program
    ops = program.ops
    last_loss = max((i for i, op in enumerate(ops) if op.phase == "region"), default=len(ops))
    movable = {i for i, op in enumerate(ops) if i > last_loss and op.computes and op.is_flat}
    while True:
        behind = _behind(ops, movable)
        early = _early(ops, movable, behind, last_loss)
        if early == movable:
            break
        movable = early
    order = sorted(range(len(ops)), key=lambda i: (behind[i], i))
    return rewrite.finish(program, "schedule_updates", ops=[ops[i] for i in order])


def _behind(ops: Sequence[Op], movable: AbstractSet[int]) -> list[int]:
    """Of each op, behind which of those that stay it may come: of one that stays, itself."""
    touched = _Touched()
    behind: list[int] = []
    for index, op in enumerate(ops):
        reads, writes = touched.by(op)
        behind.append(touched.last_before(reads, writes) if index in movable else index)
        touched.note(reads, writes, behind[-1])
    return behind


def _early(ops: Sequence[Op], movable: AbstractSet[int], behind: Sequence[int], last_loss: int) -> set[int]:
    """Of those that may move: updates that need no work of the step's end, and what these need."""
    early: set[int] = set()
    needed: set[str] = set()
    for index in sorted(movable, reverse=True):
        op, after = ops[index], behind[index]
        soon = after >= 0 and (after <= last_loss or not ops[after].computes)
        if soon and (op.is_update or any(ref.name in needed for ref in op.writes)):
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
