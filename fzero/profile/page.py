"""page: a record as one HTML file, which needs nothing but itself: no network, light and dark, fit to be printed.

From the top: what the step was and what its time went into; the timeline and the memory over one axis of time; what took
longest, by op, by segment and by bucket; what the memory was at its planned peak; the program. The file is well-formed
XML, so that other programs can read it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files

from fzero.profile import charts
from fzero.profile.charts import bytes_text, time_text
from fzero.profile.record import COMPUTES, HELD, LIVE, Record, phase
from fzero.program import op_text

LONGEST = 20
SHARES = {"computing": "forward", "waiting": "wait", "transfers' own work": "own", "the rest": "free"}


def page(record: Record) -> str:
    """The page."""
    title = f"step {record.step} on rank {record.rank} of {record.program.world_size}"
    names, strips = charts.timeline(record)
    scale, curve = charts.memory(record)
    parts = [
        f"<h1>{title}</h1>",
        facts(record),
        "<h2>Where the time goes</h2>",
        shares(record),
        '<p class="tools"><label>zoom <input id="zoom" type="range" min="0" max="8" step="0.1" value="0"/></label>'
        f" {legend(('forward', 'backward', 'recompute', 'update', 'other', 'wait', 'gather', 'reduce'))}</p>",
        f'<div class="plots"><div class="side">{names}<div class="axis"></div>{scale}</div>',
        f'<div class="scroll"><div id="plot">{strips}{charts.axis(record)}{curve}</div></div></div>',
        '<pre id="shown">Point at a box, or at the memory below it.</pre>',
        "<h2>Where the memory goes</h2>",
        f'<p class="tools">planned: {legend((*HELD, *LIVE))} <span class="key peak-key">planned peak</span> '
        '<span class="key measured-key">measured</span></p>',
        at_peak(record),
        f"<h2>The {LONGEST} ops that took longest</h2>",
        longest(record),
        "<h2>By segment</h2>",
        by_segment(record),
        "<h2>By bucket</h2>",
        by_bucket(record),
        f"<h2>The program</h2><details><summary>{len(record.program.ops)} ops</summary>",
        f"<pre>{escape(str(record.program))}</pre></details>",
    ]
    return _document(f"fzero: {title}", "\n".join(parts))


def _document(title: str, body: str) -> str:
    style, script = ((files("fzero.profile") / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body>\n{body}\n"
        f"<script>\n{script}</script></body></html>\n"
    )


# --- what the step was ----------------------------------------------------------------------------------------------


def facts(record: Record) -> str:
    """The header's figures."""
    program, account = record.program, record.lowered.memory
    peak = "not measured: another profiler was at work" if record.measured_peak is None else bytes_text(record.measured_peak)  # fmt: skip
    rows = {
        "step time": time_text(record.ended - record.began),
        "mesh": " ".join(f"{axis}={size}" for axis, size in program.mesh),
        "zero": record.stage,
        "batch": ", ".join(record.batch),
        "microbatches": str(program.microbatches),
        "sent by this rank": f"{bytes_text(record.sent_bytes)} in {len(record.transfers)} transfers",
        "planned peak": f"{bytes_text(account.peak)} (of it the state {bytes_text(account.state)}, one arena {bytes_text(program.arena_bytes)})",  # fmt: skip
        "measured peak": peak,
        "page faults": f"{record.page_faults:,}",
        "machine": record.machine,
        "program": f"{program.digest}, {len(program.ops)} ops, {len(program.segments)} segments",
    }
    body = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in rows.items())
    return f"<dl>{body}</dl>"


def shares(record: Record) -> str:
    """A bar of what the rank did with the step's time, and each part in words."""
    whole = sum(record.shares.values())
    bars, keys = [], []
    for name, ns in record.shares.items():
        bars.append(f'<div class="{SHARES[name]}" style="width:{ns / whole:.4%}"></div>')
        keys.append(f'<span class="key {SHARES[name]}">{name} {time_text(ns)} ({ns / whole:.1%})</span>')
    notes = [
        "Computing: runs and updates. Waiting: this thread slept in a wait. Transfers' own work: starting them, and what "
        "a wait did itself (adding what came, copying). The rest: freeing memory, the batch, the metrics, the clock."
    ]
    if record.cpu_ns is not None:
        computed = (i for i, one in enumerate(record.program.ops) if one.kind in COMPUTES)
        notes.append(f"In ops that compute this thread was off its core for {time_text(sum(map(record.asleep, computed)))}.")  # fmt: skip
    else:
        notes.append("Times are the device's; what a wait did itself counts as waiting.")
    return f'<div class="bar">{"".join(bars)}</div><p>{" ".join(keys)}</p><p class="note">{" ".join(notes)}</p>'


def legend(names: Iterable[str]) -> str:
    return " ".join(f'<span class="key {name.replace(" ", "-")}">{name}</span>' for name in names)


# --- tables -----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns whose head begins with # are numbers."""
    kinds = [' class="number"' if name.startswith("#") else "" for name in head]
    top = "".join(f"<th{kind}>{escape(name.lstrip('#'))}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def at_peak(record: Record) -> str:
    """The largest buffers at the planned peak."""
    op = record.lowered.memory.op
    one = record.program.ops[op]
    rows = [(name, kind, bytes_text(nbytes)) for name, kind, nbytes in charts.peak_rows(record)]
    title = f"<p>Planned to be most at op {op}: {escape(f'{one.kind} {one.why}')}. Alive there:</p>"
    return title + table(["buffer", "kind", "#bytes"], rows)


def longest(record: Record) -> str:
    whole = record.ended - record.began
    order = sorted(range(len(record.program.ops)), key=lambda i: -record.duration(i))[:LONGEST]
    rows = [
        (str(i), one.kind, one.why, record.bucket(i) or "", time_text(record.duration(i)), f"{record.duration(i) / whole:.1%}",
         _short(op_text(one)))
        for i in order for one in [record.program.ops[i]]
    ]  # fmt: skip
    return table(["#op", "kind", "why", "bucket", "#time", "#of the step", "text"], rows)


def by_segment(record: Record) -> str:
    """Compute, one row for each segment and reason: equal layers share a segment, so its ops are as many as layers."""
    ops = [i for i, one in enumerate(record.program.ops) if one.kind in COMPUTES]
    groups = _groups(ops, lambda i: str(record.program.ops[i].get("segment")))
    whole = record.ended - record.began
    rows = []
    for key, members in sorted(groups.items(), key=lambda item: -_total(record, item[1])):
        total = _total(record, members)
        names = list(dict.fromkeys(record.program.ops[i].why.partition(" (")[0] for i in members))
        what = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        parts = " ".join(dict.fromkeys(phase(record.program.ops[i]) for i in members))
        slept = "" if record.cpu_ns is None else time_text(sum(map(record.asleep, members)))
        rows.append((key, parts, what, str(len(members)), time_text(total), time_text(total / len(members)), slept, f"{total / whole:.1%}"))  # fmt: skip
    return table(["segment", "part", "for", "#ops", "#time", "#each", "#off its core", "#of the step"], rows)


def by_bucket(record: Record) -> str:
    """Transfers, one row for each bucket and kind: was what was sent early enough hidden behind compute?"""
    groups = _groups(range(len(record.transfers)), lambda i: (record.transfers[i].bucket, record.transfers[i].kind))
    rows = []
    for (bucket, kind), members in sorted(groups.items(), key=lambda item: -_waited(record, item[1])):
        found = [record.transfers[i] for i in members]
        flight = sum(record.stop[one.wait] - record.start[one.op] for one in found)
        sent = sum(one.wire_bytes for one in found)
        own = sum(record.duration(one.op) + record.duration(one.wait) - record.asleep(one.wait) for one in found)
        waited = _waited(record, members)
        via = " ".join(dict.fromkeys(one.via for one in found))
        rate = f"{bytes_text(sent / flight * 1e9)}/s" if flight else ""
        rows.append((bucket or "(none)", kind, via, str(len(found)), bytes_text(sent), time_text(flight), rate, time_text(own), time_text(waited)))  # fmt: skip
    head = ["bucket", "kind", "via", "#transfers", "#sent", "#in flight", "#at least", "#own work", "#waited"]
    return table(head, rows) if rows else "<p>No transfers: a world of one.</p>"


def _groups(items: Iterable[int], key: Callable[[int], object]) -> dict[object, list[int]]:
    found: dict[object, list[int]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _total(record: Record, members: Iterable[int]) -> int:
    return sum(map(record.duration, members))


def _waited(record: Record, members: Iterable[int]) -> int:
    return sum(record.asleep(record.transfers[i].wait) for i in members)


def _short(text: str, most: int = 160) -> str:
    return text if len(text) <= most else text[:most] + " ..."
