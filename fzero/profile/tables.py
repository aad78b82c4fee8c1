"""tables: the longest ops, segments and buckets, and the memory at its planned peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from fzero.cost.memory import SHOWN
from fzero.ir.liveness import live_names
from fzero.ir.program import op_text
from fzero.ir.records import DEVICE, GIVEN, PERSISTENT
from fzero.profile.charts import bytes_text, time_text
from fzero.profile.record import StepRecord, TransferSpan, needs, phase

LONGEST = 20


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns whose head begins with # are numbers."""
    kinds = [' class="number"' if name.startswith("#") else "" for name in head]
    top = "".join(f"<th{kind}>{escape(name.lstrip('#'))}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def at_peak(record: StepRecord) -> str:
    """The largest buffers at the planned peak."""
    op = record.memory.op
    peak_op = record.program.ops[op]
    rows = [(name, kind, bytes_text(nbytes)) for name, kind, nbytes in peak_rows(record)]
    title = f"<p>Planned to be most at op {op}: {escape(f'{peak_op.kind} {peak_op.why}')}. Alive there:</p>"
    return title + table(["buffer", "kind", "#bytes"], rows)


def peak_rows(record: StepRecord, most: int = 12) -> Iterator[tuple[str, str, int]]:
    """Yields (name, kind, bytes) of the largest buffers at the planned peak; a column of the state is one row."""
    program, peak_op = record.program, record.memory.op
    sizes: dict[tuple[str, str], int] = {}
    for name in live_names(program.ops, program.buffers, peak_op):
        buffer = program.buffers[name]
        if buffer.space != DEVICE:
            continue
        whose = buffer.entry or (buffer.kind if buffer.kind in GIVEN else name)
        name = f"{whose} (held)" if buffer.kind in PERSISTENT else name
        key = (name, SHOWN.get(buffer.kind, "other"))
        sizes[key] = sizes.get(key, 0) + buffer.nbytes
    sizes[f"while op {peak_op} runs", "workspace"] = needs(program.ops[peak_op])
    order = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    yield from ((*key, nbytes) for key, nbytes in order[:most])
    if len(order) > most:
        yield f"{len(order) - most} more", "", sum(nbytes for _, nbytes in order[most:])


def longest(record: StepRecord) -> str:
    """The ops that took longest."""
    whole = record.ended - record.began
    rows = []
    for i in sorted(range(len(record.program.ops)), key=lambda i: -record.duration(i))[:LONGEST]:
        op, taken = record.program.ops[i], record.duration(i)
        text = op_text(op)
        text = text if len(text) <= 160 else text[:160] + " ..."
        rows.append((str(i), op.kind, op.why, record.bucket(i) or "", time_text(taken), f"{taken / whole:.1%}", text))
    return table(["#op", "kind", "why", "bucket", "#time", "#of the step", "text"], rows)


def by_segment(record: StepRecord) -> str:
    """A table of compute by segment. Equal layers share a segment, so a row has one op for each of those layers."""
    groups: dict[str, list[int]] = {}
    for i, op in enumerate(record.program.ops):
        if op.computes:
            groups.setdefault(op.segment, []).append(i)
    whole = record.ended - record.began
    rows = []
    for key, members in sorted(groups.items(), key=lambda item: -sum(map(record.duration, item[1]))):
        total = sum(map(record.duration, members))
        names = list(dict.fromkeys(record.program.ops[i].why for i in members))
        places = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        parts = " ".join(dict.fromkeys(phase(record.program.ops[i]) for i in members))
        slept = "" if record.cpu_ns is None else time_text(sum(map(record.asleep, members)))
        times = (time_text(total), time_text(total / len(members)), slept, f"{total / whole:.1%}")
        rows.append((key, parts, places, str(len(members)), *times))
    return table(["segment", "part", "for", "#ops", "#time", "#each", "#off its core", "#of the step"], rows)


def by_bucket(record: StepRecord) -> str:
    """A table of transfers by bucket: the time in flight, and the part of it that the rank spent waiting."""
    groups: dict[tuple[str, str, str], list[TransferSpan]] = {}
    for op in record.transfers:
        groups.setdefault((op.bucket or op.name, op.kind, op.via), []).append(op)
    rows = []
    for names, members in sorted(groups.items(), key=lambda item: -_waited(record, item[1])):
        flight = sum(record.stop[op.wait] - record.start[op.op] for op in members)
        sent = sum(op.wire_bytes for op in members)
        own = sum(record.duration(op.op) + record.duration(op.wait) - record.asleep(op.wait) for op in members)
        times = (time_text(flight), time_text(own), time_text(_waited(record, members)))
        rows.append((*names, str(len(members)), bytes_text(sent), *times))
    head = ["bucket", "kind", "via", "#transfers", "#sent", "#in flight", "#own work", "#waited for"]
    return table(head, rows) if rows else "<p>No transfers: a world of one.</p>"


def _waited(record: StepRecord, transfers: Iterable[TransferSpan]) -> int:
    return sum(record.asleep(transfer.wait) for transfer in transfers)
