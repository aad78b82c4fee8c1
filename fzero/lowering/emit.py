"""emit: a program under construction: its buffers, its ops, and the few segments that lowering makes itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import fx_nodes, kinds, segments
from fzero.ir.op import Op, make_op
from fzero.ir.recorder import record
from fzero.ir.records import Buffer, Ref, buffer_name
from fzero.plan.state_plan import Plan
from fzero.shard.layouts import WHOLE, Layout
from fzero.shard.moves import Transition, transitions
from fzero.shard.placements import Flat

aten = torch.ops.aten


@dataclass
class Emitter:
    """Collects the records of a program. `where` maps a node of the outer graph to the reference that holds its value.
    The builders in this folder write `where` and `buffers`; only the methods write the other fields."""

    plan: Plan
    transport: str
    buffers: dict[str, Buffer] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    segments: dict[str, fx.GraphModule] = field(default_factory=dict)
    elementwise_segments: dict[tuple[Hashable, ...], fx.GraphModule] = field(default_factory=dict)  # by `elementwise`
    where: dict[fx.Node, Ref] = field(default_factory=dict)

    def new(self, name: str, like: torch.Tensor, kind: str) -> Ref:
        """A reference to a new buffer of the shape and dtype of `like`, of this name or the next free one."""
        name = buffer_name(name)
        while name in self.buffers:
            name += "_"
        self.buffers[name] = Buffer(name, like.dtype, tuple(like.shape), kind)
        return Ref(name)

    def rank(self, axis: str) -> Ref:
        """A reference to this rank's place on an axis (0-d int64)."""
        name = f"rank:{axis}"
        self.buffers[name] = Buffer(name, torch.int64, (), "rank", note="this rank's place", axis=axis)
        return Ref(name)

    def emit(
        self, kind: str, reads: Sequence[Ref], writes: Sequence[Ref] = (), *, axis: str | None = None, why: str = "",
        **attrs: int | str,
    ) -> None:  # fmt: skip
        """Adds an op to the end of the program."""
        self.ops.append(make_op(kind, reads, writes, axis=axis, why=why, **attrs))

    def segment(
        self,
        kind: str,
        gm: fx.GraphModule,
        reads: Sequence[Ref],
        writes: Sequence[Ref],
        *,
        why: str,
        **attrs: int | str,
    ) -> None:
        """Adds an op that executes `gm`, which joins the program's segments; `kind` is "run" or "update"."""
        key = segments.digest(gm)
        self.segments.setdefault(key, gm)
        num_outputs = len(writes) - (len(fx_nodes.placeholders(gm.graph)) - len(reads))
        done = make_op(kind, reads, writes, why=why).with_attrs(segment=key, **attrs)
        self.ops.append(done.with_attrs(fresh=num_outputs) if num_outputs else done)

    def transfer(
        self, step: Transition, source: Ref, target: str, *, why: str, scratch: Sequence[Ref] = (), **attrs: int | str
    ) -> None:
        """Adds a transfer, and the wait for it."""
        self.emit(step.kind, [source], [Ref(target), *scratch], axis=step.axis, why=why, **attrs)
        self.emit("wait", [Ref(target)], why=why)

    def whole(self, name: str, kind: str, why: str) -> str:
        """Gathers a buffer that is slices of its bucket. Returns the name of the buffer of this kind that has all."""
        source, full = self.buffers[name], f"{name}.full"
        bucket = self.plan.buckets[source.bucket or ""]
        if full not in self.buffers:
            shape = (bucket.length // source.per,)
            self.buffers[full] = Buffer(
                full, source.dtype, shape, kind, bucket.name, per=source.per, entry=source.entry
            )
            for step in transitions(Layout.over(self.plan.mesh, source.sharded, Flat()), WHOLE):
                self.transfer(step, Ref(name), full, why=why)
        return full

    def elementwise(
        self, fn: Callable[..., torch.Tensor], *args: Hashable, arity: int = 1, like: Buffer, dest: bool = False
    ) -> fx.GraphModule:
        """The segment of a pointwise torch function, `fn(*tensors, *args)`, over `arity` tensors like this buffer."""
        key = (fn, args, arity, like.dtype, like.shape, dest)
        if key not in self.elementwise_segments:
            self.elementwise_segments[key] = _elementwise(fn, args, arity, like, dest)
        return self.elementwise_segments[key]

    def exchange(
        self, source: Ref, like: torch.Tensor, name: str, how: str, parts: int, why: str, axis: str = ""
    ) -> Ref:
        """Emits an all-reduce of a small or odd-shaped value: every rank gets every rank's value and adds them in rank
        order. Returns the reference to the result. axis: "" for all data axes."""
        axis = axis or self.plan.axis
        n = self.plan.mesh.size(axis)
        result = self.new(name, like, "activation")
        room = kinds.of("all_reduce_small").scratch(self.transport, like.numel(), n)
        writes = [result, *([self.new(f"{name}.scratch", like.new_empty(room), "scratch")] if room else [])]
        divisor = n * parts if how == "mean" else 1
        operation = "sum" if how == "mean" else how
        self.emit(
            "all_reduce_small", [source], writes, axis=axis, why=why, op=operation, divisor=divisor,
        )  # fmt: skip
        self.emit("wait", [result], why=why)
        return result


def _elementwise(
    fn: Callable[..., torch.Tensor], args: Sequence[Any], arity: int, like: Buffer, dest: bool
) -> fx.GraphModule:
    with FakeTensorMode():
        xs = [torch.empty(like.shape, dtype=like.dtype) for _ in range(arity)]
        gm = record(lambda *xs: fn(*xs, *args), xs)
    inputs = fx_nodes.placeholders(gm.graph)
    body = [n for n in gm.graph.nodes if n.op == "call_function"]
    result = fx_nodes.output(gm.graph).args[0]
    assert isinstance(result, fx.Node)
    return segments.extract(body, inputs, [result], [result] if dest else [])


def line_of(node: fx.Node) -> str:
    """The user's source line of a node."""
    return str(node.meta.get("source") or "")
