"""owned_operands: what a transfer sends is a value of its own, not a cast or a code of a parameter.

Casts and codes of parameters are made again where they are read, or gathered in their place (`fzero.passes`). A
transfer reads memory, so what it reads is copied first.
"""

from __future__ import annotations

import torch
from torch import fx

from fzero.ir import fx_nodes, segments
from fzero.ir.code_ops import CODES
from fzero.shard.ops import TRANSFERS

aten = torch.ops.aten


def owned_operands(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph of a rank's region with a copy before each such transfer: itself where there is none."""
    if not any(map(_is_lent, gm.graph.nodes)):
        return gm
    graph = segments.copied(gm.graph)
    for node in [node for node in graph.nodes if _is_lent(node)]:
        value = fx_nodes.operand(node)
        with graph.inserting_before(node):
            copy = graph.call_function(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
        copy.meta = {**node.meta, "val": value.meta["val"].contiguous()}
        copy.meta.pop("moved", None)
        node.update_arg(0, copy)
    return segments.module(graph)


def _is_lent(node: fx.Node) -> bool:
    """Whether a node sends a cast or a code of an input."""
    if node.target not in TRANSFERS:
        return False
    value, made = fx_nodes.operand(node), False
    while value.op == "call_function":
        again = value.target is aten._to_copy.default or value.target in CODES
        if not again and not fx_nodes.is_view(value):
            return False
        value, made = fx_nodes.operand(value), made or again
    return made
