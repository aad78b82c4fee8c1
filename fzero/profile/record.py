"""record: the times and the memory of one step on one rank, op by op.

Times are read between ops, with the machine's monotonic clock. An op lasts from the end of the reading before it to the
beginning of the reading after it. So the cost of reading is in no op. The processor time of this thread is read too: an
op that waits sleeps for the rest. On CUDA an event is recorded after each op instead, and times are the device's.

Memory is the sum of two parts. One is held through the step: the tensors of state, constants, batch and arena. The
other is allocated and freed on top, by the allocator's own account. On the CPU this is each allocation with its time,
on CUDA the bytes allocated after each op.
"""

from __future__ import annotations

import resource
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fzero import backend, tree
from fzero._torch_compat import allocations
from fzero.capture.provenance import describe
from fzero.compile.lowered import Lowered
from fzero.cost.memory import SHOWN, MemoryAccount
from fzero.ir.liveness import live_bytes
from fzero.ir.op import Op, StepPhase
from fzero.ir.program import Program, lane, moved_bytes, wire_bytes
from fzero.ir.records import DEVICE
from fzero.session.session import execute, session_of
from fzero.state.state import State

HELD = ("params", "optimizer", "batch", "other")  # kinds of memory, from the bottom of a chart to its top
LIVE = ("gather buffers", "receive buffers", "gradients", "staging", "activations", "workspace")


@dataclass(frozen=True)
class TransferSpan:
    """A transfer: op number `op` starts it and `wait` ends it. `kind` is `send/recv` for both of those, and the
    lane of a move (`disk→host`). wire_bytes: what it sends, or moves."""

    kind: str
    name: str
    op: int
    wait: int
    bucket: str | None
    wire_bytes: int
    via: str


@dataclass(frozen=True)
class StepRecord:
    """One step on one rank. Immutable; made by `record`.

    Times are ns of one clock for all processes of a machine; lists have an entry per op. began, ended: the step. start,
    stop: each op. cpu_ns: this thread's processor time (None on CUDA). held_bytes: held through the step. measured: the
    most bytes while each op ran (on CUDA: after it); None if another profiler was at work. measured_peak: the most at
    any time.
    """

    lowered: Lowered
    step: int
    rank: int
    stage: str
    batch: tuple[str, ...]
    machine: str
    began: int
    ended: int
    start: Sequence[int]
    stop: Sequence[int]
    cpu_ns: Sequence[int] | None
    held_bytes: int
    measured: Sequence[int] | None
    measured_peak: int | None
    page_faults: int

    @property
    def program(self) -> Program:
        """The program that ran."""
        return self.lowered.on(self.rank)

    @property
    def memory(self) -> MemoryAccount:
        """The planned bytes of that program."""
        return self.lowered.memories[self.program.mesh.role(self.rank)]

    def duration(self, index: int) -> int:
        """The ns of an op."""
        return self.stop[index] - self.start[index]

    def asleep(self, index: int) -> int:
        """The ns of an op in which this thread did not run."""
        return self.duration(index) if self.cpu_ns is None else max(0, self.duration(index) - self.cpu_ns[index])

    @cached_property
    def shares(self) -> dict[str, int]:
        """The ns of the step by the rank's activity; the sum is the step."""
        ops = list(enumerate(self.program.ops))
        computing = sum(self.duration(i) for i, op in ops if op.computes)
        waiting = sum(self.asleep(i) for i, op in ops if op.is_wait)
        moving = sum(self.duration(i) for i, op in ops if op.transfers or op.is_wait) - waiting
        named = {"computing": computing, "waiting": waiting, "transfers' own work": moving}
        return {**named, "the rest": self.ended - self.began - sum(named.values())}

    @cached_property
    def transfers(self) -> list[TransferSpan]:
        """The transfers of the program, in the order of their ends."""
        transfers, flight = [], defaultdict[str, list[int]](list)
        for i, op in enumerate(self.program.ops):
            if op.transfers:
                flight[op.target].append(i)
            elif op.is_wait:
                name = op.reads[0].name
                start = flight[name].pop(0)
                source = self.program.ops[start]
                way = "→".join(lane(self.program, source))
                kind = source.kind if source.is_collective else way or "send/recv"
                wire = wire_bytes(self.program, source) or moved_bytes(self.program, source)
                via = self.program.transport + (f" over {source.axis}" if len(self.program.mesh.axes) > 1 else "")
                via = via if not way else "this rank"
                transfers.append(TransferSpan(kind, name, start, i, self.bucket(start), wire, via))
        return transfers

    def bucket(self, index: int) -> str | None:
        """The buckets that an op touches, in order; for a wait, those of its transfer."""
        op = self.program.ops[index]
        names = [self.program.buffers[ref.name].bucket for ref in (*op.reads, *op.writes)]
        return " ".join(dict.fromkeys(name for name in names if name)) or None

    @cached_property
    def sent_bytes(self) -> int:
        """The bytes on the wire of all transfers."""
        return sum(transfer.wire_bytes for transfer in self.transfers if "→" not in transfer.kind)

    @cached_property
    def planned(self) -> list[int]:
        """Planned bytes while each op runs, its workspace included."""
        return [sum(levels) for levels in zip(*self.planned_kinds.values(), strict=True)]

    @cached_property
    def planned_kinds(self) -> dict[str, list[int]]:
        """The same by kind of memory."""
        ops, buffers = self.program.ops, self.program.buffers

        def level(kind: str) -> list[int]:
            return live_bytes(ops, buffers, lambda b: b.space == DEVICE and SHOWN.get(b.kind, "other") == kind)

        levels_of = {kind: level(kind) for kind in (*HELD, *LIVE[:-1])}
        here = [self.program.space(op) == DEVICE for op in ops]
        return {**levels_of, "workspace": [needs(op) * mine for op, mine in zip(ops, here, strict=True)]}


def needs(op: Op) -> int:
    """Returns the bytes that an op needs only while it runs."""
    return op.workspace + op.heap


def phase(op: Op) -> str:
    """Returns the part of the step to which an op belongs: forward, backward, recompute, update, or its kind."""
    if op.is_update or not op.computes:
        return op.kind
    if not op.in_region:
        return "other"
    return op.phase if op.phase in (StepPhase.FORWARD, StepPhase.RECOMPUTE) else StepPhase.BACKWARD


def leaves(program: Program, op: Op) -> list[str]:
    """Returns the paths of the leaves whose elements an op reads or writes."""
    paths: dict[str, None] = {}
    for ref in (*op.reads, *op.writes):
        bucket = program.buckets.get(program.buffers[ref.name].bucket or "")
        for slot in bucket.slots if bucket is not None else ():
            if ref.start is None or (slot.start < (ref.stop or 0) and ref.start < slot.stop):
                paths[slot.path] = None
    return list(paths)


# --- measuring ----------------------------------------------------------------------------------------------------


def record(state: State, lowered: Lowered, batch: Any, ready: Callable[[], None]) -> tuple[Any, StepRecord]:
    """Runs a step and watches it; returns (its metrics, the record).

    `ready` is called right before the step, when all preparations are done.
    """
    runtime = session_of(state)
    bound = runtime.bind(lowered)  # so that it is not part of the time
    tensors = [x for x in tree.flatten(batch)[1] if isinstance(x, torch.Tensor)]
    here = [x for x in bound.memory.values() if x.device.type == runtime.device.type]
    held = _held([*here, bound.arena, *tensors])
    clock = _Device(runtime.device) if backend.of(runtime.device).on_streams else _Host()
    with clock.watching():
        ready()
        faults = _faults()
        began = clock.begin()
        metrics = execute(state, lowered, batch, clock)
        ended = clock.end()
        faults = _faults() - faults
    starts, stops, cpu_ns = clock.spans()
    measured, peak = clock.memory(stops, held)
    step_record = StepRecord(
        lowered, state.step + 1, runtime.rank, _stage(runtime.spec.zero), _shapes(batch), _machine(runtime.device),
        began, ended, starts, stops, cpu_ns, held, measured, peak, faults,
    )  # fmt: skip
    return metrics, step_record


class _Host:
    """Watches a step on the CPU. Called after each op; the thread that runs the step writes all fields."""

    def __init__(self) -> None:
        self.marks: list[
            tuple[int, int, int]
        ] = []  # per op: when it ended, this thread's work till then, when it went on
        self.events: list[tuple[int, int]] | None = None

    def __call__(self, number: int) -> None:
        now = time.perf_counter_ns()
        self.marks.append((now, time.thread_time_ns(), time.perf_counter_ns()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        recorded = None
        with ExitStack() as stack:
            with suppress(RuntimeError):  # another profiler is at work: times without memory
                recorded = stack.enter_context(allocations())
            yield
        if recorded is not None:
            self.events = [(when + self.offset, nbytes) for when, nbytes in recorded]

    def begin(self) -> int:
        readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(5)]
        before, wall, after = min(
            readings, key=lambda reading: reading[2] - reading[0]
        )  # the one that nothing came between
        self.offset = (before + after) // 2 - wall  # of the clock of the allocator's events from the one read here
        return time.perf_counter_ns()

    def end(self) -> int:
        return time.perf_counter_ns()

    def spans(self) -> tuple[list[int], list[int], list[int] | None]:
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        return [a[2] for a, _ in pairs], [b[0] for _, b in pairs], [b[1] - a[1] for a, b in pairs]

    def memory(self, stops: Sequence[int], held: int) -> tuple[list[int] | None, int | None]:
        """The most bytes while each op ran, and at any time."""
        return (None, None) if self.events is None else levels(self.events, stops, held)


def levels(events: Iterable[tuple[int, int]], stops: Sequence[int], held: int) -> tuple[list[int], int]:
    """Returns the most bytes held up to each stop since the stop before, and the most of all.

    events: (time, bytes) of allocations and releases. stops: times in order. held: bytes held throughout.

    >>> levels([(1, 10), (2, -10), (5, 4)], [3, 4, 6], 100)
    ([110, 100, 104], 110)
    """
    most = [0] * (len(stops) + 1)
    live = last = top = 0
    for when, nbytes in events:
        index = bisect_left(stops, when)
        most[last + 1 : index + 1] = [live] * (index - last)
        live, last = live + nbytes, index
        most[index], top = max(most[index], live), max(top, live)
    most[last + 1 :] = [live] * (len(stops) - last)
    return [held + level for level in most[:-1]], held + top


class _Device:
    """Watches a step on CUDA: events on the computing stream, and the bytes given out by the caching allocator. Called
    after each op."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[torch.cuda.Event] = []
        self.allocated: list[int] = []

    def __call__(self, number: int) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append(event)
        if number >= 0:
            self.allocated.append(torch.cuda.memory_allocated(self.device))

    @contextmanager
    def watching(self) -> Iterator[None]:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.before = torch.cuda.memory_allocated(self.device)
        yield

    def begin(self) -> int:
        self(-1)
        self.began = time.perf_counter_ns()
        return self.began

    def end(self) -> int:
        self(-1)
        torch.cuda.synchronize(self.device)
        return self._time(self.marks[-1])

    def _time(self, event: torch.cuda.Event) -> int:
        return self.began + round(self.marks[0].elapsed_time(event) * 1e6)

    def spans(self) -> tuple[list[int], list[int], list[int] | None]:
        times = [self._time(event) for event in self.marks[1:-1]]
        return times[:-1], times[1:], None

    def memory(self, stops: Sequence[int], held: int) -> tuple[list[int] | None, int | None]:
        peak = torch.cuda.max_memory_allocated(self.device)
        return [held - self.before + allocated for allocated in self.allocated], held - self.before + peak


def _held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _stage(zero: Any) -> str:
    return repr(dict(zero)) if isinstance(zero, Mapping) else str(zero)


def _shapes(batch: Any) -> tuple[str, ...]:
    paths, values, _ = tree.flatten(batch)
    return tuple(f"{path} {describe(value)}".strip() for path, value in zip(paths, values, strict=True))


def _machine(device: torch.device) -> str:
    return f"{backend.of(device).calls.describe(device)}, torch {torch.__version__}"
