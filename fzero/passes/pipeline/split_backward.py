"""split_backward: a backward segment in two halves: what other segments wait for, and the gradients of parameters.

The first half is what the segment's outputs need; the rest, which writes gradients into buckets, is the second. Values
of the first that the second reads are kept in buffers between the two. Views of what is at hand are taken anew, and all
results of one op stay in one half.

    run g a w -> g2 grad[...]   becomes   run g a w -> g2 k0;  run a k0 -> grad[...]
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref

aten = torch.ops.aten


@dataclass(frozen=True)
class Halves:
    """A segment in two. early, late: positions of the op's reads that the first and the second half read. kept: values
    of the first half that the second reads. outputs: positions of the first half's outputs that it reads."""

    first: fx.GraphModule
    second: fx.GraphModule
    early: tuple[int, ...]
    late: tuple[int, ...]
    kept: tuple[fx.Node, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """The two runs, the segments that they execute, and the buffers between them. A missing half is None."""

    first: Op | None
    second: Op | None
    segments: dict[str, fx.GraphModule]
    buffers: dict[str, Buffer]


def split_backward(program: Program, op: Op, known: dict[str, Halves]) -> Split:
    """The halves of a backward run. `known` holds halves by segment, for the next run of the same one."""
    gm = program.segments[op.segment]
    if len(op.writes) == op.num_outputs:
        return Split(op, None, {}, {})
    if not op.num_outputs:
        return Split(None, op, {}, {})
    if op.segment not in known:
        known[op.segment] = halves(gm, len(op.reads))
    parts = known[op.segment]
    stem = op.writes[0].name
    buffers = {}
    for number, node in enumerate(parts.kept):
        value = node.meta["val"]
        name = f"{stem}.w{number}"
        buffers[name] = Buffer(name, value.dtype, tuple(value.shape), "activation")
    names = [Ref(name) for name in buffers]
    outs, dests = op.writes[: op.num_outputs], op.writes[op.num_outputs :]
    first = rewrite.run_op(op, parts.first, [op.reads[i] for i in parts.early], [*outs, *names])
    reads = [*(op.reads[i] for i in parts.late), *names, *(outs[i] for i in parts.outputs)]
    second = rewrite.run_op(op, parts.second, reads, dests)
    return Split(first, second, {first.segment: parts.first, second.segment: parts.second}, buffers)


def halves(gm: fx.GraphModule, num_reads: int) -> Halves:
    """A segment that has outputs and destinations, in two. `num_reads` of its placeholders are inputs."""
    holders = fx_nodes.placeholders(gm.graph)
    inputs = holders[:num_reads]
    outs = fx_nodes.outputs(gm.graph)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    copies = [n for n in gm.graph.nodes if n.target is aten.copy_.default and n.args[0] in holders[num_reads:]]
    body = [n for n in gm.graph.nodes if n.op == "call_function" and n not in copies]
    early = {node for node in fx_nodes.ancestors(*outs) if fx_nodes.is_compute(node)}
    for node in body:  # results of one op are picked where it runs
        if node not in early and node.target is operator.getitem and node.args[0] in early:
            early.add(node)
    late = {node for node in body if node not in early}
    views = {node for node in early if fx_nodes.is_view(node)}
    results = [fx_nodes.operand(copy, 1) for copy in copies]
    crossing: dict[fx.Node, None] = {}
    again: set[fx.Node] = set()  # views, taken in the second half too
    todo = [*(a for node in late for a in node.all_input_nodes), *results]
    while todo:
        node = todo.pop()
        if node in late or node in again or node in crossing:
            continue
        if node in views:
            again.add(node)
            todo += node.all_input_nodes
        else:
            crossing[node] = None
    needed = sorted(crossing, key=order.__getitem__)
    kept = [n for n in needed if n in early and n not in outs]
    read = [n for n in needed if n.op == "placeholder"]
    shared = [n for n in needed if n in outs]
    given = [n for n in inputs if any(user in early for user in n.users) or n in outs]
    first = segments.extract([n for n in body if n in early], given, [*outs, *kept])
    nodes = sorted(late | again, key=order.__getitem__)
    second = segments.extract(nodes, [*read, *kept, *shared], results, [fx_nodes.operand(copy) for copy in copies])
    positions = {node: i for i, node in enumerate(inputs)}
    first_reads, later_reads = (tuple(positions[n] for n in nodes) for nodes in (given, read))
    return Halves(first, second, first_reads, later_reads, tuple(kept), tuple(outs.index(n) for n in shared))
