"""feedback: edits that only programs have whose codes feed back what they lose (`fzero.ir.fed_mean`)."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import fx

from fzero.ir.op import Op
from fzero.ir.program import Program
from lab.mutate.coded import DECODES, changed
from lab.mutate.edits import alike, drop, find, pick, put, replaced

aten = torch.ops.aten


def _errors(p: Program, op: Op) -> list[int]:
    """Which reads of an op that makes sums of gradients and errors are errors."""
    feeds = op.computes and not op.in_region and any(p.buffers[ref.name].kind == "grad" for ref in op.writes)
    return [i for i, ref in enumerate(op.reads) if p.buffers[ref.name].per_rank] if feeds else []


def _in_one(rng: random.Random, p: Program, change: Callable[[fx.Graph, fx.Node], bool]) -> Program | None:
    """The program with the graph of one such op changed, where an error comes in."""
    index = pick(rng, find(p, lambda op: _errors(p, op)))
    if index is None:
        return None

    def edit(graph: fx.Graph) -> bool:
        holders = [node for node in graph.nodes if node.op == "placeholder"]
        return change(graph, holders[rng.choice(_errors(p, p.ops[index]))])

    return changed(p, index, edit)


def _times(factor: int) -> Callable[[fx.Graph, fx.Node], bool]:
    """A change: the error is added so many times."""

    def change(graph: fx.Graph, error: fx.Node) -> bool:
        left = [error]
        while left:
            node = left.pop()
            if node.target in (aten.add.Tensor, aten.add.out):
                node.update_kwarg("alpha", factor)
                return True
            left += node.users
        return False

    return change


def not_added(rng: random.Random, p: Program) -> Program | None:
    """What earlier codes have lost of a gradient is not added to it."""
    return _in_one(rng, p, _times(0))


def added_twice(rng: random.Random, p: Program) -> Program | None:
    """What earlier codes have lost is added twice."""
    return _in_one(rng, p, _times(2))


def kept_whole(rng: random.Random, p: Program) -> Program | None:
    """All of a sum is kept as lost, though its code was sent; or what was sent is kept."""

    def change(graph: fx.Graph, error: fx.Node) -> bool:
        node = pick(rng, [n for n in graph.nodes if n.target is aten.sub.Tensor])
        if node is None:
            return False
        node.replace_all_uses_with(node.all_input_nodes[rng.choice((0, 1))])
        return True

    return _in_one(rng, p, change)


def never_written(rng: random.Random, p: Program) -> Program | None:
    """What this step's codes have lost is not kept."""
    kept = find(p, lambda op: op.computes and op.writes and all(p.buffers[ref.name].per_rank for ref in op.writes))
    index = pick(rng, kept)
    return None if index is None else drop(p, index)


def of_another_leaf(rng: random.Random, p: Program) -> Program | None:
    """The error of another leaf of the same form is added."""
    index = pick(rng, find(p, lambda op: _errors(p, op)))
    if index is None:
        return None
    n = rng.choice(_errors(p, p.ops[index]))
    others = [ref for ref in alike(p, p.ops[index].reads[n]) if p.buffers[ref.name].per_rank]
    other = pick(rng, others)
    return None if other is None else put(p, index, replaced(p.ops[index], "reads", n, other))


def of_another_code(rng: random.Random, p: Program) -> Program | None:
    """What is kept as lost is what another codec would have lost: its code is decoded twice as far from zero."""

    def change(graph: fx.Graph, error: fx.Node) -> bool:
        node = pick(rng, [n for n in graph.nodes if n.target in DECODES])
        if node is None:
            return False
        with graph.inserting_after(node):
            twice = graph.call_function(aten.mul.Tensor, (node, 2.0))
        twice.meta = {**node.meta}
        node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
        return True

    return _in_one(rng, p, change)
