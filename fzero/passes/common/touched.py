"""touched: which earlier ops an op must come behind, by what they read and write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fzero.ir.op import Op
from fzero.ir.records import Ref

Refs = Sequence[Ref]


class Touched:
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

    def before(self, reads: Refs, writes: Refs) -> Iterator[int]:
        """The places of the ops that must come before one with these references."""
        for ref in (*reads, *writes):
            yield from (place for other, place in self.writes.get(ref.name, ()) if ref.overlaps(other))
        for ref in writes:
            yield from (place for other, place in self.reads.get(ref.name, ()) if ref.overlaps(other))

    def note(self, reads: Refs, writes: Refs, place: int) -> None:
        """Remembers an op's references."""
        for into, refs in ((self.reads, reads), (self.writes, writes)):
            for ref in refs:
                into.setdefault(ref.name, []).append((ref, place))
