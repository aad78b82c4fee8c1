"""drawings: the schedule, the memory over the step, and the buckets of a program, each as an SVG.

x is time: seconds at the rates of a machine, or the number of the op if there are none. An op is drawn as a part of the
path of its lane and colour, so that a program of many thousand ops is a few paths. Each SVG holds its colours, so it
can stand alone in a page of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fzero.cost.memory import SHOWN
from fzero.explain.exposure import Spans, in_flight
from fzero.explain.held import pattern
from fzero.ir.liveness import live_bytes
from fzero.ir.op import Op
from fzero.ir.program import Program, lane
from fzero.ir.records import DEVICE, Bucket, Buffer
from fzero.profile.charts import bytes_text, time_text

WIDTH, LEFT, ROW, CHART = 1000, 110, 26, 180  # pixels of a drawing: its plot, its names, a lane, the memory
STEPS = 1500  # points of a curve at most
COLOURS = {
    "forward": "#4c8dd6", "backward": "#2f5fa8", "recompute": "#8fb7e6", "region": "#3b74bd", "update": "#4a9b6e",
    "other": "#9aa3b2", "gather": "#e0a23c", "reduce": "#a86ac0", "message": "#c9a56b", "move": "#7f8c5a",
    "wait": "#d9534f", "params": "#31688e", "optimizer": "#6a9bb8", "batch": "#b7cfdc", "gather buffers": "#e0a23c",
    "receive buffers": "#f0cf8e", "gradients": "#a86ac0", "activations": "#5aa77c", "staging": "#7f8c5a",
    "workspace": "#b9dcc6", "16-bit copies": "#5b8fb0",
}  # fmt: skip


def times(program: Program, spans: Spans | None) -> Spans:
    """When each op begins and ends: as given, or one unit for each op that is no mark."""
    if spans is not None:
        return spans
    found, now = [], 0.0
    for op in program.ops:
        after = now + (0.0 if op.is_free or op.is_settle else 0.4 if op.transfers or op.is_wait else 1.0)
        found.append((now, after))
        now = after
    return found


def colour(op: Op) -> str:
    """The name of an op's colour."""
    if op.is_update:
        return "update"
    if op.computes:
        return str(op.phase) if op.phase in COLOURS else "other"
    if op.moves:
        return "move"
    return "gather" if op.gathers else "reduce" if op.reduces else "message"


def lane_of(program: Program, op: Op) -> str:
    """The name of the lane that a transfer is on."""
    return "→".join(lane(program, op)) if op.moves else f"wire {op.axis}"


def lanes(program: Program) -> list[str]:
    """The names of the lanes, from the top."""
    return list(dict.fromkeys(["compute", *(lane_of(program, op) for op in program.ops if op.transfers)]))


def legend(names: Iterable[str]) -> str:
    """Colours and their names."""
    return " ".join(
        f'<span class="key"><i style="background:{COLOURS[name]}"></i>{escape(name)}</span>' for name in names
    )


def schedule(program: Program, spans: Spans | None) -> str:
    """The lanes of a step: what the rank computes and for how long it waits; below it, each transfer in flight."""
    at = times(program, spans)
    boxes: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in lanes(program)}
    for op, (start, stop) in zip(program.ops, at, strict=True):
        if op.computes or (op.is_wait and stop > start and spans is not None):
            boxes["compute"].setdefault("wait" if op.is_wait else colour(op), []).append((start, stop))
    for one in in_flight(program):
        op = program.ops[one.op]
        boxes[lane_of(program, op)].setdefault(colour(op), []).append((at[one.op][0], at[one.wait][1]))
    whole = max((stop for _, stop in at), default=1.0) or 1.0
    parts = []
    for row, (name, by_colour) in enumerate(boxes.items()):
        parts.append(f'<text x="4" y="{row * ROW + 17}">{escape(name)}</text>')
        for key, of in by_colour.items():
            path = "".join(f"M{x:g} {row * ROW + 3}h{w:g}v{ROW - 6}h-{w:g}z" for x, w in placed(of, whole))
            parts.append(
                f'<path fill="{COLOURS[key]}" stroke="#fff" stroke-width="0.3" d="{path}"><title>{key}</title></path>'
            )
    height = ROW * len(boxes)
    return drawing("schedule", height + 22, "".join(parts) + axis(whole, height, spans is not None), program, at)


def placed(boxes: Iterable[tuple[float, float]], whole: float) -> list[tuple[float, float]]:
    """(x, width) of boxes in the plot; those that lie on one another within a tenth of a pixel are one."""
    found: list[tuple[float, float]] = []
    for start, stop in boxes:
        x, width = round(LEFT + start / whole * WIDTH, 1), round(max((stop - start) / whole * WIDTH, 0.3), 1)
        if found and x + width <= sum(found[-1]) + 0.1:
            continue
        if found and x < found[-1][0] + found[-1][1] + 0.1 and width < 1:
            found[-1] = (found[-1][0], round(x + width - found[-1][0], 1))
            continue
        found.append((x, width))
    return found


def memory(program: Program, spans: Spans | None) -> str:
    """The bytes of the device over the step, stacked by kind; on top what each op needs only while it runs."""
    at = times(program, spans)
    whole = max((stop for _, stop in at), default=1.0) or 1.0
    layers = {kind: kind_bytes(program, kind) for kind in (*dict.fromkeys(SHOWN.values()), "other")}
    layers["workspace"] = [(op.workspace + op.heap) * (program.space(op) == DEVICE) for op in program.ops]
    chosen = kept([sum(column) for column in zip(*layers.values(), strict=True)])
    top = 1.05 * max((sum(layer[i] for layer in layers.values()) for i in chosen), default=1) or 1.0
    parts, below = [], [0.0] * len(chosen)
    for kind, layer in layers.items():
        above = [low + layer[i] for low, i in zip(below, chosen, strict=True)]
        if above != below:
            line = curve(chosen, above, at, whole, top)
            back = curve(chosen, below, at, whole, top)[::-1]
            path = "L".join(f"{x:g} {y:g}" for x, y in [*line, *back])
            size = bytes_text(max(layer[i] for i in chosen))
            parts.append(f'<path fill="{COLOURS[kind]}" d="M{path}z"><title>{kind}, up to {size}</title></path>')
        below = above
    for share in (0.5, 1.0):
        y = CHART - CHART * share / 1.05
        parts.append(f'<text x="4" y="{y + 10:.0f}">{bytes_text(top / 1.05 * share)}</text>')
        parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#888" stroke-dasharray="2 4" fill="none"/>')
    return drawing("memory", CHART + 22, "".join(parts) + axis(whole, CHART, spans is not None), program, at)


def kind_bytes(program: Program, kind: str) -> list[int]:
    """The bytes of the device after each op in buffers of a kind, as the account names it."""

    def counts(buffer: Buffer) -> bool:
        return buffer.space == DEVICE and SHOWN.get(buffer.kind, "other") == kind

    return live_bytes(program.ops, program.buffers, counts)


def kept(heights: Sequence[int]) -> list[int]:
    """The ops whose height is drawn: all, or of each of `STEPS` stretches the highest."""
    size = -(-len(heights) // STEPS) or 1
    parts = (range(i, min(i + size, len(heights))) for i in range(0, len(heights), size))
    return [max(part, key=heights.__getitem__) for part in parts]


def curve(
    ops: Sequence[int], heights: Sequence[float], at: Spans, whole: float, top: float
) -> list[tuple[float, float]]:
    """The corners of a line of steps."""
    points, x = [], float(LEFT)
    for index, height in zip(ops, heights, strict=True):
        y, after = round(CHART * (1 - height / top), 1), round(LEFT + at[index][1] / whole * WIDTH, 1)
        points += [(x, y), (after, y)]
        x = after
    return points


def buckets(program: Program) -> str:
    """The buckets, equal ones of equal layers as one row: leaves in them, and how the parameters lie on the ranks."""
    rows: dict[tuple[str, tuple[tuple[int, str], ...]], list[Bucket]] = {}
    for bucket in program.buckets.values():
        key = tuple((slot.stop - slot.start, pattern(slot.path)) for slot in bucket.slots)
        rows.setdefault((pattern(bucket.name), key), []).append(bucket)
    longest = max((bucket.length for bucket in program.buckets.values()), default=1)
    parts = [bucket_row(program, n, of, longest) for n, of in enumerate(rows.values())]
    height = len(rows) * 46
    return (
        f'<svg id="buckets" viewBox="0 0 {LEFT + WIDTH + 10} {height}" role="img" font-family="system-ui, sans-serif" '
        f'font-size="11" fill="currentColor">{"".join(parts)}</svg>'
    )


def bucket_row(program: Program, number: int, of: Sequence[Bucket], longest: int) -> str:
    """One row: its name, its leaves, and the slices of the ranks below them."""
    first, y = of[0], number * 46
    params = next((b for b in program.buffers.values() if b.bucket == first.name and b.kind == "param"), None)
    count = f"{len(of)} x {pattern(first.name)}" if len(of) > 1 else first.name
    slices = program.mesh.size(params.sharded) if params is not None and params.sharded else 1
    how = f"{slices:,} slices over {params.sharded}" if params is not None and params.sharded else "replicated"
    scale = (
        max(0.08, (first.length / longest) ** 0.5) * WIDTH / max(first.length, 1)
    )  # areas of a root: small ones show
    found = [f'<text x="4" y="{y + 12}">{escape(count)}: {first.length:,} elements, {how}</text>']
    for n, slot in enumerate(first.slots):
        x, width = 4 + slot.start * scale, max((slot.stop - slot.start) * scale, 0.5)
        shape = "x".join(map(str, slot.shape))
        found.append(
            f'<rect x="{x:.1f}" y="{y + 17}" width="{width:.1f}" height="14" fill="{("#31688e", "#6a9bb8")[n % 2]}" '
            f'class="slot" data-bucket="{escape(first.name)}"><title>{escape(slot.path)} {shape}</title></rect>'
        )
    shown = min(slices, 64)
    for n in range(shown):
        width = first.length * scale / shown
        found.append(
            f'<rect x="{4 + n * width:.1f}" y="{y + 32}" width="{width:.1f}" height="5" '
            f'fill="{("#e0a23c", "#f0cf8e")[n % 2]}"><title>{slices:,} equal slices</title></rect>'
        )
    return "".join(found)


def axis(whole: float, y: int, seconds: bool) -> str:
    """Five marks of the axis of time."""
    marks = []
    for n in range(6):
        x = LEFT + WIDTH * n / 5
        text = time_text(whole * n / 5 * 1e9) if seconds else ""
        label = f'<text x="{x:.0f}" y="{y + 17}" text-anchor="middle">{text}</text>'
        marks.append(f'<path d="M{x:.0f} {y}v5" stroke="#888"/>{label}')
    return "".join(marks)


def drawing(name: str, height: int, body: str, program: Program, at: Spans) -> str:
    """An SVG as wide as its page. Its plot begins at `data-left` and is `data-width` wide, of `data-whole`."""
    whole = max((stop for _, stop in at), default=1.0) or 1.0
    return (
        f'<svg id="{name}" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 40} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="currentColor" data-left="{LEFT}" '
        f'data-width="{WIDTH}" data-row="{ROW}" data-whole="{whole:g}">'
        f"<title>{name} of {len(program.ops)} ops</title>{body}</svg>"
    )
