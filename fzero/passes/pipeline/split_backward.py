"""split_backward: a backward segment in two halves: what other segments wait for, and the gradients of parameters.

The first half is what the segment's outputs need; the rest, which writes gradients into buckets, is the second. Values
of the first that the second reads are kept in buffers between the two. Views of what is at hand are taken anew, and all
results of one op stay in one half.

    run g a w -> g2 grad[...]   becomes   run g a w -> g2 k0;  run a k0 -> grad[...]
"""

from __future__ import annotations

import operator
from collections.abc import Collection
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
    of the first half that the second reads. outputs: positions of the first half's outputs that it reads. fresh, dests:
    positions of the outputs and of the destinations that the second writes."""

    first: fx.GraphModule
    second: fx.GraphModule
    early: tuple[int, ...]
    late: tuple[int, ...]
    kept: tuple[fx.Node, ...]
    outputs: tuple[int, ...]
    fresh: tuple[int, ...]
    dests: tuple[int, ...]


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
    return in_two(op, known[op.segment], op.writes[0].name)


def in_two(op: Op, parts: Halves, stem: str) -> Split:
    """A run in these halves. stem: of the names of the buffers between them."""
    buffers = {}
    for number, node in enumerate(parts.kept):
        value = node.meta["val"]
        name = f"{stem}.w{number}"
        buffers[name] = Buffer(name, value.dtype, tuple(value.shape), "activation")
    names = [Ref(name) for name in buffers]
    outs, dests = op.writes[: op.num_outputs], op.writes[op.num_outputs :]
    stay = [ref for i, ref in enumerate(dests) if i not in parts.dests]
    given = [ref for i, ref in enumerate(outs) if i not in parts.fresh]
    second = rewrite.run_op(
        op,
        parts.second,
        [*(op.reads[i] for i in parts.late), *names, *(outs[i] for i in parts.outputs)],
        [*(outs[i] for i in parts.fresh), *(dests[i] for i in parts.dests)],
    )
    if not (given or names or stay):
        return Split(None, second, {second.segment: parts.second}, buffers)
    first = rewrite.run_op(op, parts.first, [op.reads[i] for i in parts.early], [*given, *names, *stay])
    return Split(first, second, {first.segment: parts.first, second.segment: parts.second}, buffers)


def halves(gm: fx.GraphModule, num_reads: int) -> Halves:
    """A segment that has outputs and destinations, in two. `num_reads` of its placeholders are inputs."""
    body = work(gm, num_reads)
    early = {node for node in fx_nodes.ancestors(*fx_nodes.outputs(gm.graph)) if fx_nodes.is_compute(node)}
    for node in body:  # results of one op are picked where it runs
        if node not in early and node.target is operator.getitem and node.args[0] in early:
            early.add(node)
    return parted(gm, num_reads, {n for n in body if n not in early}, range(len(destinations(gm, num_reads))))


def destinations(gm: fx.GraphModule, num_reads: int) -> list[fx.Node]:
    """Of each destination of a segment the copy into it."""
    into = {n.args[0]: n for n in gm.graph.nodes if n.target is aten.copy_.default}
    return [into[holder] for holder in fx_nodes.placeholders(gm.graph)[num_reads:]]


def work(gm: fx.GraphModule, num_reads: int) -> list[fx.Node]:
    """What a segment computes, in order."""
    copies = {*destinations(gm, num_reads)}
    return [n for n in gm.graph.nodes if n.op == "call_function" and n not in copies]


def parted(gm: fx.GraphModule, num_reads: int, late: Collection[fx.Node], dests: Collection[int]) -> Halves:
    """A segment in two: these nodes, and the copies into these destinations, are the second half."""
    inputs, returned = fx_nodes.placeholders(gm.graph)[:num_reads], fx_nodes.outputs(gm.graph)
    outs, fresh = [n for n in returned if n not in late], [n for n in returned if n in late]
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    body, every = work(gm, num_reads), destinations(gm, num_reads)
    early = {n for n in body if n not in late}
    copies, stay = [every[i] for i in dests], [copy for i, copy in enumerate(every) if i not in dests]
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
    given = [n for n in inputs if any(user in early or user in stay for user in n.users) or n in outs]
    first = segments.extract(
        [n for n in body if n in early],
        given,
        [*(fx_nodes.operand(copy, 1) for copy in stay), *outs, *kept],
        [fx_nodes.operand(copy) for copy in stay],
    )
    nodes = sorted({*late, *again}, key=order.__getitem__)
    second = segments.extract(
        nodes, [*read, *kept, *shared], [*results, *fresh], [fx_nodes.operand(copy) for copy in copies]
    )
    positions = {node: i for i, node in enumerate(inputs)}
    first_reads, later_reads = (tuple(positions[n] for n in nodes) for nodes in (given, read))
    again_read, made = (tuple(returned.index(n) for n in nodes) for nodes in (shared, fresh))
    return Halves(first, second, first_reads, later_reads, tuple(kept), again_read, made, tuple(dests))
