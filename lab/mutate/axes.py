"""axes: edits of programs with an axis `tp`, alone or beside others. Sums, norms, ranks, divisors, sources, arguments.

They are the faults that a writer of such programs makes: a sum of parts that is a maximum, is left out or runs over
another axis, a norm that lacks a share, a number of another rank, a source of an earlier moment, and, inside a segment,
operands, calls, arguments and dtypes. An edit finds no place in a program without `tp`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fzero.ir import fx_nodes
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Ref
from lab.mutate import within
from lab.mutate.edits import (
    Edit,
    Mutation,
    alike,
    drop,
    find,
    on,
    pick,
    places_of,
    put,
    replaced,
    touching,
    wait_of,
    with_buffers,
    with_ops,
)

aten = torch.ops.aten

AXIS = "tp"  # of the drawn programs


def with_tp(edit: Edit, *, alone: bool = False) -> Mutation:
    """The mutation that makes an edit on a program of several ranks of `tp`, on one rank or on all that run it."""
    return on(lambda rng, p: edit(rng, p) if AXIS in p.mesh and p.mesh.size(AXIS) > 1 else None, alone=alone)


# --- transfers --------------------------------------------------------------------------------------------------------


def max_for_sum(rng: random.Random, p: Program) -> Program | None:
    """A reduction over any axis takes the largest where it is to add, or adds where it is to take the largest."""
    index = pick(rng, find(p, lambda op: op.reduces))
    if index is None:
        return None
    return put(p, index, p.ops[index].with_attrs(op="sum" if p.ops[index].reduction == "max" else "max"))


def another_axis(rng: random.Random, p: Program) -> Program | None:
    """A transfer runs over another axis of the mesh."""
    index = pick(rng, find(p, lambda op: op.transfers and not op.moves))
    if index is None:
        return None
    other = pick(rng, [name for name, _ in p.mesh if name != p.ops[index].axis])
    return None if other is None else put(p, index, replace(p.ops[index], axis=other))


def divided_by_tp(rng: random.Random, p: Program) -> Program | None:
    """A reduction divides by the ranks of `tp` as well, or no more by the ranks that it is to divide by."""
    index = pick(rng, find(p, lambda op: op.reduces))
    if index is None:
        return None
    op, n = p.ops[index], p.mesh.size(AXIS)
    others = [op.divisor * n, p.mesh.size(str(op.axis)), max(op.divisor // n, 1), p.world_size]
    wrong = pick(rng, [d for d in others if d != op.divisor])
    return None if wrong is None else put(p, index, op.with_attrs(divisor=wrong))


def share_of_norm(rng: random.Random, p: Program) -> Program | None:
    """A norm lacks a share: what other ranks add to it, or a term of its own, which another term stands for."""
    sums = find(p, lambda op: op.reduces and op.row.small and _wide(p, op))
    if sums and rng.random() < 0.5:
        return without_transfer(rng, p, rng.choice(sums))
    terms = places_of(p, "reads", lambda op, ref: op.computes and _norm_term(p, ref))
    if (place := pick(rng, terms)) is None:
        return None
    op = p.ops[place[0]]
    own = op.reads[place[1]]
    other = pick(rng, [ref for ref in op.reads if ref != own and _norm_term(p, ref)])
    return None if other is None else put(p, place[0], replaced(op, "reads", place[1], other))


def _wide(p: Program, op: Op) -> bool:
    return p.buffers[op.reads[0].name].dtype is torch.float64


def _norm_term(p: Program, ref: Ref) -> bool:
    """Whether a reference is a number in float64, in which squares are added."""
    buffer = p.buffers[ref.name]
    one = (ref.start is not None and (ref.stop or 0) - ref.start == 1) or buffer.numel == 1
    return one and buffer.dtype is torch.float64 and buffer.bucket is None


def call_dropped(rng: random.Random, p: Program) -> Program | None:
    """A transfer is left out: who reads its result reads its source, where that has the form."""
    index = pick(rng, find(p, lambda op: op.is_collective))
    return None if index is None else without_transfer(rng, p, index)


def without_transfer(rng: random.Random, p: Program, index: int) -> Program | None:
    """The program without a transfer; its readers read the source where both have one form, else what they find."""
    op, left = p.ops[index], drop(p, index, wait_of(p, index))
    source, target = op.reads[0], op.writes[0]
    one_form = p.buffers[source.name].numel == p.buffers[target.name].numel and source.start is None
    if not one_form or rng.random() < 0.1:
        return left
    number = left.ops.index(op) if op in left.ops else index
    ops = [_reading(other, target.name, source.name) if i >= number else other for i, other in enumerate(left.ops)]
    freed = {ref.name for other in ops if other.is_free for ref in other.reads}
    ops = [_unfreed(other, source.name) for other in ops] if source.name in freed else ops
    return with_ops(left, [_freeing(other, target.name, source.name) for other in ops])


def _reading(op: Op, name: str, other: str) -> Op:
    if op.is_mark:
        return op
    return replace(op, reads=tuple(replace(r, name=other) if r.name == name else r for r in op.reads))


def _unfreed(op: Op, name: str) -> Op:
    left = tuple(ref for ref in op.reads if ref.name != name)
    return replace(op, reads=left) if op.is_free and left else op


def _freeing(op: Op, name: str, other: str) -> Op:
    """A free of the target, which holds nothing now, frees the source."""
    if not op.is_free:
        return op
    return replace(op, reads=tuple(replace(ref, name=other) if ref.name == name else ref for ref in op.reads))


def earlier_source(rng: random.Random, p: Program) -> Program | None:
    """A transfer or a run reads a value of the same form that was there earlier."""
    collective = rng.random() < 0.7
    places = places_of(p, "reads", lambda op, _: op.is_collective if collective else op.computes)
    for index, n in rng.sample(places, min(len(places), 12)):
        op = p.ops[index]
        others = [ref for ref in alike(p, op.reads[n]) if (uses := touching(p, ref.name)) and uses[0] < index]
        if (other := pick(rng, others)) is not None:
            return put(p, index, replaced(op, "reads", n, other))
    return None


# --- ranks ------------------------------------------------------------------------------------------------------------


def another_ranks_constant(rng: random.Random, p: Program) -> Program | None:
    """A run takes another rank's place for its own: that on another axis, or the next one's."""
    places = places_of(p, "reads", lambda op, ref: op.computes and p.buffers[ref.name].kind == "rank")
    if (place := pick(rng, places)) is None:
        return None
    index, n = place
    own = p.buffers[p.ops[index].reads[n].name]
    axes = [name for name, _ in p.mesh if name != own.axis]
    if axes and rng.random() < 0.4:
        axis = rng.choice(axes)
        other = replace(own, name=f"rank:{axis}", axis=axis)
        return put(with_buffers(p, other), index, replaced(p.ops[index], "reads", n, Ref(other.name)))

    def next_one(rng: random.Random, graph: fx.Graph) -> Any:
        holder = fx_nodes.placeholders(graph)[n]
        if not holder.users:
            return None
        with graph.inserting_after(holder):
            more = graph.call_function(aten.add.Tensor, (holder, 1))
        with graph.inserting_after(more):
            turned = graph.call_function(aten.remainder.Scalar, (more, p.mesh.size(str(own.axis))))
        holder.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not more)
        return holder

    return within.changed(rng, p, index, next_one)


# --- arguments --------------------------------------------------------------------------------------------------------


def integer_argument(rng: random.Random, graph: fx.Graph) -> Any:
    """A whole number in an op's arguments, a dim or a size, is one more or less."""
    return _other_number(rng, graph, lambda x: type(x) is int, lambda x: x + rng.choice((-1, 1)))


def epsilon(rng: random.Random, graph: fx.Graph) -> Any:
    """A small number is ten times as large, a tenth, or zero."""
    small = lambda x: type(x) is float and 0 < abs(x) < 1e-3  # noqa: E731
    return _other_number(rng, graph, small, lambda x: rng.choice((x * 10, x / 10, 0.0)))


def _other_number(rng: random.Random, graph: fx.Graph, test: Callable[[Any], bool], other: Callable[[Any], Any]) -> Any:
    """One number of one node that fits the test becomes another."""
    places = []
    for node in graph.nodes:
        if node.op == "call_function":
            numbers: list[Any] = []
            fx.node.map_aggregate((node.args, node.kwargs), numbers.append)
            places += [(node, i) for i, x in enumerate(numbers) if test(x)]
    if (chosen := pick(rng, places)) is None:
        return None
    node, which, seen = *chosen, [-1]

    def turned(value: Any) -> Any:
        seen[0] += 1
        return other(value) if seen[0] == which else value

    node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), turned)
    return node


def another_dtype(rng: random.Random, p: Program) -> Program | None:
    """A value goes through fewer bits: inside a segment, or as it travels."""
    index = pick(rng, find(p, lambda op: op.is_collective))
    if index is not None and rng.random() < 0.3:
        names = {ref.name for ref in (*p.ops[index].reads, *p.ops[index].writes)}
        low = [replace(p.buffers[name], dtype=torch.bfloat16) for name in names]
        return with_buffers(p, *low)
    return within.inside(within.wrong_cast)(rng, p)
