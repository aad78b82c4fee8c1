"""step_time: how long a program takes on one rank, by given rates.

The rank computes, op after op. The wire moves one transfer after the other, in the order they start, and so does each
lane between device, host and disk. While a segment runs, the transfer at the head of the wire advances by `hidden` of
that time, the move at the head of a lane by `lane_hidden`. A wait takes the time that is left of its transfer and of
those before it; meanwhile the others go on.

Beside a CUDA device updates on the host are work of a lane of their own, `host`. A move of what they write waits for
them, and so does the end of the step.

A segment takes the sum over its nodes. A matmul, a convolution or an attention takes its operations (2 m n k) at
`flops`. Another op takes the bytes that it reads and writes at `memory_bytes` a second, a view nothing.

Left out are ranks that come late, ops too small for any rate (some microseconds each), caches, and that reads and
writes share a disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fzero.cost.flops import flops, operands, results
from fzero.cost.rates import Rates
from fzero.ir import fx_nodes
from fzero.ir.op import Op
from fzero.ir.program import Program, lane, moved_bytes, named_bytes
from fzero.ir.records import DISK, HOST

aten = torch.ops.aten
WIRE, UPDATES = "wire", "host"
DAY = 86_400
Work = tuple[int, str]


@dataclass(frozen=True)
class StepTime:
    """A step on one rank, as predicted.

    seconds: of the step. compute: of its segments. busy: by lane (`wire`, `disk→host`, `host` for updates there), the
    seconds that it works. waited: by lane, the seconds that the rank stands still for it. written: bytes that the step
    writes to disk.
    """

    seconds: float
    compute: float
    busy: Mapping[str, float]
    waited: Mapping[str, float]
    written: int

    @property
    def written_a_day(self) -> float:
        """Bytes that go to the rank's disk in a day of such steps."""
        return self.written * DAY / self.seconds if self.seconds else 0.0

    def days(self, endurance: float) -> float:
        """The days until a drive has taken the bytes that its maker allows (a "600 TBW" drive: 600e12), if this rank
        alone writes to it; infinite where nothing is written."""
        return endurance / self.written_a_day if self.written_a_day else float("inf")

    def __str__(self) -> str:
        lanes = [
            f"{name:>12}  busy {busy:.4g} s ({busy / self.seconds:.0%}), waited for {self.waited.get(name, 0.0):.3g} s"
            for name, busy in self.busy.items()
        ]
        written = [f"{self.written_a_day / 1e12:.3g} TB written to disk a day"] if self.written else []
        return "\n".join([f"{self.seconds:.4g} s a step, {self.compute:.4g} s of them computing", *lanes, *written])


def seconds(program: Program, rates: Rates) -> float:
    """The seconds that one rank needs for the program."""
    return step_time(program, rates).seconds


def step_time(program: Program, rates: Rates) -> StepTime:
    """The time of a step on the first rank of its role, by lane."""
    walk = _Clock(program, rates)
    for op in program.ops:
        walk.take(op)
    return walk.done()


@dataclass
class _Clock:
    """The clock of a rank on its way through a program. queues: by lane, the seconds left of each piece of work, in
    order, by its number and what it writes. Only the methods here write the fields."""

    program: Program
    rates: Rates
    clock: float = 0.0
    compute: float = 0.0
    written: int = 0
    started: int = 0
    queues: dict[str, dict[Work, float]] = field(default_factory=lambda: {WIRE: {}})
    busy: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    by_segment: dict[str, float] = field(default_factory=dict)

    def take(self, op: Op) -> None:
        """Goes past an op."""
        program, rates = self.program, self.rates
        if op.computes and rates.host_bytes and program.space(op) == HOST:
            moved = sum(named_bytes(program, ref) for ref in (*op.reads, *op.writes))
            self._start(UPDATES, op.writes[0].name, moved / rates.host_bytes)
            for ref in op.writes[1:]:
                self._start(UPDATES, ref.name, 0.0)
        elif op.computes:
            key = op.segment
            if key not in self.by_segment:
                self.by_segment[key] = _compute(program.segments[key], rates)
            self.clock += self.by_segment[key]
            self.compute += self.by_segment[key]
            for name, queue in self.queues.items():
                _advance(queue, (rates.hidden if name == WIRE else rates.lane_hidden) * self.by_segment[key])
        elif op.row.runs is not None:
            moved = sum(program.buffers[ref.name].nbytes for ref in (*op.reads, *op.writes))
            self.clock += moved / rates.memory_bytes
        elif (record := op.row.collective) is not None:
            source, target = (program.buffers[ref.name].nbytes for ref in (op.reads[0], op.writes[0]))
            self._start(WIRE, op.target, rates.transfer(record.rate, record.whole_bytes(source, target)))
        elif way := "→".join(lane(program, op)):
            self._wait_for_update(op.reads[0].name)
            nbytes, rate = moved_bytes(program, op), rates.lanes.get(way)
            self.written += nbytes if program.space(op) == DISK else 0
            self._start(way, op.target, nbytes / rate if rate else 0.0)
        elif op.is_wait:
            self._wait(op.target)

    def done(self) -> StepTime:
        """The figures, once the last update on the host is done."""
        if updates := self.queues.get(UPDATES):
            self._pass(UPDATES, list(updates)[-1])
        return StepTime(self.clock, self.compute, self.busy, self.waited, self.written)

    def _start(self, lane: str, target: str, taken: float) -> None:
        self.started += 1
        self.queues.setdefault(lane, {})[self.started, target] = taken
        self.busy[lane] = self.busy.get(lane, 0.0) + taken

    def _wait(self, target: str) -> None:
        """Waits for the first transfer in flight into a buffer."""
        for name, queue in self.queues.items():
            if name != UPDATES and (found := [work for work in queue if work[1] == target]):
                return self._pass(name, found[0])

    def _wait_for_update(self, name: str) -> None:
        """Waits for the last update on the host that writes a buffer."""
        if found := [work for work in self.queues.get(UPDATES, ()) if work[1] == name]:
            self._pass(UPDATES, found[-1])

    def _pass(self, lane: str, until: Work) -> None:
        """Goes past a piece of work, and those before it in its queue."""
        queue = self.queues[lane]
        order = list(queue)
        taken = sum(queue.pop(work) for work in order[: order.index(until) + 1])
        for other in self.queues.values():
            if other is not queue:
                _advance(other, taken)
        self.clock += taken
        self.waited[lane] = self.waited.get(lane, 0.0) + taken


def _advance(queue: dict[Work, float], budget: float) -> None:
    """Takes `budget` seconds off the work, the first pieces first. In place."""
    for work, left in queue.items():
        queue[work] = max(left - budget, 0.0)
        budget = max(budget - left, 0.0)


def _compute(gm: fx.GraphModule, rates: Rates) -> float:
    """The seconds that a segment takes."""
    return sum(_node(node, rates) for node in gm.graph.nodes if fx_nodes.is_compute(node))


def _node(node: fx.Node, rates: Rates) -> float:
    if fx_nodes.is_view(node):
        return 0.0
    work = flops(node)
    if work:
        return work / rates.flops[min(4, max(2, results(node)[0].dtype.itemsize))]
    moved = sum(x.numel() * x.element_size() for x in (*results(node), *operands(node)))
    return moved / rates.memory_bytes
