"""kinds: one row for each kind of op: what it does, what travels, and how its values are known.

A new kind is a row here (`register`), a runner if it is not a plain function on tensors, and a test. Text, liveness,
verification, the interpreter, the executor, the cost model, the profile and the mutation harness read the row.

| kind | reads -> writes | what it does |
|---|---|---|
| `run` | any -> any | executes a segment |
| `update` | any -> any | executes a segment that writes the state |
| `all_gather` | own slice -> whole bucket | every rank's slice, in rank order |
| `reduce_scatter` | whole bucket -> own slice | the sum over ranks, of the own slice |
| `all_reduce` | whole bucket -> whole bucket | the sum over ranks: a reduce-scatter, then an all-gather |
| `all_reduce_small` | any -> the same shape | the same for a value with no equal slices: every rank sends all of it |
| `all_to_all` | any -> the same size | equal parts, one for each rank; every rank gets each rank's part for it |
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

ANY = 1 << 30  # references: as many as there are

Local = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object]


@dataclass(frozen=True, slots=True)
class OpKind:
    """A row. Every flag is False, and every count 0, unless the row says otherwise.

    num_reads, num_writes: the least and the most references.
    computes: executes the segment that the op names.
    transfers: starts a transfer, which a `wait` on its target ends.
    collective: all ranks of the axis take part, in the same order.
    gathers, reduces, scatters, exchanges: what a collective does to the slices of ranks.
    small: a collective on a value without equal slices: each rank sends all of it to each other rank.
    moves: the transfer stays on the rank and goes from one space to another, on the lane of the two.
    changes_target: the target is a source of the transfer too, for the second half of an all-reduce.
    scattered: the kind that does the same for the own slice alone; "" where there is none.
    slices_sent: slices of 1/N of the whole that one rank sends to N - 1 others.
    rate: the measured kind that the cost of this transfer is read from (`fzero.cost.rates`).
    runs: for a kind that is a plain function on this rank's tensors: `runs(reads, writes)` fills `writes`.
    copies: the only write becomes a copy of the only read; `fzero.verify` knows its value by that.
    """

    name: str
    num_reads: tuple[int, int]
    num_writes: tuple[int, int]
    computes: bool = False
    transfers: bool = False
    collective: bool = False
    gathers: bool = False
    reduces: bool = False
    scatters: bool = False
    exchanges: bool = False
    small: bool = False
    moves: bool = False
    changes_target: bool = False
    scattered: str = ""
    slices_sent: int = 0
    rate: str = ""
    runs: Local | None = None
    copies: bool = False

    def wire_bytes(self, whole: int, world: int) -> int:
        """Bytes that one rank sends: `whole` is the bytes of the whole buffer, `world` the ranks of the axis."""
        if self.small:
            return whole * (world - 1)
        return self.slices_sent * whole * (world - 1) // world


OPS: dict[str, OpKind] = {
    kind.name: kind
    for kind in (
        OpKind("run", (0, ANY), (0, ANY), computes=True),
        OpKind("update", (0, ANY), (0, ANY), computes=True),
        OpKind(
            "all_gather", (1, 1), (1, 1), transfers=True, collective=True, gathers=True, slices_sent=1,
            rate="all_gather",
        ),
        OpKind(
            "reduce_scatter", (1, 1), (1, 2), transfers=True, collective=True, reduces=True, scatters=True,
            slices_sent=1, rate="reduce_scatter",
        ),
        OpKind(
            "all_reduce", (1, 1), (1, 2), transfers=True, collective=True, reduces=True, changes_target=True,
            scattered="reduce_scatter", slices_sent=2, rate="reduce_scatter",
        ),
        OpKind(
            "all_reduce_small", (1, 1), (1, 2), transfers=True, collective=True, reduces=True, small=True,
            rate="reduce_scatter",
        ),
        OpKind(
            "all_to_all", (1, 1), (1, 1), transfers=True, collective=True, exchanges=True, slices_sent=1,
            rate="all_gather",
        ),
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
