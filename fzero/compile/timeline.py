"""timeline: the schedule of a pipeline, drawn."""

from __future__ import annotations

from collections.abc import Mapping

from fzero.pipeline import BACKWARD, EQUAL, FORWARD, INPUT, WEIGHT, Schedule

COLOURS = {FORWARD: "#3b6fb6", BACKWARD: "#3f9a5f", INPUT: "#3f9a5f", WEIGHT: "#8a8f98"}


def draw(schedule: Schedule, seconds: Mapping[str, float] = EQUAL, send: float = 0.0) -> str:
    """The timeline as a drawing: a row for each role, the number of the microbatch in each action, the idle share
    above. Paler: the chunks of a role after its first. `Schedule.timeline` explains the arguments."""
    slots = schedule.timeline(seconds, send)
    length = max((row[-1].stop for row in slots if row), default=1.0)
    width, high = 900 / length, 22
    rows = [
        f'<text x="0" y="12">{schedule.name}: idle {schedule.idle_share(seconds, send):.1%} '
        "(blue: forward, green: backward or its input half, grey: its weight half)</text>"
    ]
    first = {role: min(c for c, r in enumerate(schedule.role_of) if r == role) for role in set(schedule.role_of)}
    for role, row in enumerate(slots):
        y = 20 + role * (high + 4)
        rows.append(f'<text x="0" y="{y + 15}">role {role}</text>')
        for slot in row:
            x, w = 60 + slot.start * width, (slot.stop - slot.start) * width
            opacity = 1.0 if slot.action.chunk == first[role] else 0.55
            rows.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(w - 1, 0.5):.1f}" height="{high}" '
                f'fill="{COLOURS[slot.action.kind]}" opacity="{opacity}"><title>{slot.action} '
                f"{slot.start:g} to {slot.stop:g}</title></rect>"
            )
            if w > 14:
                rows.append(f'<text x="{x + 3:.1f}" y="{y + 15}" fill="white">{slot.action.microbatch}</text>')
    size = f'width="980" height="{30 + schedule.roles * (high + 4)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, *rows, "</svg>"]) + "\n"
