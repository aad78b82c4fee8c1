"""kinds: one row for each kind of op: what it does, what travels, and how its values are known.

A new kind is a row here (`register`), a runner if it is neither a plain function on tensors nor a collective whose
record says what it does (`fzero.ir.collectives`), and a test. Text, liveness,
verification, the interpreter, the executor, the cost model, the profile and the mutation harness read the row.

| kind | reads -> writes | what it does |
|---|---|---|
| `run` | any -> any | executes a segment |
| `update` | any -> any | executes a segment that writes the state |
| `all_gather` | own slice -> whole bucket | every rank's slice, in rank order |
| `reduce_scatter` | whole bucket -> own slice | the sum over ranks, of the own slice |
| `all_reduce` | whole bucket -> whole bucket | the sum over ranks: a reduce-scatter, then an all-gather |
| `all_reduce_small` | any -> the same shape | the same for a value with no equal slices: every rank sends all of it |
| `all_to_all` | any -> the same size | equal parts, one for each rank; every rank gets each rank's part for it (of a
bucket the own slice of each, `Buffer.parts`) |
| `all_gather_values` | any -> N of it | every rank's value, whole, in rank order: the same on all (`Buffer.parts`) |
| `send`, `recv` | one -> nothing; nothing -> one | a message between two ranks |
| `move` | any -> the same in another space | brings a value from device, host or disk to another of them |
| `wait` | the target of a transfer | returns when the transfer has arrived |
| `settle` | the target of a transfer | returns when no other rank reads the sources of a waited-for transfer any more |
| `free` | buffers | the buffers hold nothing from here on |

The collectives work on buckets, of which slices are owned along an axis, and on values in no bucket, whose parts are
equal stretches of their elements.

A transfer (`transfers`) starts and returns at once; the `wait` on its target ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fzero.ir.collectives import ALL_GATHER, Collective, everything, own_part

ANY = 1 << 30  # references: as many as there are

Local = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object]


@dataclass(frozen=True, slots=True)
class OpKind:
    """A row. Every flag is False, and every count 0, unless the row says otherwise.

    num_reads, num_writes: the least and the most references.
    computes: executes the segment that the op names.
    transfers: starts a transfer, which a `wait` on its target ends.
    collective: what it does among all ranks of its axis, which take part in the same order; None where it is no
    collective.
    moves: the transfer stays on the rank and goes from one space to another, on the lane of the two.
    runs: for a kind that is a plain function on this rank's tensors: `runs(reads, writes)` fills `writes`.
    copies: the only write becomes a copy of the only read; `fzero.verify` knows its value by that.
    """

    name: str
    num_reads: tuple[int, int]
    num_writes: tuple[int, int]
    computes: bool = False
    transfers: bool = False
    collective: Collective | None = None
    moves: bool = False
    runs: Local | None = None
    copies: bool = False

    @property
    def gathers(self) -> bool:
        """Whether it brings the ranks' slices together."""
        return self.collective is not None and self.collective.term == "gathered"

    @property
    def exchanges(self) -> bool:
        """Whether it brings all ranks' values together, or the own slice of each."""
        return self.collective is not None and self.collective.term == "exchanged"

    @property
    def reduces(self) -> bool:
        """Whether it adds over ranks, or takes the largest."""
        return self.collective is not None and self.collective.combines

    @property
    def scatters(self) -> bool:
        """Whether a rank gets its own slice alone."""
        return self.collective is not None and self.collective.target == "slice"

    @property
    def small(self) -> bool:
        """Whether it reduces a value without equal slices: each rank sends all of it to each other rank."""
        return self.collective is not None and self.collective.combines and self.collective.source == "value"

    @property
    def scattered(self) -> str:
        """The kind that does the same for the own slice alone; "" where there is none."""
        return self.collective.scattered if self.collective is not None else ""

    @property
    def rate(self) -> str:
        """The measured kind that the cost of a collective is read from."""
        return self.collective.rate if self.collective is not None else ""

    def wire_bytes(self, whole: int, world: int) -> int:
        """Bytes that one rank sends: `whole` is the bytes of the whole buffer, `world` the ranks of the axis."""
        return self.collective.wire_bytes(whole, world) if self.collective is not None else 0

    def scratch(self, transport: str, numel: int, world: int) -> tuple[int, int] | None:
        """The shape of the receive buffer that a source of so many elements needs; None: it needs none."""
        return self.collective.scratch(transport, numel, world) if self.collective is not None else None


def _collective(name: str, record: Collective) -> OpKind:
    return OpKind(name, (1, 1), (1, 2 if record.combines else 1), transfers=True, collective=record)


OPS: dict[str, OpKind] = {
    kind.name: kind
    for kind in (
        OpKind("run", (0, ANY), (0, ANY), computes=True),
        OpKind("update", (0, ANY), (0, ANY), computes=True),
        _collective("all_gather", ALL_GATHER),
        _collective(
            "reduce_scatter", Collective("whole", "slice", own_part, rate="reduce_scatter", combines=True)
        ),
        _collective(
            "all_reduce",
            Collective("whole", "whole", own_part, rate="reduce_scatter", combines=True, scattered="reduce_scatter"),
        ),
        _collective(
            "all_reduce_small", Collective("value", "value", everything, rate="reduce_scatter", combines=True)
        ),
        _collective("all_to_all", Collective("whole", "whole", own_part, rate="all_gather")),  # no rate of its own yet
        _collective("all_gather_values", Collective("value", "whole", everything, rate="all_gather")),
        OpKind("send", (1, 1), (0, 0), transfers=True),
        OpKind("recv", (0, 0), (1, 1), transfers=True),
        OpKind("move", (1, 1), (1, 1), transfers=True, moves=True, copies=True),
        OpKind("wait", (1, 1), (0, 0)),
        OpKind("settle", (1, 1), (0, 0)),
        OpKind("free", (1, ANY), (0, 0)),
    )
}  # fmt: skip

UNKNOWN = OpKind("unknown", (0, ANY), (0, ANY))  # of a text that names no kind: the rule `form` refuses it


def of(name: str) -> OpKind:
    """The row of a kind; `UNKNOWN` where there is none.

    >>> of("all_reduce").wire_bytes(1024, 4)
    1536
    """
    return OPS.get(name, UNKNOWN)


@contextmanager
def register(kind: OpKind) -> Iterator[None]:
    """Knows one more kind while the context lasts. Raises ValueError where there is one of its name."""
    if kind.name in OPS:
        raise ValueError(f"there is a kind {kind.name!r} already")
    OPS[kind.name] = kind
    try:
        yield
    finally:
        del OPS[kind.name]
