"""op_price: the seconds of an op, and of a program the events that a clock sees: what is computed, started, waited for.

A segment takes the sum over its nodes (`node_work`). A matmul takes its tiles' time where the machine has tensor cores
for it (`tensor_cores`), else, as a convolution, its operations (2 m n k) at `flops`, less where a side is small; an
attention its own at `attention`. Another op takes the bytes that it reads and writes at `memory_bytes` a second, a view
nothing. No call takes less than `launch`, and each kernel adds `overhead`.

An event names no buffer: a wait says the place, in its lane's queue, of the work that it is for. So two programs whose
events are equal take the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from torch import fx

from fzero.cost.fused_loops import fused_works
from fzero.cost.node_work import seconds, works
from fzero.cost.rates import SEND, Rates
from fzero.ir.mesh import parts_of
from fzero.ir.op import Op
from fzero.ir.program import Program, lane, moved_bytes, named_bytes
from fzero.ir.records import DISK, HOST

WIRE, UPDATES = "wire", "host"
OVER = -1  # the place of work that is no longer in its queue
Way = tuple[str, int, int]  # of messages, which arrive in the order in which they are sent: axis, sender, receiver


class Does(Enum):
    """What an event does on the rank or on a lane."""

    COMPUTE = "computes a segment; transfers go on beside it"
    STAND = "keeps the rank busy; nothing goes on beside it"
    START = "puts work at the end of a lane's queue"
    PASS = "goes past a piece of work in a lane's queue, and those before it"
    SEND = "sends a message on a lane of its own"
    RECEIVE = "says that a message will come"
    ARRIVE = "waits for a message"


@dataclass(frozen=True, slots=True)
class Event:
    """What an op does, as a clock sees it. seconds: of the work. place: of what is waited for, in its lane's queue,
    or `OVER`; of messages it may be counted from the last, -1. way: of a message. written: bytes that go to disk."""

    does: Does
    lane: str = ""
    seconds: float = 0.0
    place: int = 0
    way: Way | None = None
    written: int = 0


def priced(program: Program, rates: Rates) -> list[tuple[Event, ...]]:
    """By op of a program, its events. Raises KeyError for a transfer without a rate."""
    price = _Prices(program, rates)
    return [tuple(price.of(op)) for op in program.ops]


def op_seconds(program: Program, op: Op, rates: Rates) -> tuple[str, float]:
    """(the lane that an op works on, the seconds that it takes with nothing beside it); the lane "" is the rank itself.
    0 for marks. Raises KeyError for a transfer without a rate."""
    if op.computes and rates.host_bytes and program.space(op) == HOST:
        moved = sum(named_bytes(program, ref) for ref in (*op.reads, *op.writes))
        return UPDATES, max(rates.launch, moved / rates.host_bytes)
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
    return way, max(rates.launch, moved_bytes(program, op) / rates.lanes[way]) if way in rates.lanes else 0.0


@dataclass
class _Prices:
    """The queues of the lanes on the way through a program. queues: by lane, in order, the buffer that each piece of
    work fills. lanes: by buffer, where the last work that fills it was put. messages: by lane, the numbers of those in
    flight. arrivals: by buffer, its messages in flight. Only the methods here write the fields."""

    program: Program
    rates: Rates
    by_segment: dict[str, float] = field(default_factory=dict)
    queues: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    lanes: dict[str, str] = field(default_factory=dict)
    messages: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    arrivals: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    sent: int = 0

    def of(self, op: Op) -> Iterator[Event]:
        """The events of the next op."""
        if op.is_wait:
            yield from self._wait(op.target)
            return
        if op.computes and op.segment in self.by_segment:
            way, taken = "", self.by_segment[op.segment]
        else:
            way, taken = op_seconds(self.program, op, self.rates)
        if way == UPDATES:
            for number, ref in enumerate(op.writes):
                yield self._start(UPDATES, ref.name, 0.0 if number else taken)
        elif op.computes:
            self.by_segment[op.segment] = taken
            yield Event(Does.COMPUTE, "", taken)
        elif op.is_message:
            yield self._message(op, way, taken)
        elif way:
            written = 0
            if op.moves:
                queue = self.queues[UPDATES]
                if op.reads[0].name in queue:  # a move of what an update there writes waits for the last of them
                    yield self._pass(UPDATES, len(queue) - 1 - queue[::-1].index(op.reads[0].name))
                written = moved_bytes(self.program, op) if self.program.space(op) == DISK else 0
            yield self._start(way, op.target, taken, written)
        elif taken:
            yield Event(Does.STAND, "", taken)

    def _message(self, op: Op, way: str, taken: float) -> Event:
        own = self.program.role or 0
        key = (str(op.axis), own, op.peer) if op.is_send else (str(op.axis), op.peer, own)
        self.sent += 1
        self.messages[way].append(self.sent)
        self.arrivals[op.target].append((way, self.sent))
        return Event(Does.SEND if op.is_send else Does.RECEIVE, way, taken, way=key)

    def _start(self, way: str, target: str, taken: float, written: int = 0) -> Event:
        self.lanes[target] = way
        self.queues[way].append(target)
        return Event(Does.START, way, taken, written=written)

    def _pass(self, way: str, place: int) -> Event:
        del self.queues[way][: place + 1]
        return Event(Does.PASS, way, place=place)

    def _wait(self, target: str) -> Iterator[Event]:
        """Waits for the first transfer in flight into a buffer. It may be over: then nothing is passed."""
        if pending := self.arrivals.get(target):
            way, number = pending.pop(0)
            place, count = self.messages[way].index(number), len(self.messages[way])
            del self.messages[way][place]
            place -= count * (2 * place >= count)  # counted from the nearer end, where it is the same in a longer step
            yield Event(Does.ARRIVE, way, place=place)
            return
        for way, queue in self.queues.items():
            if way != UPDATES and target in queue:
                yield self._pass(way, queue.index(target))
                return
        if target in self.lanes:
            yield Event(Does.PASS, self.lanes[target], place=OVER)


def _compute(gm: fx.GraphModule, rates: Rates) -> float:
    """The seconds that a segment takes."""
    return sum(seconds(work, rates) for work in (fused_works(gm) if rates.fuses else works(gm.graph)))
