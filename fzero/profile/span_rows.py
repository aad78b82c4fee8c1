"""span_rows: a record as rows of spans: the things that go on beside one another.

The rank's own thread does one thing at a time: it computes, it waits, or it starts transfers and frees memory. Every op
is one span of one of these three lanes. A transfer is a span of a lane for its kind. It lasts from the start of the op
that starts it to the end of the wait that ends it. If two transfers are in flight at one time, one gets another row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fzero.ir.kinds import OPS
from fzero.ir.program import op_text, wire_bytes
from fzero.ir.records import LANES, Ref
from fzero.profile.record import StepRecord, leaves, phase

OWN = ("compute", "waiting", "starts and frees")
MOVES = tuple("→".join(way) for way in LANES)
KINDS = (*(name for name, row in OPS.items() if row.collective), "send/recv", *MOVES)  # a lane each


@dataclass(frozen=True)
class Span:
    """A stretch of time from `start` to `stop` (ns). `phase` selects its colour, `args` are shown beside it."""

    name: str
    start: int
    stop: int
    phase: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lane:
    """Rows of spans that do not overlap."""

    name: str
    rows: Sequence[Sequence[Span]]


def lanes(record: StepRecord) -> list[Lane]:
    """Returns the lanes of a record: the rank's own three, then one for each kind of transfer and way of moves."""
    own: dict[str, list[Span]] = {name: [] for name in OWN}
    for i, op in enumerate(record.program.ops):
        lane = "compute" if op.computes else "waiting" if op.is_wait else "starts and frees"
        name = op.why if lane != "starts and frees" else f"{op.kind} {op.why}"
        own[lane].append(Span(name or op.kind, record.start[i], record.stop[i], phase(op), op_args(record, i)))
    all_lanes = [Lane(name, [spans]) for name, spans in own.items() if spans]
    for kind in KINDS:
        spans = [transfer_span(record, i) for i, op in enumerate(record.transfers) if op.kind == kind]
        if spans:
            all_lanes.append(Lane(kind, rows(spans)))
    return all_lanes


def rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in as few rows as hold them without overlap.

    >>> [[s.name for s in row] for row in rows([Span("a", 0, 5, ""), Span("b", 2, 7, ""), Span("c", 5, 9, "")])]
    [['a', 'c'], ['b']]
    """
    packed: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        row = next((row for row in packed if row[-1].stop <= span.start), None)
        if row is None:
            packed.append(row := [])
        row.append(span)
    return packed


def transfer_span(record: StepRecord, index: int) -> Span:
    """Returns the span of transfer number `index`."""
    op = record.transfers[index]
    args = {
        "why": record.program.ops[op.op].why,
        **{k: v for k, v in op_args(record, op.op).items() if k in ("op", "text", "bucket", "leaves", "wire_bytes")},
        "via": op.via,
        "wait": op.wait,
        "waited_us": record.duration(op.wait) / 1e3,
    }
    return Span(op.bucket or op.name, record.start[op.op], record.stop[op.wait], op.kind, args)


def op_args(record: StepRecord, index: int) -> dict[str, Any]:
    """Returns the known facts of an op, by name."""
    program, op = record.program, record.program.ops[index]
    args: dict[str, Any] = {"op": index, "text": op_text(op)}
    if op.computes:
        args["segment"] = op.segment
        args["read_bytes"] = sum(_bytes(record, ref) for ref in op.reads)
        args["written_bytes"] = sum(_bytes(record, ref) for ref in op.writes)
    if (bucket := record.bucket(index)) is not None:
        args["bucket"], args["leaves"] = bucket, _listed(leaves(program, op))
    if wire := wire_bytes(program, op):
        args["wire_bytes"] = wire
    args["planned_bytes"] = record.planned[index]
    if record.measured is not None:
        args["measured_bytes"] = record.measured[index]
    if record.cpu_ns is not None:
        args["asleep_us"] = record.asleep(index) / 1e3
    return args


def _bytes(record: StepRecord, ref: Ref) -> int:
    start, stop = record.program.local_range(ref, record.rank)
    return (stop - start) * record.program.buffers[ref.name].dtype.itemsize


def _listed(paths: Sequence[str], most: int = 8) -> str:
    return " ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")
