"""page: a record as one HTML file that needs no other file and no network. It has a dark mode and can be printed.

From the top: the step and its shares of time; the timeline and the memory over one axis of time; the memory at its
planned peak; the longest ops, segments and buckets; the program. The file is well-formed XML, so that other programs
can read it too.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files

from fzero.ir.mesh import PIPELINE
from fzero.profile import charts, tables
from fzero.profile.charts import bytes_text, time_text
from fzero.profile.record import HELD, LIVE, StepRecord

PHASES = ("forward", "backward", "recompute", "update", "other")  # of computing ops

SHARES = {"computing": "forward", "waiting": "wait", "transfers' own work": "own", "the rest": "free"}


def page(record: StepRecord) -> str:
    """The page."""
    title = f"step {record.step} on {record.program.mesh.label(record.rank)} of {record.program.world_size}"
    names, strips = charts.timeline(record)
    scale, curve = charts.memory(record)
    parts = [
        f"<h1>{title}</h1>",
        facts(record),
        "<h2>Where the time goes</h2>",
        shares(record),
        *pipeline(record),
        '<p class="tools"><label>zoom <input id="zoom" type="range" min="0" max="8" step="0.1" value="0"/></label>'
        f" {legend((*PHASES, 'wait', 'all_gather', 'reduce_scatter', 'all_reduce'))}</p>",
        f'<div class="plots"><div class="side">{names}<div class="axis"></div>{scale}</div>',
        f'<div class="scroll"><div id="plot">{strips}{charts.axis(record)}{curve}</div></div></div>',
        '<pre id="shown">Point at a box, or at the memory below it.</pre>',
        "<h2>Where the memory goes</h2>",
        f'<p class="tools">planned: {legend((*HELD, *LIVE))} <span class="key peak-key">planned peak</span> '
        '<span class="key measured-key">measured</span></p>',
        tables.at_peak(record),
        f"<h2>The {tables.LONGEST} ops that took longest</h2>",
        tables.longest(record),
        "<h2>By segment</h2>",
        tables.by_segment(record),
        "<h2>By bucket</h2>",
        tables.by_bucket(record),
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


# --- facts of the step ----------------------------------------------------------------------------------------------


def facts(record: StepRecord) -> str:
    """The header's figures."""
    program, account = record.program, record.memory
    measured = "not measured: another profiler was at work"
    if record.measured_peak is not None:
        measured = bytes_text(record.measured_peak)
    parts = f"the state {bytes_text(account.state)}, the arena {bytes_text(program.arena_bytes)}"
    rows = {
        "step time": time_text(record.ended - record.began),
        "mesh": str(program.mesh),
        "zero": record.stage,
        "batch": ", ".join(record.batch),
        "microbatches": str(program.microbatches),
        "sent by this rank": f"{bytes_text(record.sent_bytes)} in {len(record.transfers)} transfers",
        "planned peak": f"{bytes_text(account.peak)}, of it {parts}",
        "measured peak": measured,
        "page faults": f"{record.page_faults:,}",
        "machine": record.machine,
        "program": f"{program.digest}, {len(program.ops)} ops, {len(program.segments)} segments",
    }
    body = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in rows.items())
    return f"<dl>{body}</dl>"


def shares(record: StepRecord) -> str:
    """A bar of the rank's activities over the step's time, and each part in words."""
    whole = sum(record.shares.values())
    bars, keys = [], []
    for name, ns in record.shares.items():
        bars.append(f'<div class="{SHARES[name]}" style="width:{ns / whole:.4%}"></div>')
        keys.append(f'<span class="key {SHARES[name]}">{name} {time_text(ns)} ({ns / whole:.1%})</span>')
    notes = [
        "Computing: runs and updates. Waiting: this thread slept in a wait. Transfers' own work: starting them, and",
        "what a wait did itself (adding, copying). The rest: freeing memory, the batch, the metrics, the clock.",
    ]
    if record.cpu_ns is None:
        notes.append("Times are the device's; what a wait did itself counts as waiting.")
    else:
        lost = {"computing": 0, "transfers": 0}
        for i, op in enumerate(record.program.ops):
            if not op.is_wait:
                lost["computing" if op.computes else "transfers"] += record.asleep(i)
        notes.append(
            f"Of the computing this thread was off its core for {time_text(lost['computing'])}, and of starting"
        )
        notes.append(f"transfers for {time_text(lost['transfers'])}: other threads or processes ran there.")
    return f'<div class="bar">{"".join(bars)}</div><p>{" ".join(keys)}</p><p class="note">{" ".join(notes)}</p>'


def pipeline(record: StepRecord) -> list[str]:
    """The pipeline's order of work, as it is for equal times, and what this rank waited for other roles; nothing
    without one."""
    schedule = record.lowered.schedule
    if schedule is None:
        return []
    whole = record.ended - record.began
    waited = sum(record.asleep(t.wait) for t in record.transfers if record.program.ops[t.op].axis == PIPELINE)
    role, roles = record.program.role, len(schedule.orders)
    text = (
        f"Role {role} of {roles}. It waited for other roles for {time_text(waited)}, {waited / whole:.1%} of the step. "
        f"If forward, input and weight halves took equal times, {schedule.idle_share():.1%} would be idle:"
    )
    return [f"<p>{text}</p>", f'<div class="scroll">{record.lowered.timeline()}</div>']


def legend(names: Iterable[str]) -> str:
    """The colours and their names."""
    return " ".join(f'<span class="key {name.replace(" ", "-")}">{name}</span>' for name in names)
