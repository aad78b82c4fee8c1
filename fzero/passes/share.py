"""share: what the batch alone decides is made once for all layers.

An attention mask becomes a bias of the scores in each layer's attention, with the same values each time. Such equal
values, in which no parameter takes part, become one: the first. It is made where its operands are, before the layers,
so that equal layers stay equal. Memory: one of them is kept for the step, in place of one for each layer.

In a pipeline each chunk makes its own: a bias has more bytes than the mask that travels.

Equal casts of one value in the forward become one too, for the backward would keep each: under autocast the three
products of a query, a key and a value each cast what they read. (A parameter's are made anew where they are used.)

    m = le(i, j);  b0 = where(m, 0, -inf);  y0 = attention(q0, k0, v0, b0);  b1 = where(m, 0, -inf);  y1 = ... b1
    becomes   m = le(i, j);  b0 = where(m, 0, -inf);  y0 = attention(q0, k0, v0, b0);  y1 = ... b0
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from fzero.ir import fx_nodes, fx_values, rewrite, segments
from fzero.ir.op import Op
from fzero.ir.program import Program

CAST = torch.ops.aten._to_copy.default


def share(program: Program, chunk_of: Mapping[str, int] | None = None) -> Program:
    """The program whose regions make equal values of the forward once, where no parameter takes part in them.

    chunk_of: in a pipeline, the chunk of each bucket of a numbered layer.
    """
    done: dict[tuple[object, ...], fx.GraphModule] = {}
    ops: list[Op] = []
    for op in program.ops:
        if op.in_region:
            buckets = tuple(program.buffers[ref.name].bucket for ref in (*op.reads, *op.writes[op.num_outputs :]))
            key = (op.segment, buckets)
            if key not in done:
                done[key] = _shared(program.segments[op.segment], buckets, chunk_of or {})
            op = rewrite.run_op(op, done[key], op.reads, op.writes)
        ops.append(op)
    pool = {segments.digest(gm): gm for gm in done.values()}
    return rewrite.finish(program, "share", ops=ops, new_segments=pool)


def _shared(gm: fx.GraphModule, buckets: tuple[str | None, ...], chunk_of: Mapping[str, int]) -> fx.GraphModule:
    """The segment with such values as one; itself, where there are none. `buckets`: of its placeholders."""
    graph = segments.copied(gm.graph)
    bucket_of = dict(zip(fx_nodes.placeholders(graph), buckets, strict=True))
    outs = fx_nodes.outputs(graph)
    kept = {*outs, *(owner for out in outs for owner, _ in fx_values.memory(out))}  # each is a buffer of its own
    numbers: dict[str, int] = {}
    params = {n for n, b in bucket_of.items() if b is not None}
    number: dict[fx.Node, int] = {n: i for i, (n, b) in enumerate(bucket_of.items()) if b is None}
    first: dict[tuple[int, int], fx.Node] = {}  # by number and chunk
    several: dict[fx.Node, int] = {}  # the nodes that stand for more than one, each with its chunk
    casts: dict[tuple[str, int], fx.Node] = {}
    chunk = 0
    for node in list(graph.nodes):
        owners = (bucket_of.get(fx_nodes.base(a)) for a in node.all_input_nodes)
        chunk = max([chunk, *(chunk_of.get(owner or "", 0) for owner in owners)])
        free = fx_nodes.is_compute(node) and not node.meta.get("phase") and not fx_nodes.mutated(node)
        if not free:
            continue
        if not all(a in number for a in node.all_input_nodes):
            if node.target is CAST and fx_nodes.base(fx_nodes.operand(node)) not in params and node not in kept:
                same = casts.setdefault((f"{node.args} {node.kwargs}", chunk), node)
                if same is not node:
                    node.replace_all_uses_with(same)
                    graph.erase_node(node)
            continue
        text = f"{node.target} {fx.node.map_arg((node.args, node.kwargs), lambda n: f'%{number[n]}')}"
        number[node] = numbers.setdefault(text, len(bucket_of) + len(numbers))
        made = node.all_input_nodes and not fx_nodes.is_view(node) and isinstance(node.meta.get("val"), torch.Tensor)
        if not made or node in kept:
            continue
        same = first.setdefault((number[node], chunk), node)
        if same is not node:
            node.replace_all_uses_with(same)
            several[same] = chunk
    for node, its_chunk in several.items():
        if its_chunk == 0:
            _hoist(graph, node)
    return segments.module(graph) if len(graph.nodes) < len(gm.graph.nodes) or several else gm


def _hoist(graph: fx.Graph, node: fx.Node) -> None:
    """Moves a node up to its latest operand, and before it those operands that are made of nothing. In place."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    of_nothing = [a for a in node.all_input_nodes if fx_nodes.is_compute(a) and not a.all_input_nodes]
    place = max((a for a in node.all_input_nodes if a not in of_nothing), key=order.__getitem__, default=None)
    if place is None:
        return
    late = [n for n in of_nothing if order[n] > order[place]]
    for moved in (*late, node):
        place.append(moved)
        place = moved
