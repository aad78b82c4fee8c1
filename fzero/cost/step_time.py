"""step_time: how long a program takes on one rank, by given rates, and the programs of a pipeline's roles together.

The rank computes, op after op. Each mesh axis has a wire, which moves one transfer after the other, in the order they
start; so has each lane between device, host and disk. While a segment runs, the transfer at the head of a wire advances
by `hidden` of that time, the move at the head of a lane by `lane_hidden`. A second of compute takes `tax` seconds while
a wire is busy. A wait takes the time that is left of its
transfer and of those before it; meanwhile the others go on. A transfer over several axes at once is on the wire of the
outermost, which has the slowest links.

Messages between roles have a lane of their own each way, and pass beside all else. Of roles together a message arrives
when its sender has sent it. Of one role alone, as if the sender sent it when the receive was posted.

Beside a CUDA device updates on the host are work of a lane of their own, `host`. A move of what they write waits for
them, and so does the end of the step.

Left out are ranks that come late, caches, and that reads and writes share a disk.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fzero.cost.op_price import OVER, UPDATES, WIRE, Does, Event, Way, priced
from fzero.cost.rates import Rates
from fzero.errors import FzeroError
from fzero.ir.program import Program, op_text

DAY = 86_400
Mail = dict[Way, list[float]]


@dataclass(frozen=True)
class Arrival:
    """A message in flight. number: which one of its way. at: when it arrives; None: its sender says."""

    way: Way
    number: int
    at: float | None


@dataclass(frozen=True, slots=True)
class LaneWork:
    """What an op, by its number, does on a lane ("": on the rank itself), from `start` to `stop`, in seconds."""

    op: int
    lane: str
    start: float
    stop: float


@dataclass(slots=True)
class QueuedWork:
    """A piece of work in a lane's queue: the seconds that are left, its op, when it began (None: not yet)."""

    left: float
    op: int
    begun: float | None = None


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
    return time_of(priced(program, rates), rates)


def time_of(steps: Iterable[tuple[Event, ...]], rates: Rates) -> StepTime:
    """The same of the events of a program."""
    clock = _Clock(rates)
    for events in steps:
        clock.take(events)
    return clock.done()


def roles_time(programs: Mapping[int, Program], rates: Rates) -> dict[int, StepTime]:
    """The same of each role of a pipeline, by its number, together: who waits for a message waits for its sender.

    Raises FzeroError where roles wait for one another for ever, of which no verified program is.
    """
    steps = {role: priced(program, rates) for role, program in programs.items()}
    found, left = times_of(steps, rates)
    _check_done(programs, left)
    return found


def roles_spans(
    programs: Mapping[int, Program], rates: Rates
) -> dict[int, tuple[StepTime, list[LaneWork], list[float]]]:
    """By role, the time of each, all that its lanes do, and when the rank is past each op. Raises as `roles_time`."""
    clocks, left = _played({role: priced(program, rates) for role, program in programs.items()}, rates)
    _check_done(programs, left)
    return {role: (clock.done(), clock.spans, clock.past) for role, clock in clocks.items()}


def op_spans(programs: Mapping[int, Program], rates: Rates) -> dict[int, list[tuple[float, float]]]:
    """By role, of each op when the rank comes to it and when it goes on, in seconds from the start of the step. Of a
    wait the difference is the time for which the rank stands still: the transfer is exposed for so long."""
    return {role: list(pairwise([0.0, *past])) for role, (_, _, past) in roles_spans(programs, rates).items()}


def _check_done(programs: Mapping[int, Program], left: Mapping[int, int]) -> None:
    if left:
        stuck = "; ".join(f"role {role} at {op_text(programs[role].ops[index])}" for role, index in left.items())
        raise FzeroError(f"the roles wait for one another: {stuck}")


def times_of(
    steps: Mapping[int, Sequence[tuple[Event, ...]]], rates: Rates
) -> tuple[dict[int, StepTime], dict[int, int]]:
    """(the time of each role, by the events of each; of the roles that wait for ever, the op at which they do)."""
    clocks, left = _played(steps, rates)
    return ({} if left else {role: clock.done() for role, clock in clocks.items()}), left


def _played(steps: Mapping[int, Sequence[tuple[Event, ...]]], rates: Rates) -> tuple[dict[int, _Clock], dict[int, int]]:
    """(the clock of each role past its events, what `times_of` says of those that wait for ever)."""
    mail: Mail = defaultdict(list)
    clocks = {role: _Clock(rates, mail) for role in steps}
    left = {role: deque(events) for role, events in steps.items()}
    while any(left.values()):
        before = sum(map(len, left.values()))
        for role, clock in clocks.items():
            while left[role] and clock.ready(left[role][0]):
                clock.take(left[role].popleft())
        if sum(map(len, left.values())) == before:
            return clocks, {role: len(steps[role]) - len(rest) for role, rest in left.items() if rest}
    return clocks, {}


@dataclass
class _Clock:
    """The clock of a rank on its way through the events of a program. queues: by lane, what is left of each piece of
    work, in order. spans: all that was done. past: when each op was passed. mail: when each message of all roles
    arrives, by its way; None: those of others are never late. ends: by lane of messages, when its last one is through.
    arrivals: by lane, its messages in flight. Only the methods here write the fields."""

    rates: Rates
    mail: Mail | None = None
    clock: float = 0.0
    compute: float = 0.0
    written: int = 0
    queues: dict[str, list[QueuedWork]] = field(default_factory=dict)
    spans: list[LaneWork] = field(default_factory=list)
    past: list[float] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    arrivals: dict[str, list[Arrival]] = field(default_factory=lambda: defaultdict(list))
    received: Counter[Way] = field(default_factory=Counter)

    def take(self, events: tuple[Event, ...]) -> None:
        """Goes past the events of an op."""
        for event in events:
            match event.does:
                case Does.COMPUTE:
                    self._compute(event.seconds)
                case Does.STAND:
                    self._does("", self.clock, self.clock + event.seconds)
                    self.clock += event.seconds
                case Does.START:
                    self.queues.setdefault(event.lane, []).append(QueuedWork(event.seconds, len(self.past)))
                    self.busy[event.lane] = self.busy.get(event.lane, 0.0) + event.seconds
                    self.written += event.written
                case Does.PASS if event.place != OVER:
                    self._pass(event.lane, event.place)
                case Does.SEND | Does.RECEIVE:
                    self._message(event)
                case Does.ARRIVE:
                    self._arrive(event)
        self.past.append(self.clock)

    def _does(self, lane: str, start: float, stop: float, op: int | None = None) -> None:
        self.spans.append(LaneWork(len(self.past) if op is None else op, lane, start, stop))

    def ready(self, events: tuple[Event, ...]) -> bool:
        """Whether an op can be taken: a wait for a message only once its sender has sent it."""
        waits = [self.arrivals[event.lane][event.place] for event in events if event.does is Does.ARRIVE]
        return all(message.at is not None or self._sent(message) is not None for message in waits)

    def done(self) -> StepTime:
        """The figures, once the last update on the host is done."""
        if updates := self.queues.get(UPDATES):
            self._pass(UPDATES, len(updates) - 1)
        return StepTime(self.clock, self.compute, self.busy, self.waited, self.written)

    def _compute(self, taken: float) -> None:
        """Computes, for longer while a wire is busy beside it (`Rates.tax`)."""
        wires = [sum(work.left for work in queue) for lane, queue in self.queues.items() if lane.startswith(WIRE)]
        busy = min(taken * self.rates.tax, max(wires, default=0.0))
        taken += busy * (1 - 1 / self.rates.tax)
        self._does("", self.clock, self.clock + taken)
        for lane in self.queues:
            self._advance(lane, taken, self.rates.hidden if lane.startswith(WIRE) else self.rates.lane_hidden)
        self.clock += taken
        self.compute += taken

    def _message(self, event: Event) -> None:
        """Starts a message, behind those before it on its way."""
        assert event.way is not None, "a message has a way"
        lane, sends = event.lane, event.does is Does.SEND
        self.busy[lane] = self.busy.get(lane, 0.0) + event.seconds
        at: float | None = None
        if sends or self.mail is None:
            at = self.ends[lane] = max(self.clock, self.ends.get(lane, 0.0)) + event.seconds
            self._does(lane, at - event.seconds, at)
        if sends and self.mail is not None:
            self.mail[event.way].append(self.ends[lane])
        self.arrivals[lane].append(Arrival(event.way, self.received[event.way], at))
        self.received[event.way] += not sends

    def _arrive(self, event: Event) -> None:
        message = self.arrivals[event.lane].pop(event.place)
        arrives = self._sent(message) if message.at is None else message.at
        assert arrives is not None, "it was not `ready`"
        if arrives > self.clock:
            self._stand(event.lane, arrives - self.clock)

    def _sent(self, message: Arrival) -> float | None:
        arrived = self.mail[message.way] if self.mail is not None else []
        return arrived[message.number] if len(arrived) > message.number else None

    def _pass(self, lane: str, place: int) -> None:
        """Goes past a piece of work, and those before it in its queue."""
        queue = self.queues[lane]
        over, taken = queue[: place + 1], 0.0
        del queue[: place + 1]
        for work in over:
            if work.left:
                begun = self.clock + taken if work.begun is None else work.begun
                self._does(lane, begun, self.clock + taken + work.left, work.op)
            taken += work.left
        self._stand(lane, taken)

    def _stand(self, lane: str, taken: float) -> None:
        """Stands still for a lane, while the others go on."""
        for name in self.queues:
            if name != lane:
                self._advance(name, taken, 1.0)
        self.clock += taken
        self.waited[lane] = self.waited.get(lane, 0.0) + taken

    def _advance(self, lane: str, taken: float, speed: float) -> None:
        """Takes the seconds from now on, at a speed, off the work of a lane, the first pieces first."""
        budget = speed * taken
        for work in self.queues[lane]:
            if budget <= 0:
                return
            if work.left:
                now = self.clock + taken - budget / speed
                begun = work.begun = now if work.begun is None else work.begun
                if work.left <= budget:
                    self._does(lane, begun, now + work.left / speed, work.op)
            left = work.left
            work.left = max(left - budget, 0.0)
            budget -= left
