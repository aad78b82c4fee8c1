"""executor: a program bound to one rank's memory, ready to run step after step.

Everything that stays the same from step to step is done once: the place of each buffer in the arena, the views that a
segment takes of it, the tensors that a transfer moves. The rest of an op is a few calls without arguments. The loop
over these calls is all the Python of a step. State keeps its addresses. The batch is copied into the arena, and metrics
are copied out of it. What lies on the host has an arena there, and moves run on `lanes`.

A buffer may have no place (in a program written by hand, or before the last pass). Such a *loose* buffer is made when
it is first written. Ops that touch one look it up when they run.

Other ranks may still read the source of a transfer after this rank has waited for it. A `settle` op marks the point at
which they must be done. A wait without such an op settles at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import below_autograd
from fzero.codegen import bind, inplace, segment_memory
from fzero.comm.protocol import Comm
from fzero.errors import NO_KERNEL
from fzero.ir import fx_nodes
from fzero.ir.liveness import waits_with_settle
from fzero.ir.messages import forms
from fzero.ir.op import Op
from fzero.ir.program import Program, op_text
from fzero.ir.records import DEVICE, DISK, GIVEN, HOST, PERSISTENT, Ref
from fzero.runtime import cuda_graphs
from fzero.runtime.handlers import cast_copies, formed, moves_whole, padding, part
from fzero.runtime.lanes import Lanes
from fzero.runtime.stream_lanes import lanes_for

Call = Callable[[], Any]


class Executor:
    """A program on this rank.

    memory: the tensors by buffer name: the state's buffers and the constants, and every buffer with a place. arena: at
    least `program.arena_bytes` bytes. compiled: segments that replace some of the program's, by hash. host_arena: as
    `arena`, on the host, from the start of a page; None: it is made here. lanes: what runs moves; without a file there,
    buffers on disk are tensors in `memory`. On CUDA, the steps after the first are one graph if the program allows it
    (`fzero.runtime.cuda_graphs`).

    `calls` holds the calls of each op and never changes. A run writes `position` (the op that runs; -1 before the
    first), `num_runs` and `recording`; binding an op and its calls write `memory`. Only this module writes fields.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        comm: Comm,
        memory: Mapping[str, torch.Tensor],
        arena: torch.Tensor,
        compiled: Mapping[str, fx.GraphModule] | None = None,
        *,
        cuda_graph: bool = False,
        host_arena: torch.Tensor | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        """Binds the program: places every buffer and makes the calls of each op."""
        self.program, self.rank, self.comm, self.arena = program, rank, comm, arena
        self.compiled, self.lanes = compiled or {}, lanes or lanes_for(arena.device)
        if host_arena is None:
            host_arena = torch.empty(program.arenas[HOST], dtype=torch.uint8)
        self.arenas = {DEVICE: arena, HOST: host_arena}
        self.moving: set[str] = set()  # while ops are bound: the targets of the moves before
        self.memory = {**cast_copies(program, memory), **memory}
        self.forms = forms(program)
        self.loose = {n for n, b in program.buffers.items() if b.at is None and b.kind not in PERSISTENT}
        for name, buffer in program.buffers.items():
            if buffer.kind == "rank":
                place = program.mesh.coordinate(rank, str(buffer.axis))
                self.memory[name] = torch.full((), place, dtype=buffer.dtype, device=arena.device)
            elif buffer.at is not None and buffer.space != DISK:
                room = self.arenas[buffer.space][buffer.at : buffer.at + buffer.nbytes]
                self.memory[name] = formed(room.view(buffer.dtype).view(buffer.shape), self.forms.get(name))
        self.batch = [self.memory.get(name) for name, b in program.buffers.items() if b.kind == "batch"]
        self.metrics = list(program.metrics.items())
        self.position = -1  # the op that runs; the number of ops after a run that did not fail
        self.recordable = cuda_graph and cuda_graphs.obstacle(program, arena.device) is None
        self.recording: Any = None  # the step as one CUDA graph
        self.num_runs = 0
        self.leaves_on_host = any(op.moves or program.space(op) == HOST for op in program.ops)
        self.first_write = next((i for i, op in enumerate(program.ops) if _writes_state(program, op)), len(program.ops))
        with torch.no_grad():
            self.calls = self._bind()

    @property
    def wrote_state(self) -> bool:
        """Whether the step in progress has begun to change the state."""
        return self.position >= self.first_write

    def where(self) -> str:
        """The op that runs, as text; "" before the first."""
        position = self.position
        if position < 0:
            return ""
        if position >= len(self.program.ops):
            return "after its last op"
        op = self.program.ops[position]
        return f"op {position}: {op_text(op)} | {op.why}"

    def run(self, batch: Sequence[torch.Tensor], watch: Callable[[int], None] | None = None) -> dict[str, torch.Tensor]:
        """Runs one step: writes the state in place and returns the metrics.

        `watch` is called with -1 before the first op, and with each op's number after the op. An error carries a note
        that names its op.
        """
        self.position = -1
        self.comm.drain()  # after a run that failed; else nothing is in flight
        self.lanes.drain()
        with torch.no_grad(), torch.autocast(self.arena.device.type, enabled=False), below_autograd():
            for target, value in zip(self.batch, batch, strict=True):
                if target is not None:
                    target.copy_(value)
            if self.recordable and self.recording is None and self.num_runs:
                self.recording = cuda_graphs.record(self.issue, self.arena.device)
                self.recordable = self.recording is not None
            if self.recording is not None and watch is None:
                self.position = self.first_write
                self.recording.replay()
            else:
                self.issue(watch)
            if self.leaves_on_host:
                self.lanes.finish()
            self.num_runs += 1
            self.position = len(self.calls)
            return {name: self.memory[buffer].clone() for name, buffer in self.metrics}

    def issue(self, watch: Callable[[int], None] | None = None) -> None:
        """Runs the calls of every op, in order. `watch` is called with -1 before the first op, then with each op's
        number."""
        if watch is not None:
            watch(-1)
        try:
            for position, calls in enumerate(self.calls):
                self.position = position
                for call in calls:
                    call()
                if watch is not None:
                    watch(position)
        except Exception as error:
            error.add_note(f"in {self.where()}")
            if isinstance(error, NotImplementedError):
                error.add_note(NO_KERNEL)
            raise

    # --- binding

    def _bind(self) -> list[list[Call]]:
        """The calls of each op. Padding of a new buffer is zeroed first; a wait without a later `settle` op settles at
        once."""
        deferred = waits_with_settle(self.program.ops)
        started: set[str] = set()
        calls_of_ops: list[list[Call]] = []
        for index, op in enumerate(self.program.ops):
            calls: list[Call] = []
            for ref in op.writes:
                if ref.name not in started and op.computes:
                    calls += self._zeroed(ref)
                started.add(ref.name)
            calls += binder(op)(self, op)
            if op.computes and self.program.space(op) == HOST:
                calls = self._on_host(index, op, calls)
            if op.is_wait and index not in deferred and op.target not in self.moving:
                calls.append(partial(self.comm.settle, op.target))
            if op.is_free:
                started -= {ref.name for ref in op.reads}
            calls_of_ops.append(calls)
        return calls_of_ops

    def _on_host(self, index: int, op: Op, calls: list[Call]) -> list[Call]:
        """The calls of an op on the host, beside the lanes. With a loose buffer it waits for all of them."""
        refs = (*op.reads, *op.writes)
        if self._is_loose(refs):
            return [self.lanes.finish, *calls]
        start = op.offset or 0
        workspace = self.arenas[HOST][start : start + op.workspace]
        what = f"op {index}: {op_text(op)} | {op.why}"
        return self.lanes.on_host(calls, [*(self.tensor(ref) for ref in refs), workspace], what)

    def _zeroed(self, ref: Ref) -> Iterator[Call]:
        buffer = self.program.buffers[ref.name]
        if buffer.at is not None:
            for start, stop in padding(self.program, self.rank, buffer):
                yield self.memory[ref.name][start:stop].zero_

    def tensor(self, ref: Ref) -> torch.Tensor:
        """The tensor that a reference names. Raises KeyError if its buffer is not live yet."""
        return part(self.program, self.rank, self.memory[ref.name], ref)

    def destination(self, ref: Ref) -> torch.Tensor:
        """The tensor that a written reference names. A loose buffer is made here, with zero padding."""
        if ref.name not in self.memory:
            buffer = self.program.buffers[ref.name]
            device = self.arenas[buffer.space].device
            made = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            self.memory[ref.name] = formed(made, self.forms.get(ref.name))
            for start, stop in padding(self.program, self.rank, buffer):
                self.memory[ref.name][start:stop].zero_()
        return self.tensor(ref)

    def is_on_disk(self, ref: Ref) -> bool:
        """Whether a reference is to the rank's file."""
        return ref.name not in self.memory and self.program.buffers[ref.name].space == DISK

    def _is_loose(self, refs: Sequence[Ref]) -> bool:
        return any(ref.name in self.loose for ref in refs)


def _writes_state(program: Program, op: Op) -> bool:
    held = (ref for ref in op.writes if program.buffers[ref.name].kind in PERSISTENT)
    return not op.is_mark and any(program.buffers[ref.name].kind not in GIVEN for ref in held)


def _run(bound: Executor, op: Op) -> list[Call]:
    """Binds a segment to its memory: inputs, destinations, outputs and workspace. With a loose buffer it is called as a
    whole."""
    key, num_outputs = op.segment, op.num_outputs
    gm = bound.compiled.get(key, bound.program.segments[key])
    outputs, into = op.writes[:num_outputs], op.writes[num_outputs:]
    if bound._is_loose((*op.reads, *op.writes)):
        return [partial(_call, bound, gm.forward, op, outputs, (*op.reads, *into))]
    arena = bound.arenas[bound.program.space(op)]
    for ref, node in zip(outputs, fx_nodes.outputs(gm.graph), strict=True):
        buffer = bound.program.buffers[ref.name]
        start = buffer.at or 0
        bound.memory[ref.name] = segment_memory.tensor_at(arena[: start + buffer.nbytes], start, node.meta["val"])
    start, size = (op.offset or 0), op.workspace
    inputs = [bound.tensor(ref) for ref in (*op.reads, *into)]
    results = [bound.memory[ref.name] for ref in outputs]
    return bind.bind(gm, inputs, results, arena[start : start + size], inplace.apart(op))


def _call(bound: Executor, fn: Callable[..., Any], op: Op, outputs: Sequence[Ref], inputs: Sequence[Ref]) -> None:
    tensors = [bound.destination(ref) if n >= len(op.reads) else bound.tensor(ref) for n, ref in enumerate(inputs)]
    for ref, value in zip(outputs, fn(*tensors), strict=True):
        if ref.name in bound.loose:
            bound.memory[ref.name] = value
        else:
            bound.memory[ref.name].copy_(value)


def _local(bound: Executor, op: Op) -> list[Call]:
    runs = op.row.runs
    assert runs is not None
    if bound._is_loose((*op.reads, *op.writes)):
        reads, writes = op.reads, op.writes
        return [lambda: runs([*map(bound.tensor, reads)], [*map(bound.destination, writes)])]
    return [partial(runs, [bound.tensor(ref) for ref in op.reads], [bound.tensor(ref) for ref in op.writes])]


def _start(bound: Executor, op: Op) -> list[Call]:
    refs = (*op.reads, *op.writes)
    bound.moving.discard(op.target)
    if bound._is_loose(refs):
        reads, writes = op.reads, op.writes
        return [lambda: bound.comm.start(op.target, op, [*map(bound.tensor, reads), *map(bound.destination, writes)])]
    return [partial(bound.comm.start, op.target, op, [bound.tensor(ref) for ref in refs])]


def _move(bound: Executor, op: Op) -> list[Call]:
    source, target = op.reads[0], op.writes[0]
    bound.moving.add(op.target)
    if bound.is_on_disk(source):
        at, name = _offset(bound, source), f"{source} ({op.why})"
        return [lambda: bound.lanes.read(op.target, at, bound.destination(target), name)]
    if bound.is_on_disk(target):
        at, name = _offset(bound, target), str(target)
        return [lambda: bound.lanes.write(op.target, at, bound.tensor(source), name)]
    if bound._is_loose((source, target)):
        return [lambda: bound.lanes.copy(op.target, bound.tensor(source), bound.destination(target))]
    buffer = bound.program.buffers[target.name]
    if buffer.at is not None and moves_whole(bound.program, op):
        bound.memory[target.name] = segment_memory.tensor_at(
            bound.arenas[buffer.space], buffer.at, bound.tensor(source)
        )
    return [partial(bound.lanes.copy, op.target, bound.tensor(source), bound.tensor(target))]


def _offset(bound: Executor, ref: Ref) -> int:
    """The byte of the rank's file at which a reference begins."""
    buffer = bound.program.buffers[ref.name]
    first, _ = bound.program.local_range(ref, bound.rank)
    return (buffer.at or 0) + first * buffer.dtype.itemsize


def _wait(bound: Executor, op: Op) -> list[Call]:
    if op.target in bound.moving:
        return [partial(bound.lanes.wait, op.target)]
    return [partial(bound.comm.wait, op.target)]


def _settle(bound: Executor, op: Op) -> list[Call]:
    return [partial(bound.comm.settle, op.target)]


def _free(bound: Executor, op: Op) -> list[Call]:
    return [partial(bound.memory.pop, ref.name) for ref in op.reads if ref.name in bound.loose]


BINDERS: dict[str, Callable[[Executor, Op], list[Call]]] = {
    "run": _run,
    "update": _run,
    "move": _move,
    "wait": _wait,
    "settle": _settle,
    "free": _free,
}


def binder(op: Op) -> Callable[[Executor, Op], list[Call]]:
    """The function that binds an op. Raises KeyError for an unknown kind."""
    if op.transfers and not op.moves:
        return _start
    return _local if op.row.runs is not None else BINDERS[op.kind]
