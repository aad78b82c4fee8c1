"""op: `Op`, one line of a program: what it does, to which references, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from fzero.ir import kinds
from fzero.ir.records import Ref


class StepPhase(StrEnum):
    """Which part of a step an op is of.

    Of a `value_and_grad`, a *region*, there are four. `FORWARD`, `BACKWARD`: the work of one alone. `RECOMPUTE`: work
    of the forward that is done again in the backward. `REGION`: both forward and backward, as in a region that is not
    cut yet, or where they meet in one segment. `OUTER`: the user's step outside of its regions, as an update of leaves.
    What fzero adds has no phase: sums over microbatches, reductions, gathers, moves.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    REGION = "region"
    OUTER = "outer"


@dataclass(frozen=True, slots=True)
class Op:
    """One line of a program. `attrs` are sorted (name, value) pairs of int and str; read them by the properties."""

    kind: str
    reads: tuple[Ref, ...] = ()
    writes: tuple[Ref, ...] = ()
    axis: str | None = None
    attrs: tuple[tuple[str, int | str], ...] = ()
    why: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute by its name in the text."""
        for key, value in self.attrs:
            if key == name:
                return value
        return default

    def with_attrs(self, **attrs: int | str) -> Op:
        """The op with these attributes added or changed."""
        return replace(self, attrs=tuple(sorted({**dict(self.attrs), **attrs}.items())))

    # --- properties of its kind

    @property
    def row(self) -> kinds.OpKind:
        """The row of its kind."""
        return kinds.of(self.kind)

    @property
    def computes(self) -> bool:
        """Whether it executes a segment."""
        return self.row.computes

    @property
    def transfers(self) -> bool:
        """Whether it starts a transfer, which a `wait` on `target` ends."""
        return self.row.transfers

    @property
    def is_collective(self) -> bool:
        """Whether all ranks of its axis take part."""
        return self.row.collective is not None

    @property
    def is_message(self) -> bool:
        """Whether it sends to, or receives from, one rank."""
        return self.is_send or self.is_recv

    @property
    def gathers(self) -> bool:
        """Whether its target becomes every rank's slice."""
        return self.row.gathers

    @property
    def exchanges(self) -> bool:
        """Whether its target becomes the own slices of all ranks' values."""
        return self.row.exchanges

    @property
    def reduces(self) -> bool:
        """Whether it adds over ranks, or takes the largest."""
        return self.row.reduces

    @property
    def moves(self) -> bool:
        """Whether it brings a value from one space to another."""
        return self.row.moves

    @property
    def is_run(self) -> bool:
        """Whether it executes a segment that leaves the state alone."""
        return self.kind == "run"

    @property
    def is_update(self) -> bool:
        """Whether it executes a segment that writes the state."""
        return self.kind == "update"

    @property
    def is_send(self) -> bool:
        """Whether it sends a message to a rank."""
        return self.kind == "send"

    @property
    def is_recv(self) -> bool:
        """Whether it receives a message from a rank."""
        return self.kind == "recv"

    @property
    def is_wait(self) -> bool:
        """Whether it waits for a transfer to arrive."""
        return self.kind == "wait"

    @property
    def is_settle(self) -> bool:
        """Whether it waits until no other rank reads the sources of a transfer."""
        return self.kind == "settle"

    @property
    def is_free(self) -> bool:
        """Whether its buffers hold nothing from here on."""
        return self.kind == "free"

    @property
    def is_mark(self) -> bool:
        """Whether it only says when memory may be used again: it reads and writes no element."""
        return self.is_wait or self.is_settle or self.is_free

    @property
    def target(self) -> str:
        """The buffer that a transfer fills (of a send: that it reads), or that a wait or a settle is about."""
        return (self.writes or self.reads)[0].name

    @property
    def sources(self) -> set[str]:
        """The buffers that other ranks may read after this rank has waited for the transfer."""
        return {self.reads[0].name, *([self.target] if self.row.scattered else [])}

    # --- its attributes

    @property
    def segment(self) -> str:
        """The hash of the segment that it executes; "" where it executes none."""
        return str(self.get("segment", ""))

    @property
    def num_outputs(self) -> int:
        """How many of its first writes are new tensors that the segment returns; the others are destinations."""
        return int(self.get("fresh", 0))

    @property
    def is_flat(self) -> bool:
        """Whether it works elementwise on flat ranges of buckets, so that any slice gives the same bits."""
        return bool(self.get("flat"))

    @property
    def phase(self) -> StepPhase | None:
        """The part of the step that a run is of, or a transfer within a region; None of any other op."""
        return None if (phase := self.get("phase")) is None else StepPhase(phase)

    @property
    def is_between(self) -> bool:
        """Whether it is between the parts of a step, a run of no region and no phase: as a sum over microbatches."""
        return self.is_run and self.region is None and self.phase is None

    @property
    def in_region(self) -> bool:
        """Whether it executes a segment of a `value_and_grad`."""
        return self.computes and self.region is not None

    @property
    def region(self) -> str | None:
        """The name of the region that it is of."""
        return self.get("region")

    @property
    def microbatch(self) -> int:
        """The number of its microbatch."""
        return int(self.get("microbatch", 0))

    @property
    def chunk(self) -> int | None:
        """The chunk of the model that it belongs to; None without a pipeline, and outside of regions."""
        return self.get("chunk")

    @property
    def offset(self) -> int | None:
        """Where its workspace lies in the arena, in bytes; None before memory is assigned."""
        return self.get("at")

    @property
    def workspace(self) -> int:
        """Bytes of the segment's own values."""
        return int(self.get("workspace", 0))

    @property
    def heap(self) -> int:
        """Bytes that its kernels ask of the allocator."""
        return int(self.get("heap", 0))

    @property
    def reduction(self) -> str:
        """ "sum" or "max"."""
        return str(self.get("op", "sum"))

    @property
    def divisor(self) -> int:
        """The divisor of a sum over ranks, applied once."""
        return int(self.get("divisor", 1))

    @property
    def peer(self) -> Any:
        """The rank on the other end of a message."""
        return self.get("peer")

    @property
    def tag(self) -> int:
        """Which of the messages between two ranks it is."""
        return int(self.get("tag", 0))


def make_op(
    kind: str,
    reads: Iterable[Ref] = (),
    writes: Iterable[Ref] = (),
    *,
    axis: str | None = None,
    why: str = "",
    **attrs: int | str,
) -> Op:
    """An `Op` from plain arguments."""
    return Op(kind, tuple(reads), tuple(writes), axis, tuple(sorted(attrs.items())), why)
