"""simulation: all roles of a step on a machine of given rates, as a picture: who does what when, and the memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fzero.compile.lowered import Lowered
from fzero.compile.simulate import check_lowered, checked_rates
from fzero.cost.rates import Rates
from fzero.cost.step_time import LaneWork, StepTime, roles_spans
from fzero.hardware import Hardware
from fzero.ir.liveness import live_bytes
from fzero.ir.op import Op, StepPhase
from fzero.ir.program import Program
from fzero.ir.records import DEVICE

RANK = "compute"  # the row of what the rank itself does
COLOURS = {
    StepPhase.FORWARD: "#3b6fb6", StepPhase.BACKWARD: "#3f9a5f", StepPhase.RECOMPUTE: "#8fc3a0",
    StepPhase.REGION: "#3b8f96", StepPhase.OUTER: "#b07aa1", None: "#c58b3a",
}  # fmt: skip
WIDE, LEFT, HIGH, MEMORY_HIGH = 1200, 150, 16, 60  # pixels of the drawing, of its names, of a row, of a memory curve
NARROW = 0.4  # pixels; work that is closer and of one colour is drawn as one


@dataclass(frozen=True)
class SimulatedRole:
    """What one role does in a step. spans: all work of its lanes. memory: (seconds, bytes of the device), op after
    op of its program."""

    program: Program
    time: StepTime
    spans: Sequence[LaneWork]
    memory: Sequence[tuple[float, int]]

    @property
    def lanes(self) -> dict[str, list[LaneWork]]:
        """The work by lane, in order; that of the rank itself first."""
        found: dict[str, list[LaneWork]] = {RANK: []}
        for span in sorted(self.spans, key=lambda span: span.start):
            found.setdefault(span.lane or RANK, []).append(span)
        return found


@dataclass(frozen=True)
class Simulation:
    """A step of all roles, simulated together: the result of `fzero.simulation`. seconds: until the last role is done.

    `svg()` is a drawing, `chrome_trace()` a dict to be written as JSON, which ui.perfetto.dev opens.
    """

    roles: Mapping[int, SimulatedRole]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return max(role.time.seconds for role in self.roles.values())

    def chrome_trace(self) -> dict[str, Any]:
        """A process for each role, a thread for each of its lanes, a counter for its memory; times in microseconds."""
        events: list[dict[str, Any]] = []
        for number, role in self.roles.items():
            events.append(_event("M", "process_name", number, args={"name": f"role {number}"}))
            for thread, (lane, spans) in enumerate(role.lanes.items()):
                events.append(_event("M", "thread_name", number, thread, args={"name": lane}))
                events += [_slice(role.program.ops[span.op], span, number, thread) for span in spans]
            events += [_event("C", "memory", number, ts=at * 1e6, args={"bytes": n}) for at, n in role.memory]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def json(self) -> str:
        """The same as text."""
        return json.dumps(self.chrome_trace())

    def svg(self) -> str:
        """The drawing: a row for each lane of each role, below them the role's memory. Blue is forward, green backward,
        pale green recomputation, purple the update, yellow transfers and moves."""
        width = (WIDE - LEFT) / max(self.seconds, 1e-12)
        rows, y = [f'<text x="0" y="12">{self.seconds:.4g} s a step (predicted)</text>'], 20
        for number, role in self.roles.items():
            for lane, spans in role.lanes.items():
                rows.append(f'<text x="0" y="{y + HIGH - 4}">role {number} {escape(lane)}</text>')
                rows += _rects(role.program.ops, spans, y, width)
                y += HIGH + 2
            most = max(held for _, held in role.memory)
            rows.append(f'<text x="0" y="{y + HIGH}">role {number}: {most / 1e9:.3g} GB</text>')
            rows.append(_curve(role.memory, most, y, width))
            y += MEMORY_HIGH + 10
        size = f'width="{WIDE}" height="{y}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
        return "\n".join([head, *rows, "</svg>"]) + "\n"


def simulation(lowered: Lowered, rates: Rates | Hardware | str | Path) -> Simulation:
    """A step of all roles, simulated together.

    lowered, rates: as in `fzero.simulate`, which raises the same errors.

    >>> import torch, fzero
    >>> spec = fzero.Spec(loss=lambda p, x: (x @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1))
    >>> lowered = fzero.lower(spec, {"w": torch.zeros(512, 512)}, torch.zeros(64, 512), world_size=8)
    >>> found = fzero.simulation(lowered, fzero.hardware.load("h100"))
    >>> found.seconds == fzero.simulate(lowered, fzero.hardware.load("h100")).seconds
    True
    >>> sorted(found.roles[0].lanes)
    ['compute', 'wire dp']
    """
    check_lowered("simulation", lowered)
    roles = {}
    for number, (time, spans, past) in roles_spans(lowered.programs, checked_rates(lowered, rates)).items():
        program = lowered.programs[number]
        roles[number] = SimulatedRole(program, time, spans, list(_memory(program, past)))
    return Simulation(roles)


def _memory(program: Program, past: Sequence[float]) -> Iterator[tuple[float, int]]:
    """(when, bytes of the device that are held): while an op runs its own needs too, then what is left."""
    levels = live_bytes(program.ops, program.buffers, lambda buffer: buffer.space == DEVICE)
    begins = [0.0, *past]
    for op, begin, end, level in zip(program.ops, begins, past, levels, strict=False):
        here = program.space(op) == DEVICE
        yield begin, level + (op.workspace + op.heap) * here
        yield end, level


def _event(ph: str, name: str, role: int, thread: int = 0, **more: Any) -> dict[str, Any]:
    return {"ph": ph, "name": name, "pid": role, "tid": thread, **more}


def _slice(op: Op, span: LaneWork, role: int, thread: int) -> dict[str, Any]:
    facts = {"op": span.op, "kind": op.kind, "why": op.why, "microbatch": op.microbatch}
    return _event(
        "X", _name(op), role, thread, ts=span.start * 1e6, dur=(span.stop - span.start) * 1e6, cat=op.kind, args=facts
    )


def _name(op: Op) -> str:
    """Of a run its phase, of a transfer what it fills."""
    return str(op.phase or op.kind) if op.computes else f"{op.kind} {op.target}"


def _rects(ops: Sequence[Op], spans: Sequence[LaneWork], y: int, width: float) -> Iterator[str]:
    """A rectangle for each piece of work; neighbours of one colour that touch are one."""

    def place(span: LaneWork) -> tuple[float, float]:
        return LEFT + span.start * width, LEFT + span.stop * width

    drawn: list[tuple[float, float, str, str]] = []
    for span in spans:
        (start, stop), op = place(span), ops[span.op]
        colour, title = COLOURS[op.phase], f"{_name(op)} ({op.why})" if op.why else _name(op)
        if drawn and drawn[-1][2] == colour and (start - drawn[-1][1] < NARROW and stop - start < NARROW):
            drawn[-1] = (drawn[-1][0], stop, colour, drawn[-1][3])
        else:
            drawn.append((start, stop, colour, f"{title}, {span.start:.4g} to {span.stop:.4g} s"))
    for start, stop, colour, title in drawn:
        yield (
            f'<rect x="{start:.2f}" y="{y}" width="{max(stop - start, 0.2):.2f}" height="{HIGH}" fill="{colour}">'
            f"<title>{escape(title)}</title></rect>"
        )


def _curve(memory: Sequence[tuple[float, int]], most: int, y: int, width: float) -> str:
    """The area under the bytes that are held."""
    points = [(LEFT + at * width, y + MEMORY_HIGH * (1 - held / max(most, 1))) for at, held in memory]
    kept = [a for a, b in itertools.pairwise(points) if (round(a[0], 1), round(a[1])) != (round(b[0], 1), round(b[1]))]
    shown = " ".join(f"{x:.1f},{up:.1f}" for x, up in [*kept, points[-1]])
    bottom = y + MEMORY_HIGH
    return f'<polygon points="{LEFT},{bottom} {shown} {points[-1][0]:.1f},{bottom}" fill="#8a8f98" opacity="0.6"/>'
