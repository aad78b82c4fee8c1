"""step_time: how long a program takes on one rank, by given rates, and the programs of a pipeline's roles together.

The rank computes, op after op. Each mesh axis has a wire, which moves one transfer after the other, in the order they
start; so has each lane between device, host and disk. While a segment runs, the transfer at the head of a wire advances
by `hidden` of that time, the move at the head of a lane by `lane_hidden`. A wait takes the time that is left of its
transfer and of those before it; meanwhile the others go on. A transfer over several axes at once is on the wire of the
outermost, which has the slowest links.

Messages between roles have a lane of their own each way, and pass beside all else. Of roles together a message arrives
when its sender has sent it. Of one role alone, as if the sender sent it when the receive was posted.

Beside a CUDA device updates on the host are work of a lane of their own, `host`. A move of what they write waits for
them, and so does the end of the step.

A segment takes the sum over its nodes. A matmul or a convolution takes its operations (2 m n k) at `flops`, less where
a side is small; an attention its own at `attention`. Another op takes the bytes that it reads and writes at
`memory_bytes` a second, a view nothing. No call takes less than `launch`.

Left out are ranks that come late, caches, and that reads and writes share a disk.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fzero.cost.flops import flops, operands, results
from fzero.cost.rates import SEND, Rates
from fzero.errors import FzeroError
from fzero.ir import fx_nodes
from fzero.ir.mesh import parts_of
from fzero.ir.op import Op
from fzero.ir.op_info import of
from fzero.ir.program import Program, lane, moved_bytes, named_bytes, op_text
from fzero.ir.records import DISK, HOST

aten = torch.ops.aten
WIRE, UPDATES = "wire", "host"
DAY = 86_400
Work = tuple[int, str]
Way = tuple[str, int, int, int]  # of a message: the axis, sender, receiver, tag
Mail = dict[Way, list[float]]


@dataclass(frozen=True)
class Arrival:
    """A message in flight. number: which one of its way. at: when it arrives; None: its sender says."""

    lane: str
    way: Way
    number: int
    at: float | None


@dataclass(frozen=True)
class StepTime:
    """A step on one rank, as predicted.

    seconds: of the step. compute: of its segments. busy: by lane (`wire dp`; of messages `wire pp out`, `wire pp in`;
    `disk→host`; `host` for updates there), the seconds that it works. waited: by lane, the seconds that the rank stands
    still for it. written: bytes that the step writes to disk.
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
    """The time of a step on the first rank of its role, by lane. Of a role of a pipeline: if no other role is late."""
    walk = _Clock(program, rates)
    for op in program.ops:
        walk.take(op)
    return walk.done()


def roles_time(programs: Mapping[int, Program], rates: Rates) -> dict[int, StepTime]:
    """The same of each role of a pipeline, by its number, together: who waits for a message waits for its sender.

    Raises FzeroError where roles wait for one another for ever, of which no verified program is.
    """
    return {role: clock.done() for role, clock in _together(programs, rates).items()}


def op_spans(programs: Mapping[int, Program], rates: Rates) -> dict[int, list[tuple[float, float]]]:
    """By role, of each op when the rank comes to it and when it goes on, in seconds from the start of the step. Of a
    wait the difference is the time for which the rank stands still: the transfer is exposed for so long."""
    return {role: clock.spans for role, clock in _together(programs, rates).items()}


def _together(programs: Mapping[int, Program], rates: Rates) -> dict[int, _Clock]:
    """The clocks of all roles at the end of the step."""
    mail: Mail = defaultdict(list)
    clocks = {role: _Clock(program, rates, mail) for role, program in programs.items()}
    left = {role: deque(program.ops) for role, program in programs.items()}
    while any(left.values()):
        before = sum(map(len, left.values()))
        for role, clock in clocks.items():
            while left[role] and clock.ready(left[role][0]):
                clock.take(left[role].popleft())
        if sum(map(len, left.values())) == before:
            stuck = "; ".join(f"role {role} at {op_text(ops[0])}" for role, ops in left.items() if ops)
            raise FzeroError(f"the roles wait for one another: {stuck}")
    return clocks


def op_seconds(program: Program, op: Op, rates: Rates) -> tuple[str, float]:
    """(the lane that an op works on, the seconds that it takes with nothing beside it); the lane "" is the rank itself.
    0 for marks. Raises KeyError for a transfer without a rate."""
    if op.computes and rates.host_bytes and program.space(op) == HOST:
        return UPDATES, sum(named_bytes(program, ref) for ref in (*op.reads, *op.writes)) / rates.host_bytes
    if op.computes:
        return "", _compute(program.segments[op.segment], rates)
    if op.row.runs is not None:
        return "", sum(program.buffers[ref.name].nbytes for ref in (*op.reads, *op.writes)) / rates.memory_bytes
    if op.is_message:
        nbytes = program.buffers[op.target].nbytes
        return f"{WIRE} {op.axis} {'out' if op.is_send else 'in'}", rates.transfer(SEND, nbytes, str(op.axis), 2)
    if (record := op.row.collective) is not None:
        source, target = (program.buffers[ref.name].nbytes for ref in (op.reads[0], op.writes[0]))
        whole = record.whole_bytes(source, target)
        axis = str(op.axis)
        ranks = program.mesh.size(axis)
        outermost = parts_of(program.mesh.in_order(axis))[0]
        return f"{WIRE} {outermost}", rates.transfer(op.kind, whole, axis, ranks)
    way = "→".join(lane(program, op))
    return way, moved_bytes(program, op) / rates.lanes[way] if way in rates.lanes else 0.0


@dataclass
class _Clock:
    """The clock of a rank on its way through a program. queues: by lane, the seconds left of each piece of work, in
    order, by its number and what it writes. spans: of each op, when it began and ended. mail: when each message of all
    roles arrives, by axis, sender, receiver and tag; None: those of others are never late. ends: by lane of messages,
    when its last one is through. arrivals: by buffer, its messages in flight. Only the methods here write the
    fields."""

    program: Program
    rates: Rates
    mail: Mail | None = None
    clock: float = 0.0
    compute: float = 0.0
    written: int = 0
    started: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)
    queues: dict[str, dict[Work, float]] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    by_segment: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    arrivals: dict[str, list[Arrival]] = field(default_factory=lambda: defaultdict(list))
    received: Counter[Way] = field(default_factory=Counter)

    def take(self, op: Op) -> None:
        """Goes past an op."""
        began = self.clock
        self._take(op)
        self.spans.append((began, self.clock))

    def _take(self, op: Op) -> None:
        if op.is_wait:
            self._wait(op.target)
            return
        if op.computes and op.segment in self.by_segment:
            way, taken = "", self.by_segment[op.segment]
        else:
            way, taken = op_seconds(self.program, op, self.rates)
        if way == UPDATES:
            self._start(UPDATES, op.writes[0].name, taken)
            for ref in op.writes[1:]:
                self._start(UPDATES, ref.name, 0.0)
        elif op.computes:
            self.by_segment[op.segment] = taken
            self.clock += taken
            self.compute += taken
            for name, queue in self.queues.items():
                part = self.rates.hidden if name.startswith(WIRE) else self.rates.lane_hidden
                _advance(queue, part * taken)
        elif op.is_message:
            self._message(op, way, taken)
        elif way:
            if op.moves:
                self._wait_for_update(op.reads[0].name)
                nbytes = moved_bytes(self.program, op)
                self.written += nbytes if self.program.space(op) == DISK else 0
            self._start(way, op.target, taken)
        else:
            self.clock += taken

    def ready(self, op: Op) -> bool:
        """Whether an op can be taken: a wait for a message only once its sender has sent it."""
        pending = self.arrivals.get(op.target) if op.is_wait else None
        return not pending or pending[0].at is not None or self._sent(pending[0]) is not None

    def _sent(self, message: Arrival) -> float | None:
        arrived = self.mail[message.way] if self.mail is not None else []
        return arrived[message.number] if len(arrived) > message.number else None

    def _message(self, op: Op, way: str, taken: float) -> None:
        """Starts a message, behind those before it on its way."""
        own = self.program.role or 0
        key = (str(op.axis), own, op.peer, op.tag) if op.is_send else (str(op.axis), op.peer, own, op.tag)
        self.busy[way] = self.busy.get(way, 0.0) + taken
        at: float | None = None
        if op.is_send or self.mail is None:
            at = self.ends[way] = max(self.clock, self.ends.get(way, 0.0)) + taken
        if op.is_send and self.mail is not None:
            self.mail[key].append(self.ends[way])
        self.arrivals[op.target].append(Arrival(way, key, self.received[key], at))
        self.received[key] += op.is_recv

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
        if pending := self.arrivals.get(target):
            message = pending.pop(0)
            arrives = self._sent(message) if message.at is None else message.at
            assert arrives is not None, "it was not `ready`"
            if arrives > self.clock:
                self._stand(message.lane, arrives - self.clock)
            return
        for name, queue in self.queues.items():
            if name != UPDATES and (found := [work for work in queue if work[1] == target]):
                self._pass(name, found[0])
                return

    def _wait_for_update(self, name: str) -> None:
        """Waits for the last update on the host that writes a buffer."""
        if found := [work for work in self.queues.get(UPDATES, ()) if work[1] == name]:
            self._pass(UPDATES, found[-1])

    def _pass(self, lane: str, until: Work) -> None:
        """Goes past a piece of work, and those before it in its queue."""
        queue = self.queues[lane]
        order = list(queue)
        taken = sum(queue.pop(work) for work in order[: order.index(until) + 1])
        self._stand(lane, taken)

    def _stand(self, lane: str, taken: float) -> None:
        """Stands still for a lane, while the others go on."""
        for name, queue in self.queues.items():
            if name != lane:
                _advance(queue, taken)
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
    return max(rates.launch, _at_rates(node, rates))


def _at_rates(node: fx.Node, rates: Rates) -> float:
    work = flops(node)
    if not work:
        moved = sum(x.numel() * x.element_size() for x in (*results(node), *operands(node)))
        return moved / rates.memory_bytes
    speed = rates.flops[min(4, max(2, results(node)[0].dtype.itemsize))]
    if rates.attention and of(node.target).attends:
        return work / min(speed, rates.attention)
    side = min((s for x in operands(node)[-2:] for s in x.shape[-2:]), default=0)
    return work / (speed * side / (side + rates.small_side)) if side and rates.small_side else work / speed
