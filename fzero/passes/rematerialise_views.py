"""rematerialise_views: views, and casts, copies and codes of parameters, are made anew right before each use.

A view made in the forward and used in the backward (`t(weight)`) would keep a gathered bucket alive in between, and a
value that crosses a segment's border as a view would share memory with another buffer. After this pass neither happens:
only values that own their memory outlive the op that made them. Views cost nothing; a parameter's cast is computed
again, and so is its copy in another order, which `einsum` makes of weights for a product: kept, it would be the
parameter, whole, between forward and backward.

    t = t(w);  a = mm(x, t);  ...  b = mm(g, t)
    becomes   t1 = t(w);  a = mm(x, t1);  ...  t2 = t(w);  b = mm(g, t2)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.code_ops import CODES
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.shard.ops import TRANSFERS

COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
MadeAnew = Callable[[fx.Node], bool]  # whether a node is made again before each use


def rematerialise_views(program: Program) -> Program:
    """The program with views, casts and copies made again before each use, so that none crosses a cut."""
    pool: dict[str, fx.GraphModule] = {}
    done: dict[str, fx.GraphModule] = {}
    ops: list[Op] = []
    for op in program.ops:
        if op.in_region:
            key = op.segment
            if key not in done:
                params = {i for i, ref in enumerate(op.reads) if program.buffers[ref.name].bucket is not None}
                done[key] = _sunk(program.segments[key], params)
            op = rewrite.run_op(op, done[key], op.reads, op.writes)
            pool.setdefault(op.segment, done[key])
        ops.append(op)
    return rewrite.finish(program, "rematerialise_views", ops=ops, new_segments=pool)


def again(params: set[fx.Node]) -> MadeAnew:
    """The test for nodes that are made anew: views, casts and copies of these placeholders or of views of them, and
    their codes, what these say, and casts and copies of that."""

    def made_anew(node: fx.Node) -> bool:
        if fx_nodes.is_view(node):
            return True
        if node.target not in COPIES and node.target not in CODES:
            return False
        if any(user.target in TRANSFERS for user in node.users):
            return False  # a transfer is an op of its own, and reads a value
        source = fx_nodes.base(fx_nodes.operand(node))
        return source in params or (source.op == "call_function" and made_anew(source))

    return made_anew


def _sunk(gm: fx.GraphModule, params: set[int]) -> fx.GraphModule:
    """The segment with views, casts and copies made again before each user."""
    holders = fx_nodes.placeholders(gm.graph)
    made_anew = again({holders[i] for i in params if i < len(holders)})
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def fetch(node: fx.Node, own: dict[fx.Node, fx.Node]) -> fx.Node:
        if not made_anew(node):
            return env[node]
        if node not in own:
            sources = {a: fetch(a, own) for a in node.all_input_nodes}
            own[node] = fx_nodes.copy_node(graph, node, sources.__getitem__, f"{node.name}_again")
        return own[node]

    for node in gm.graph.nodes:
        if node.op == "output":
            own: dict[fx.Node, fx.Node] = {}
            graph.output([fetch(n, own) if isinstance(n, fx.Node) else n for n in node.args[0]])
        elif not made_anew(node):
            own = {}
            for a in node.all_input_nodes:
                fetch(a, own)
            env[node] = fx_nodes.copy_node(graph, node, lambda n, own=own: own.get(n) or env[n])  # type: ignore[misc]
    return segments.module(graph)
