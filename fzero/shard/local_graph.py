"""local_graph: the graph of one rank, being written: calls on parts, transfers, copies and views around these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import OpOverload
from fzero.ir import forms, fx_nodes, segments
from fzero.shard import ops
from fzero.shard.claims import Claim, claim
from fzero.shard.local_forms import traced
from fzero.shard.moves import VIEWS, Move, Transition, transition, wire_bytes
from fzero.shard.placements import Partial, Placement, Replicated, Shard, local_shape
from fzero.shard.rules import Strategy

aten = torch.ops.aten
AROUND = "around a transfer"  # of a view: it is none of the step


class LocalGraph:
    """The nodes of one rank's graph. graph: holds them. rank: the node that holds the rank. moves: what was moved.

    Each method appends nodes, with their fake values; only the methods write the fields, and the writer sets `rank`
    and `phase`. In all of them `x` is the global value that a node belongs to, or a part of. A node is of the phase of
    the call that it is written for, not of its value's: what the backward first asks for is moved in the backward.
    """

    rank: fx.Node

    def __init__(self, n: int, axis: str) -> None:
        self.n, self.axis = n, axis
        self.graph = fx.Graph()
        self.moves: list[Move] = []
        self.mode: Any = None  # of the fake tensors
        self.others: fx.Node | None = None  # whether this rank is another than the first
        self.why = ""  # of the transfer that is being written
        self.phase: str | None = None  # of the call that nodes are written for

    def fake(self, make: Callable[[], Any]) -> Any:
        """The result of a call on fake tensors."""
        with self.mode if self.mode is not None else torch.no_grad():
            return make()

    def placeholder(self, x: fx.Node, placement: Placement) -> fx.Node:
        """An input, in its local shape."""
        value = x.meta["val"]
        self.mode = self.mode or getattr(value, "fake_mode", None)
        mine = self.graph.placeholder(str(x.target))
        mine.meta = dict(x.meta)
        mine.meta["val"] = self.fake(lambda: _like(value, local_shape(value.shape, placement, self.n)))
        return mine

    def node(self, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        """A node of the local graph, with its fake value. A view that local strides do not allow is made of a copy."""
        given = fx.node.map_arg((tuple(args), kwargs), lambda x: x.meta["val"])
        try:
            value = self.fake(lambda: self._called(target, *given))
        except (RuntimeError, ValueError):
            if target not in VIEWS:
                raise
            first = self.node(aten.clone.default, (args[0],), {"memory_format": torch.contiguous_format}, like)
            return self.node(target, (first, *args[1:]), kwargs, like)
        made = self.graph.call_function(target, tuple(args), dict(kwargs))
        made.meta = {**like.meta, "val": value, "phase": self.phase}
        made.meta.pop(AROUND, None)
        if target in ops.TRANSFERS and args[1] == self.axis:  # not one of another axis, which has its own
            made.meta["moved"] = self.why
        return made

    def _called(self, target: Any, args: Any, kwargs: Any) -> Any:
        by_form = self.mode is not None and isinstance(target, OpOverload)
        if not by_form:
            return target(*args, **kwargs)
        return segments.true_statistics(target, args, forms.run(target, args, kwargs))

    def form(self, node: fx.Node, strategy: Strategy, args: Any, kwargs: Any) -> fx.Node | list[fx.Node]:
        """A local form, traced and written in the op's place: its result, or its results."""
        graph, results, env = traced(strategy.local, args, kwargs, self.rank, self.n, self.axis)
        for each in graph.nodes:
            if each.op == "call_function":
                a, k = fx.node.map_arg((each.args, each.kwargs), env.__getitem__)
                if each.target is ops.ALL_REDUCE:
                    self._inside(node, each)
                env[each] = self.node(each.target, a, k, node)
        return env[results[0]] if isinstance(node.meta["val"], torch.Tensor) else [env[x] for x in results]

    def _inside(self, node: fx.Node, transfer: fx.Node) -> None:
        """Notes a transfer within a local form."""
        value, how = transfer.meta["val"], str(transfer.args[3])
        nbytes = wire_bytes(Partial(how), Replicated(), value, self.n)
        phase, line = str(node.meta.get("phase") or "forward"), str(node.meta.get("source", ""))
        sums = Partial(how), Replicated()
        move = Move("all_reduce", node.name, *sums, nbytes, phase, node.name, line, False, value.dtype)
        self.moves.append(move)
        self.why = self.moves[-1].why

    def addend(self, mine: fx.Node, x: fx.Node) -> fx.Node:
        """A number that all ranks have, kept by the first alone: with the zeros of the others it is a sum."""
        if self.others is None:
            self.others = self.node(aten.ne.Scalar, (self.rank, 0), {}, self.rank)
        done = self.node(aten.masked_fill.Scalar, (mine, self.others, 0), {}, x)
        return claim(done, Claim("addend", x.name, (Partial(),)))

    def move(self, mine: fx.Node, move: Move, x: fx.Node) -> fx.Node:
        """A transfer, or a part taken."""
        self.moves.append(move)
        self.why = move.why
        return claim(self._moved(mine, move.source, move.target, x), Claim("move", x.name, (move.target,), (mine,)))

    def _moved(self, mine: fx.Node, source: Placement, want: Placement, x: fx.Node) -> fx.Node:
        """Writes a transfer. The dims of its result lie in memory in the order that the global value has: views after
        it count on that."""
        (step,) = transition(source, want, self.axis)
        done = self._transferred(step, mine, x)
        order = _memory_order(x.meta["val"])
        if order == sorted(order):
            return done
        back = sorted(range(len(order)), key=order.__getitem__)
        done = self.node(aten.permute.default, (done, order), {}, x)
        done = self.node(aten.clone.default, (done,), {"memory_format": torch.contiguous_format}, x)
        return self.node(aten.permute.default, (done, back), {}, x)

    def _transferred(self, step: Transition, mine: fx.Node, x: fx.Node) -> fx.Node:
        shape, over = mine.meta["val"].shape, (self.axis, self.n)
        match step:
            case Transition("all_reduce", _, Partial(how)):
                base = self._owned(mine, x)
                done = self.node(ops.ALL_REDUCE, (base, *over, how), {}, x)
                return done if base.meta["val"].shape == shape else self._view(done, shape, x)
            case Transition("reduce_scatter", _, _, Shard() as want):
                part = list(local_shape(shape, want, self.n))
                return self.node(ops.REDUCE_SCATTER, (self._parts(mine, want, x), *over, part), {}, x)
            case Transition("all_to_all", _, Shard() as source, Shard() as want):
                part = list(local_shape(shape, want, self.n))
                return self._joined(ops.ALL_TO_ALL, self._parts(mine, want, x), source, part, x)
            case Transition("all_gather", _, Shard() as source):
                return self._joined(ops.ALL_GATHER, self._owned(mine, x), source, shape, x)
            case Transition("own_part", _, _, Shard() as want):
                return self.node(ops.OWN_PART, (mine, self.rank, self.n, want.dim, want.groups), {}, x)
        raise AssertionError(f"{step} is no transfer of a value that lies in parts by its dims")

    def _owned(self, mine: fx.Node, x: fx.Node) -> fx.Node:
        """A contiguous value with memory of its own and the elements of `mine` in order: what a transfer reads."""
        while mine.target in VIEWS and fx_nodes.operand(mine).meta["val"].is_contiguous():
            mine = fx_nodes.operand(mine)
        return self.in_memory(mine, x)

    def in_memory(self, mine: fx.Node, x: fx.Node) -> fx.Node:
        """The value with memory of its own, its elements in order: what a transfer of another axis reads."""
        if mine.op == "call_function" and not fx_nodes.is_view(mine) and mine.meta["val"].is_contiguous():
            return mine
        return self.node(aten.clone.default, (mine,), {"memory_format": torch.contiguous_format}, x)

    def _view(self, mine: fx.Node, shape: Sequence[int], x: fx.Node) -> fx.Node:
        made = self.node(aten.view.default, (mine, list(shape)), {}, x)
        made.meta[AROUND] = True
        return made

    def _parts(self, mine: fx.Node, want: Shard, x: fx.Node) -> fx.Node:
        """The value in the order of its parts: rank by rank, what each holds under `want`."""
        shape, dim, groups = mine.meta["val"].shape, want.dim, want.groups
        if _leads(shape, want):
            return self._owned(mine, x)
        cut = [*shape[:dim], groups, self.n, shape[dim] // (groups * self.n), *shape[dim + 1 :]]
        return self._ordered(self._view(mine, cut, x), [dim + 1, *(d for d in range(len(cut)) if d != dim + 1)], x)

    def _joined(self, target: Any, given: fx.Node, source: Shard, part: Sequence[int], x: fx.Node) -> fx.Node:
        """The result of a transfer: the parts of all ranks, each of shape `part`, joined along the dim of `source`."""
        dim, groups = source.dim, source.groups
        whole = [*part[:dim], part[dim] * self.n, *part[dim + 1 :]]
        if _leads(part, source):
            return self.node(target, (given, self.axis, self.n, whole), {}, x)
        cut = [self.n, *part[:dim], groups, part[dim] // groups, *part[dim + 1 :]]
        done = self.node(target, (given, self.axis, self.n, cut), {}, x)
        return self._view(self._ordered(done, [*range(1, dim + 2), 0, *range(dim + 2, len(cut))], x), whole, x)

    def _ordered(self, mine: fx.Node, order: Sequence[int], x: fx.Node) -> fx.Node:
        """A copy with its dims in another order."""
        moved = self.node(aten.permute.default, (mine, list(order)), {}, x)
        return self.node(aten.clone.default, (moved,), {"memory_format": torch.contiguous_format}, x)


def _leads(shape: Sequence[int], shard: Shard) -> bool:
    """Whether the parts of a value lie one after the other in memory: nothing lies outside of the dim that is cut."""
    return shard.groups == 1 and all(size == 1 for size in shape[: shard.dim])


def _memory_order(value: torch.Tensor) -> list[int]:
    """The dims from the outermost in memory to the innermost. An expanded dim, of stride 0, is as it would be in a
    copy: kernels of attention read a last dim that is not innermost wrongly."""
    strides, inner = list(value.stride()), 1
    for d in reversed(range(value.ndim)):
        strides[d] = strides[d] or inner
        inner = max(inner, strides[d] * value.shape[d])
    return sorted(range(value.ndim), key=lambda d: (-strides[d], d))


def _like(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An empty tensor of a shape whose dims lie in memory in the order of another's."""
    order = _memory_order(value)
    back = sorted(range(len(order)), key=order.__getitem__)
    return value.new_empty([shape[d] for d in order]).permute(back)
