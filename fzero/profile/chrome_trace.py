"""chrome_trace: a record as a trace for ui.perfetto.dev (and chrome://tracing): Chrome's trace event JSON.

A process is a rank, a thread a lane. Times are microseconds of the machine's monotonic clock, so the traces of ranks of
one machine fit together: `python -m fzero.profile runs/profile` writes those of a folder as one file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fzero.ir.liveness import live_bytes
from fzero.profile.record import StepRecord
from fzero.profile.span_rows import Lane, Span, lanes

MERGED = "all.trace.json"


def trace(record: StepRecord) -> dict[str, Any]:
    """The trace: a dict to be written as JSON."""
    whole = Span(f"step {record.step}", record.began, record.ended, "step", {"program": record.program.digest})
    inside = [
        Span("batch", record.began, record.start[0], "step"),
        Span("metrics", record.stop[-1], record.ended, "step"),
    ]
    events = [_event(record, "M", "process_name", args={"name": f"rank {record.rank}"})]
    events.append(_event(record, "M", "process_sort_index", args={"sort_index": record.rank}))
    number = 0
    for lane in [Lane("step", [[whole, *inside]]), *lanes(record)]:
        for i, row in enumerate(lane.rows):
            number += 1
            name = lane.name if i == 0 else f"{lane.name} {i + 1}"
            events.append(_event(record, "M", "thread_name", tid=number, args={"name": name}))
            events.append(_event(record, "M", "thread_sort_index", tid=number, args={"sort_index": number}))
            events += [_slice(record, span, number, lane.name) for span in row]
    return {"traceEvents": [*events, *_counters(record)], "displayTimeUnit": "ms"}


def _event(record: StepRecord, ph: str, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": ph, "name": name, "pid": record.rank, "tid": 0, **more}


def _slice(record: StepRecord, span: Span, tid: int, lane: str) -> dict[str, Any]:
    times = {"ts": span.start / 1e3, "dur": (span.stop - span.start) / 1e3}
    return _event(record, "X", span.name, tid=tid, cat=lane, **times, args=span.args)


def _counters(record: StepRecord) -> list[dict[str, Any]]:
    """Counter events: planned live bytes while an op runs and after it, and measured bytes, at each change."""
    events = []
    planned: list[tuple[int, int]] = []
    for start, stop, during, after in zip(
        record.start, record.stop, record.planned, live_bytes(record.program.ops, record.program.buffers), strict=True
    ):
        planned += [(start, during), (stop, after)]
    series = {"planned bytes": planned}
    if record.measured is not None:
        series["measured bytes"] = list(zip(record.start, record.measured, strict=True))
    for name, points in series.items():
        last = None
        for when, nbytes in points:
            if nbytes != last:
                events.append(_event(record, "C", name, ts=when / 1e3, args={"bytes": nbytes}))
            last = nbytes
    return events


def merge(folder: str | Path) -> Path:
    """Writes one file with the traces of all ranks in a folder, and returns its path. Raises ValueError if there is
    none."""
    paths = sorted(Path(folder).glob("rank*.trace.json"))
    if not paths:
        raise ValueError(f"{folder} holds no rank*.trace.json: call fzero.profile(state, batch, {str(folder)!r})")
    events = [event for path in paths for event in json.loads(path.read_text())["traceEvents"]]
    merged = Path(folder) / MERGED
    merged.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return merged
