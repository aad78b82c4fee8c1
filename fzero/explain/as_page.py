"""as_page: an explanation as one HTML file that needs no other file and no network.

The drawings stand in the page as SVG. The ops follow as data, once: names of buffers and reasons are numbered, so that
a program of many thousand ops stays small. A click on an op, here or in the drawings, shows what it reads and writes,
its bytes, and why it is there; a click on a buffer shows each op that touches it.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from fzero.cost.memory import SHOWN, account
from fzero.explain import drawings
from fzero.explain.as_text import leaf_report, program_report, roles_of
from fzero.explain.exposure import Spans, in_flight
from fzero.explain.leaf_road import road
from fzero.explain.subject import Subject
from fzero.ir.liveness import live_bytes
from fzero.ir.program import Program, lane_bytes, moved_bytes, wire_bytes
from fzero.ir.records import DTYPE_NAMES, shape_text
from fzero.profile.charts import bytes_text, time_text

MOST_OPS = 40_000  # that the page holds one by one

STEP_COLOURS = ("forward", "region", "backward", "recompute", "update", "wait", "gather", "reduce", "message", "move")
MEMORY_COLOURS = (*dict.fromkeys(SHOWN.values()), "workspace")


def page(
    subject: Subject, role: int, spans: Spans | None = None, hardware: str | None = None, leaf: str | None = None
) -> str:
    """The page of one role's program. leaf: a leaf whose road is shown too."""
    program = subject.programs[role]
    title = f"{subject.name} on {program.world_size:,} ranks"
    report = program_report(program, spans, subject.lowered, role)
    parts = [
        f"<h1>{escape(title)}</h1>",
        facts(program, subject, spans, hardware),
        "<h2>The step, over time</h2>",
        f'<div class="wide">{drawings.schedule(program, spans)}</div>',
        f'<p class="note">{drawings.legend(STEP_COLOURS)}</p>',
        '<p class="note">Click a box: its op is shown below. The upper lane is what the rank computes'
        + (", and in red how long it waits" if spans is not None else "; without --hardware, each op has one width")
        + ". A lower lane holds each transfer from its start to its wait.</p>",
        "<h2>Memory, over the step</h2>",
        f'<div class="wide">{drawings.memory(program, spans)}</div>',
        f'<p class="note">{drawings.legend(MEMORY_COLOURS)}</p>',
        '<div id="op"><p class="note">No op is chosen yet.</p></div>',
        '<p><label>op, buffer or leaf <input id="find" placeholder="12, params:blocks.3, blocks/3/w"/></label></p>',
        '<div id="found"></div>',
        "<h2>Buckets</h2>",
        f'<div class="wide">{drawings.buckets(program)}</div>',
        '<p class="note">Blue: leaves in a bucket, equal layers as one row. Yellow: the slices of the ranks.</p>',
        f"<h2>In words</h2><pre>{escape(report)}</pre>",
    ]
    if leaf is not None:
        found = road(subject.programs, leaf)
        text = leaf_report(subject.programs[found.role], found, subject.lowered)
        parts.append(f"<h2>The road of {escape(leaf)}</h2><pre>{escape(text)}</pre>")
    if subject.lowered is not None:
        parts.append(f"<h2>Decisions</h2><pre>{escape(str(subject.lowered.decisions))}</pre>")
    return document(f"fzero: {title}", "\n".join(parts), data(program, spans))


def facts(program: Program, subject: Subject, spans: Spans | None, hardware: str | None) -> str:
    """The header's figures."""
    at = account(program)
    sent = sum(wire_bytes(program, op) for op in program.ops)
    rows = {
        "mesh": str(program.mesh),
        "planned peak": f"{bytes_text(at.peak)} per rank",
        "state": f"{bytes_text(at.state)} per rank",
        "sent": f"{bytes_text(sent)} per step, by one rank",
        "program": f"{program.digest}, {len(program.ops):,} ops",
    }
    if spans:
        rows["predicted step"] = f"{time_text(spans[-1][1] * 1e9)} on {hardware}"
    if moved := lane_bytes(program):
        rows["moved"] = ", ".join(f"{lane} {bytes_text(size)}" for lane, size in moved.items())
    if len(subject.programs) > 1:
        rows["role"] = f"{program.role} of {len(subject.programs)}; peaks: {roles_of(subject.accounts)}"
    body = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in rows.items())
    return f"<dl>{body}</dl>"


def data(program: Program, spans: Spans | None) -> dict[str, Any]:
    """The content of the page's script.

    `ops` are [kind, reads, writes, why, bytes, live, start, attributes]; reads and writes are numbers of `buffers`, and
    kind, why and attributes are numbers of `texts`. `flights` are (op, wait, lane) of the transfers. Of more than
    `MOST_OPS` ops the first and the last are there, and `cut` says which are not.
    """
    at, live = drawings.times(program, spans), live_bytes(program.ops, program.buffers)
    texts: dict[str, int] = {}
    buffers: dict[str, int] = {}

    def text(of: str) -> int:
        return texts.setdefault(of, len(texts))

    def numbers(refs: Any) -> list[int]:
        return list(dict.fromkeys(buffers.setdefault(ref.name, len(buffers)) for ref in refs))

    half = MOST_OPS // 2
    cut = [half, len(program.ops) - half] if len(program.ops) > MOST_OPS else [0, 0]
    ops = []
    for index, op in enumerate(program.ops):
        if cut[0] <= index < cut[1]:
            continue
        attrs = " ".join(f"{k}={v}" for k, v in ((("axis", op.axis),) if op.axis else ()) + op.attrs)
        nbytes = wire_bytes(program, op) or moved_bytes(program, op)
        start = float(f"{at[index][0]:.6g}")
        ops.append(
            [
                text(op.kind),
                numbers(op.reads),
                numbers(op.writes),
                text(op.why),
                nbytes,
                live[index],
                start,
                text(attrs),
            ]
        )
    shown = [program.buffers[name] for name in buffers]
    facts = [
        [b.name, f"{DTYPE_NAMES[b.dtype]}[{shape_text(b.shape)}] {b.kind}", b.nbytes, b.bucket or ""] for b in shown
    ]
    slots = {name: [slot.path for slot in bucket.slots] for name, bucket in program.buckets.items()}
    rows = drawings.lanes(program)
    flights = [[f.op, f.wait, rows.index(drawings.lane_of(program, program.ops[f.op]))] for f in in_flight(program)]
    return {"texts": list(texts), "buffers": facts, "slots": slots, "ops": ops, "flights": flights, "cut": cut}


def document(title: str, body: str, content: dict[str, Any]) -> str:
    """The file: style, body, data and script."""
    style, script = (
        (files("fzero.explain") / name).read_text(encoding="utf-8") for name in ("explain.css", "explain.js")
    )
    packed = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{packed}</script>\n<script>\n{script}</script></body></html>\n'
    )
