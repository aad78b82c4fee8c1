"""charts: the timeline and the live-memory curve of a page, over one time axis.

Both are as wide as the plot they lie in, so a plot that is made wider shows more. The timeline is a strip for each lane
with a box for each span. The memory chart is an SVG: x is microseconds, y is bytes from the top. It has a stacked path
for each kind of planned memory, and lines for the planned peak and the measured bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from fzero.profile.record import HELD, LIVE, StepRecord
from fzero.profile.span_rows import Lane, Span, lanes

ROW, CHART = 24, 260  # pixels


def bytes_text(nbytes: float) -> str:
    """A number of bytes as text.

    >>> bytes_text(999), bytes_text(1_684_992), bytes_text(0)
    ('999 B', '1.68 MB', '0 B')
    """
    power = min(4, max(0, math.floor(math.log10(nbytes) / 3))) if nbytes >= 1 else 0
    return f"{nbytes / 1000**power:.{0 if power == 0 else 2}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def time_text(ns: float) -> str:
    """A time in ns as text.

    >>> time_text(1_234), time_text(12_345_678), time_text(2e9)
    ('1.2 µs', '12.35 ms', '2.000 s')
    """
    return f"{ns / 1e9:.3f} s" if ns >= 1e9 else f"{ns / 1e6:.2f} ms" if ns >= 1e6 else f"{ns / 1e3:.1f} µs"


def timeline(record: StepRecord) -> tuple[str, str]:
    """(the lanes' names, their strips): HTML for the column beside the plot, and for the plot."""
    names, strips = [], []
    for lane in lanes(record):
        height = ROW * len(lane.rows)
        busy = sum(s.stop - s.start for row in lane.rows for s in row)
        names.append(f'<div class="name" style="height:{height}px">{lane.name} <small>{time_text(busy)}</small></div>')
        strips.append(f'<div class="lane" style="height:{height}px">{"".join(_boxes(record, lane))}</div>')
    return "\n".join(names), "\n".join(strips)


def _boxes(record: StepRecord, lane: Lane) -> Iterator[str]:
    whole = record.ended - record.began
    for row, spans in enumerate(lane.rows):
        for span in spans:
            left, width = (span.start - record.began) / whole, (span.stop - span.start) / whole
            yield (
                f'<div class="box {span.phase.replace("/", "-")}" style="left:{left:.6%};width:{width:.6%};'
                f'top:{row * ROW}px" title="{attribute(describe(span))}">{escape(span.name)}</div>'
            )


def attribute(text: str) -> str:
    """Text with its line ends in an attribute's value."""
    return escape(text).replace("\n", "&#10;")


def describe(span: Span) -> str:
    """The text shown of a span: its name, its duration, and its known facts."""
    lines = [f"{span.name}: {time_text(span.stop - span.start)}"]
    for name, value in span.args.items():
        if name == "text":
            lines.append(value if len(value) < 600 else value[:600] + " ...")
        elif name.endswith("_bytes"):
            lines.append(f"{name[:-6].replace('_', ' ')} {bytes_text(value)}")
        elif name.endswith("_us"):
            lines.append(f"{name[:-3].replace('_', ' ')} {time_text(value * 1e3)}")
        elif value not in (None, ""):
            lines.append(f"{name} {value}")
    return "\n".join(lines)


def axis(record: StepRecord, ticks: int = 10) -> str:
    """The time axis: round times from the start of the step, in ms."""
    whole = record.ended - record.began
    marks = (f'<span style="left:{time / whole:.4%}">{time / 1e6:g} ms</span>' for time in _round(whole, ticks))
    return f'<div class="axis" data-ns="{whole}">{"".join(marks)}</div>'


# --- memory -------------------------------------------------------------------------------------------------------


def memory(record: StepRecord) -> tuple[str, str]:
    """(the scale, the chart): HTML for the column beside the plot, and for the plot."""
    reserved = record.held_bytes if record.measured is None else max(record.measured)
    top = 1.08 * max(record.memory.peak, reserved, record.measured_peak or 0, 1)
    whole = (record.ended - record.began) / 1e3
    paths, below = [], [0] * (2 * len(record.start) + 2)
    for kind in (*HELD, *LIVE):
        above = [b + h for b, h in zip(below, heights(record, kind), strict=True)]
        if any(above[i] != below[i] for i in range(len(above))):
            outline = [*_steps(record, above, top), *reversed(_steps(record, below, top))]
            paths.append(f'<path class="{_class(kind)}" d="M{" L".join(outline)} Z"><title>{kind}</title></path>')
        below = above
    limit = top - record.memory.peak
    paths.append(
        f'<path class="line peak" d="M0 {limit:.0f} L{whole:.3f} {limit:.0f}"><title>planned peak</title></path>'
    )
    if record.measured is not None:
        line = [y for nbytes in record.measured for y in (nbytes, nbytes)]
        points = _steps(record, [line[0], *line, line[-1]], top)
        paths.append(f'<path class="line measured" d="M{" L".join(points)}"><title>measured</title></path>')
    svg = (
        f'<svg class="memory" viewBox="0 0 {whole:.3f} {top:.0f}" preserveAspectRatio="none" '
        f'style="height:{CHART}px">{"".join(paths)}</svg>'
    )
    marks = "".join(f'<span style="bottom:{v / top:.2%}">{bytes_text(v)}</span>' for v in _round(top, 5))
    rules = "".join(f'<i style="bottom:{v / top:.2%}"></i>' for v in _round(top, 5))
    scale = f'<div class="scale" style="height:{CHART}px">{marks}</div>'
    return scale, f'<div class="lane chart" style="height:{CHART}px">{svg}{rules}{"".join(_hits(record))}</div>'


def heights(record: StepRecord, kind: str) -> list[int]:
    """Planned bytes of a kind before the first op, at the start and the end of each op, and at the step's end."""
    of = record.planned_kinds[kind]
    freed = [0 if kind == "workspace" else level for level in of]
    first = of[0] if kind in HELD else 0
    return [first, *(level for pair in zip(of, freed, strict=True) for level in pair), freed[-1]]


def _steps(record: StepRecord, values: Sequence[float], top: float) -> list[str]:
    """Points of a line through values at the step's start, each op's start and end, and the step's end."""
    times = [t for pair in zip(record.start, record.stop, strict=True) for t in pair]
    x = [(t - record.began) / 1e3 for t in (record.began, *times, record.ended)]
    points, last = [], values[0]
    for when, value in zip(x, values, strict=True):
        if value != last:
            points.append(f"{when:.3f} {top - last:.0f}")
        points.append(f"{when:.3f} {top - value:.0f}")
        last = value
    return points


def _hits(record: StepRecord) -> Iterator[str]:
    """The areas of the chart that react to the mouse: the memory of each op."""
    whole = record.ended - record.began
    for i, op in enumerate(record.program.ops):
        lines = [f"op {i}: {op.kind} {op.why}", f"planned {bytes_text(record.planned[i])}"]
        lines += [f"  {kind} {bytes_text(of[i])}" for kind, of in record.planned_kinds.items() if of[i]]
        if record.measured is not None:
            lines.append(f"measured {bytes_text(record.measured[i])}")
        left, width = (record.start[i] - record.began) / whole, record.duration(i) / whole
        text = attribute("\n".join(lines))
        yield f'<div class="hit" style="left:{left:.6%};width:{width:.6%}" title="{text}"></div>'


def _class(kind: str) -> str:
    return kind.replace(" ", "-")


def _round(top: float, most: int) -> list[float]:
    """At most so many round numbers from 0 up to `top`."""
    step = 10.0 ** math.floor(math.log10(top / most))
    step *= next(m for m in (1, 2, 5, 10) if top / (step * m) <= most)
    return [i * step for i in range(math.ceil(top / step))]
