"""handlers: the effect of each op kind on one rank's memory, op by op and buffer by buffer. It is the interpreter's
table.

The executor binds the same ops to memory ahead of time (`fzero.runtime.executor`).

Only the handler of `wait` blocks. So a driver that asks `Comm.ready` before a wait can run many ranks in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import fx

from fzero.codegen import bind, segment_memory
from fzero.comm.protocol import Comm
from fzero.ir import fx_nodes, fx_values, op_info
from fzero.ir.liveness import waits_with_settle
from fzero.ir.messages import forms
from fzero.ir.op import Op
from fzero.ir.program import Program, op_text
from fzero.ir.records import DEVICE, DISK, HOST, PERSISTENT, Buffer, Ref

_AS_PLANNED: WeakSet[fx.GraphModule] = WeakSet()  # segments whose values were seen to have the planned strides


class Rank:
    """One rank's memory while it runs a program.

    memory: the live buffers by name, always whole. on_disk: those of them that stand for ranges of the file. started:
    by target, the sources of a transfer that is in flight. lent: the same for a transfer that was waited for and has
    not settled. wrote_state: whether an op has begun to change the state. poison: fill memory with NaN where no value
    may be read. Only this module writes the fields.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        comm: Comm,
        memory: Mapping[str, torch.Tensor],
        *,
        device: torch.device | str = "cpu",
        poison: bool = False,
    ) -> None:
        """Takes `memory` (inputs by buffer name) as it is; makes the arena and the rank's number."""
        self.program, self.rank, self.comm, self.device, self.poison = program, rank, comm, device, poison
        self.on_disk = on_disk(program, memory)
        self.memory = {**cast_copies(program, memory), **memory, **self.on_disk}
        for buffer in program.buffers.values():
            if buffer.kind == "rank":
                place = program.mesh.coordinate(rank, str(buffer.axis))
                self.memory[buffer.name] = torch.full((), place, dtype=buffer.dtype, device=device)
        self.arenas = {
            DEVICE: torch.empty(program.arenas[DEVICE], dtype=torch.uint8, device=device),
            HOST: torch.empty(program.arenas[HOST], dtype=torch.uint8),
        }
        self.calls = {key: partial(as_planned, gm) for key, gm in program.segments.items()}
        self.forms = forms(program)
        self.deferred = waits_with_settle(program.ops)
        self.started: dict[str, set[str]] = {}
        self.lent: dict[str, set[str]] = {}
        self.wrote_state = False

    def tensor(self, ref: Ref) -> torch.Tensor:
        """The tensor that a reference names on this rank. Raises KeyError if the buffer is not live."""
        return part(self.program, self.rank, self.memory[ref.name], ref)

    def destination(self, ref: Ref) -> torch.Tensor:
        """The tensor that a written reference names. The first write makes the buffer live."""
        if ref.name not in self.memory:
            self.memory[ref.name] = self.allocate(self.program.buffers[ref.name])
        return self.tensor(ref)

    def allocate(self, buffer: Buffer) -> torch.Tensor:
        """Memory for a buffer: its place in the arena, or new. Padding is zero; under `poison` the rest is NaN."""
        if buffer.at is None:
            tensor = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.arenas[buffer.space].device)
        else:
            room = self.arenas[buffer.space][buffer.at : buffer.at + buffer.nbytes]
            tensor = room.view(buffer.dtype).view(buffer.shape)
        tensor = formed(tensor, self.forms.get(buffer.name))
        if self.poison:
            spoil(tensor)
        for start, stop in padding(self.program, self.rank, buffer):
            tensor[start:stop].zero_()
        return tensor


def cast_copies(program: Program, memory: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The copies that a program finds at its start and that are not given: cast from their masters."""
    absent = {copy: master for copy, master in program.copies.items() if copy not in memory and master in memory}
    return {copy: memory[master].to(program.buffers[copy].dtype) for copy, master in absent.items()}


def formed(tensor: torch.Tensor, form: torch.Tensor | None) -> torch.Tensor:
    """The memory of a contiguous tensor with the dims in the order of `form`, if it is given."""
    return tensor if form is None else tensor.as_strided(form.shape, form.stride())


def on_disk(program: Program, memory: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the buffers that lie on disk, each at its place in one piece of memory that stands for the file. What
    is not given, gradients that wait there, is NaN."""
    held = {name: b for name, b in program.buffers.items() if b.space == DISK and b.at is not None}
    file = torch.full((program.arenas[DISK],), 255, dtype=torch.uint8)
    views = {n: file[b.at : (b.at or 0) + b.nbytes].view(b.dtype).view(b.shape) for n, b in held.items()}
    for name in views.keys() & memory.keys():
        views[name].copy_(memory[name])
    return views


def part(program: Program, rank: int, whole: torch.Tensor, ref: Ref) -> torch.Tensor:
    """The part of a rank's `whole` buffer that a reference names: a view."""
    if ref.start is None:
        return whole
    start, stop = program.local_range(ref, rank)
    parts = program.buffers[ref.name].parts
    cut = whole.view(-1)[start:stop] if parts == 1 else whole.view(parts, -1)[:, start:stop]
    return cut if ref.shape is None else cut.view(ref.shape)


def padding(program: Program, rank: int, buffer: Buffer) -> Iterator[tuple[int, int]]:
    """Yields the (start, stop) of elements in a bucket's buffer that belong to no leaf. They are zero, so sums and
    norms may run over them."""
    if buffer.bucket is not None and (not buffer.sharded or buffer.kind == "scratch"):
        bucket = program.buckets[buffer.bucket]
        for index in range(len(bucket.slots)):
            end = bucket.place(index, buffer.per)[1]
            start, stop = program.local_range(Ref(buffer.name, end, bucket.end(index)), rank)
            if stop > start:
                yield start, stop


def spoil(tensor: torch.Tensor) -> None:
    """Overwrites a tensor with a value that no program computes: NaN, or the largest integer."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.uint8:
        tensor.fill_(255)  # as bytes of a float: NaN
    elif tensor.dtype is torch.bool:
        tensor.zero_()  # bytes that are no bool change when they are copied
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def as_planned(gm: fx.GraphModule, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """A segment's outputs. Every value has the strides that its graph gives, and comes from the kernels that the
    executor uses.

    A kernel of torch may return other strides than its shape rule gives. Later ops would then walk over memory in
    another order, and a sum would round differently.
    """
    if gm in _AS_PLANNED:
        return gm.forward(*inputs)
    env: dict[fx.Node, Any] = dict(zip(fx_nodes.placeholders(gm.graph), inputs, strict=True))
    last = {operand: node for node in gm.graph.nodes for operand in node.all_input_nodes}
    plain = True
    for node in filter(fx_nodes.is_compute, gm.graph.nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        kernel = op_info.kernel_for(node.target, *args, **kwargs)
        result = (kernel or node.target)(*args, **kwargs)
        env[node] = result if fx_nodes.source(node) is not None else strided(result, node.meta.get("val"))
        plain = plain and kernel is None and env[node] is result
        for operand in node.all_input_nodes:
            if last[operand] is node:
                del env[operand]
    if plain and bind.as_sized(gm, inputs):
        _AS_PLANNED.add(gm)
    return list(fx.node.map_arg(fx_nodes.outputs(gm.graph), env.__getitem__))


def strided(results: Any, planned: Any) -> Any:
    """An op's results. A tensor whose strides are not the planned ones becomes a copy with the planned strides. Returns
    the same object if no tensor changes."""
    if isinstance(results, (list, tuple)):
        copies = [strided(x, y) for x, y in zip(results, planned, strict=True)]
        return results if all(x is y for x, y in zip(results, copies, strict=True)) else copies
    if not (isinstance(results, torch.Tensor) and isinstance(planned, torch.Tensor) and results.shape == planned.shape):
        return results
    if not fx_values.is_dense(planned) or fx_values.steps(results) == fx_values.steps(planned):
        return results
    return torch.empty_strided(planned.shape, planned.stride(), dtype=results.dtype, device=results.device).copy_(
        results
    )


def _run(rank: Rank, op: Op) -> None:
    """Calls a segment on its inputs and destinations, and stores its outputs."""
    call = rank.calls[op.segment]
    inputs = [rank.tensor(ref) for ref in op.reads]
    num_out = op.num_outputs
    into = [rank.destination(ref) for ref in op.writes[num_out:]]
    arena = rank.arenas[rank.program.space(op)]
    if rank.poison and op.offset is not None:
        spoil(arena[op.offset :][: op.workspace])
    for ref, value in zip(op.writes, call(*inputs, *into), strict=False):
        place = rank.program.buffers[ref.name].at
        rank.memory[ref.name] = value if place is None else segment_memory.tensor_at(arena, place, value).copy_(value)


def _update(rank: Rank, op: Op) -> None:
    rank.wrote_state = True
    _run(rank, op)


def _local(rank: Rank, op: Op) -> None:
    assert op.row.runs is not None
    if any(rank.program.buffers[ref.name].kind in PERSISTENT for ref in op.writes):
        rank.wrote_state = True
    op.row.runs([rank.tensor(ref) for ref in op.reads], [rank.destination(ref) for ref in op.writes])


def moves_whole(program: Program, op: Op) -> bool:
    """Whether a move is of a whole value in no bucket, whose dims its copy keeps in their order in memory."""
    refs = (*op.reads, *op.writes)
    return op.moves and all(ref.start is None and program.buffers[ref.name].bucket is None for ref in refs)


def _start(rank: Rank, op: Op) -> None:
    reads = [rank.tensor(ref) for ref in op.reads]
    if op.target not in rank.memory and moves_whole(rank.program, op):
        room = rank.allocate(rank.program.buffers[op.target])
        rank.memory[op.target] = room.as_strided(reads[0].shape, reads[0].stride())
    writes = [rank.destination(ref) for ref in op.writes]
    if (op.gathers or op.moves) and rank.program.buffers[op.writes[0].name].kind in PERSISTENT:
        rank.wrote_state = True
    rank.started[op.target] = op.sources if op.is_collective else set()
    rank.comm.start(op.target, op, [*reads, *writes])


def _wait(rank: Rank, op: Op) -> None:
    rank.comm.wait(op.target)


def _settle(rank: Rank, op: Op) -> None:
    rank.comm.settle(op.target)
    rank.lent.pop(op.target, None)


def _free(rank: Rank, op: Op) -> None:
    """Frees buffers. A lent buffer is still read by other ranks, so it keeps its values until the transfer settles."""
    lent = set().union(*rank.lent.values())
    for ref in op.reads:
        freed = rank.memory.pop(ref.name)
        if rank.poison and ref.name not in lent:
            spoil(freed)


HANDLERS: dict[str, Callable[[Rank, Op], None]] = {
    "run": _run,
    "update": _update,
    "wait": _wait,
    "settle": _settle,
    "free": _free,
}


def handler(op: Op) -> Callable[[Rank, Op], None]:
    """The function that runs an op. Raises KeyError for an unknown kind."""
    return _start if op.transfers else _local if op.row.runs is not None else HANDLERS[op.kind]


def steps(rank: Rank) -> Iterator[int]:
    """Runs the program op by op. Yields the op's number each time a wait is not ready; the next call asks again."""
    for index, op in enumerate(rank.program.ops):
        while op.is_wait and not rank.comm.ready(op.target):
            yield index
        try:
            handler(op)(rank, op)
            if op.is_wait and index in rank.deferred:
                rank.lent[op.target] = rank.started.pop(op.target, set())
            elif op.is_wait:
                _settle(rank, op)
        except Exception as error:
            error.add_note(f"in op {index}: {op_text(op)} | {op.why}")
            raise
