"""handlers: what each op kind does to one rank's memory, op by op and buffer by buffer: the interpreter's table.

The executor binds the same ops to memory ahead of time (`fzero.runtime.executor`).

A handler never blocks but in `wait`, so a driver that asks `Comm.ready` before a wait can run many ranks in one thread.
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
from fzero.ir import fx_nodes, fx_values
from fzero.ir.liveness import waits_with_settle
from fzero.ir.program import Program, op_text
from fzero.ir.records import PERSISTENT, Buffer, Op, Ref
from fzero.kernels import kernel_for

_AS_PLANNED: WeakSet[fx.GraphModule] = WeakSet()  # segments whose values were seen to have the planned strides


class Rank:
    """One rank's memory while it runs a program: tensors by buffer name, all of them whole buffers."""

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
        self.program, self.rank, self.comm, self.device, self.poison = program, rank, comm, device, poison
        self.memory: dict[str, torch.Tensor] = dict(memory)
        for buffer in program.buffers.values():
            if buffer.kind == "rank":
                self.memory[buffer.name] = torch.full((), rank, dtype=buffer.dtype, device=device)
        self.arena = torch.empty(program.arena_bytes, dtype=torch.uint8, device=device)
        self.calls = {key: partial(as_planned, gm) for key, gm in program.segments.items()}
        self.deferred = waits_with_settle(program.ops)
        self.started: dict[str, set[str]] = {}  # by target: the sources of a transfer
        self.lent: dict[str, set[str]] = {}  # those of a transfer that was waited for and has not settled
        self.wrote_state = False

    def tensor(self, ref: Ref) -> torch.Tensor:
        """The tensor that a reference names on this rank. Raises KeyError where the buffer is not live."""
        return part(self.program, self.rank, self.memory[ref.name], ref)

    def destination(self, ref: Ref) -> torch.Tensor:
        """The same for a reference that is written: its buffer comes to life with the first write."""
        if ref.name not in self.memory:
            self.memory[ref.name] = self.allocate(self.program.buffers[ref.name])
        return self.tensor(ref)

    def allocate(self, buffer: Buffer) -> torch.Tensor:
        """Memory for a buffer: its place in the arena, or new. Padding is zero; the rest is NaN under `poison`."""
        if buffer.at is None:
            fresh = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
        else:
            place = self.arena[buffer.at : buffer.at + buffer.nbytes]
            fresh = place.view(buffer.dtype).view(buffer.shape)
        if self.poison:
            spoil(fresh)
        for start, stop in padding(self.program, self.rank, buffer):
            fresh[start:stop].zero_()
        return fresh


def part(program: Program, rank: int, whole: torch.Tensor, ref: Ref) -> torch.Tensor:
    """What a reference names of its buffer on a rank."""
    if ref.start is None:
        return whole
    start, stop = program.local_range(ref, rank)
    cut = whole.view(-1)[start:stop]
    return cut if ref.shape is None else cut.view(ref.shape)


def padding(program: Program, rank: int, buffer: Buffer) -> Iterator[tuple[int, int]]:
    """The elements of a bucket's buffer that belong to no leaf. They are zero: sums and norms may run over them."""
    if buffer.bucket is not None and (not buffer.sharded or buffer.kind == "scratch"):
        bucket = program.buckets[buffer.bucket]
        for index in range(len(bucket.slots)):
            end = bucket.place(index, buffer.per)[1]
            start, stop = program.local_range(Ref(buffer.name, end, bucket.end(index)), rank)
            if stop > start:
                yield start, stop


def spoil(tensor: torch.Tensor) -> None:
    """Overwrites a tensor with what no program computes: NaN, or the largest integer."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.uint8:
        tensor.fill_(255)  # as bytes of a float: NaN
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def as_planned(gm: fx.GraphModule, *given: torch.Tensor) -> list[torch.Tensor]:
    """A segment's outputs, every value with the strides that its graph says, and made by the kernels that the executor
    takes. A kernel of torch may return other strides than its shape rule says; what comes next would walk over memory
    in another order, and a sum round differently."""
    if gm in _AS_PLANNED:
        return gm.forward(*given)
    env: dict[fx.Node, Any] = dict(zip(fx_nodes.placeholders(gm.graph), given, strict=True))
    last = {operand: node for node in gm.graph.nodes for operand in node.all_input_nodes}
    plain = True
    for node in filter(fx_nodes.is_compute, gm.graph.nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        kernel = kernel_for(node.target, *args, **kwargs)
        found = (kernel or node.target)(*args, **kwargs)
        env[node] = found if fx_nodes.source(node) is not None else strided(found, node.meta.get("val"))
        plain = plain and kernel is None and env[node] is found
        for operand in node.all_input_nodes:
            if last[operand] is node:
                del env[operand]
    if plain and bind.as_sized(gm, given):
        _AS_PLANNED.add(gm)
    return list(fx.node.map_arg(fx_nodes.outputs(gm.graph), env.__getitem__))


def strided(found: Any, planned: Any) -> Any:
    """An op's results, those in copies whose strides are not the planned ones; the same object where all are."""
    if isinstance(found, (list, tuple)):
        results = [strided(x, y) for x, y in zip(found, planned, strict=True)]
        return found if all(x is y for x, y in zip(found, results, strict=True)) else results
    if not (isinstance(found, torch.Tensor) and isinstance(planned, torch.Tensor) and found.shape == planned.shape):
        return found
    if not fx_values.is_dense(planned) or fx_values.steps(found) == fx_values.steps(planned):
        return found
    return torch.empty_strided(planned.shape, planned.stride(), dtype=found.dtype, device=found.device).copy_(found)


def _run(rank: Rank, op: Op) -> None:
    call = rank.calls[op.segment]
    given = [rank.tensor(ref) for ref in op.reads]
    num_out = op.num_outputs
    into = [rank.destination(ref) for ref in op.writes[num_out:]]
    if rank.poison and op.offset is not None:
        spoil(rank.arena[op.offset :][: op.workspace])
    for ref, value in zip(op.writes, call(*given, *into), strict=False):
        place = rank.program.buffers[ref.name].at
        rank.memory[ref.name] = (
            value if place is None else segment_memory.tensor_at(rank.arena, place, value).copy_(value)
        )


def _update(rank: Rank, op: Op) -> None:
    rank.wrote_state = True
    _run(rank, op)


def _local(rank: Rank, op: Op) -> None:
    assert op.row.runs is not None
    if any(rank.program.buffers[ref.name].kind in PERSISTENT for ref in op.writes):
        rank.wrote_state = True
    op.row.runs([rank.tensor(ref) for ref in op.reads], [rank.destination(ref) for ref in op.writes])


def _start(rank: Rank, op: Op) -> None:
    reads = [rank.tensor(ref) for ref in op.reads]
    writes = [rank.destination(ref) for ref in op.writes]
    if op.gathers and rank.program.buffers[op.writes[0].name].kind in PERSISTENT:
        rank.wrote_state = True
    rank.started[op.target] = op.sources if op.is_collective else set()
    rank.comm.start(op.target, op, [*reads, *writes])


def _wait(rank: Rank, op: Op) -> None:
    rank.comm.wait(op.target)


def _settle(rank: Rank, op: Op) -> None:
    rank.comm.settle(op.target)
    rank.lent.pop(op.target, None)


def _free(rank: Rank, op: Op) -> None:
    """What is lent is still read by other ranks: it keeps its values until the transfer settles."""
    lent = set().union(*rank.lent.values())
    for ref in op.reads:
        gone = rank.memory.pop(ref.name)
        if rank.poison and ref.name not in lent:
            spoil(gone)


HANDLERS: dict[str, Callable[[Rank, Op], None]] = {
    "run": _run,
    "update": _update,
    "wait": _wait,
    "settle": _settle,
    "free": _free,
}


def handler(op: Op) -> Callable[[Rank, Op], None]:
    """What runs an op. Raises KeyError for a kind that nobody knows."""
    return _start if op.transfers else _local if op.row.runs is not None else HANDLERS[op.kind]


def steps(rank: Rank) -> Iterator[int]:
    """Runs the program op by op; yields the op's number whenever a wait is not ready (and may be asked again)."""
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
