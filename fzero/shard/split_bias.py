"""split_bias: a bias is added after the sum of its product, or convolution, over ranks, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fzero.ir import fx_nodes
from fzero.shard.moves import VIEWS
from fzero.shard.placements import Placement, Shard

aten = torch.ops.aten


def split_bias(gm: fx.GraphModule, placed: Sequence[Placement]) -> None:
    """`addmm(bias, x, w)` whose sum over a sharded dim is not complete on a rank becomes `mm`, the view after it, and
    `+ bias`: the bias is added once, after the sum over ranks. In place."""
    place = dict(zip(fx_nodes.placeholders(gm.graph), placed, strict=True))
    for node in list(gm.graph.nodes):
        if node.target is aten.convolution.default:
            _of_convolution(gm.graph, node, place)
        if node.target is not aten.addmm.default or node.kwargs:
            continue
        bias, x, w = node.args
        if not contracts(w, place):
            continue
        users = list(node.users)
        view = users[0] if len(users) == 1 and users[0].target in VIEWS else None
        last = view or node
        with gm.graph.inserting_before(last):
            product = gm.graph.call_function(aten.mm.default, (x, w))
            product.meta = dict(node.meta)
            whole = product
            if view is not None:
                whole = gm.graph.call_function(view.target, (product, *view.args[1:]))
                whole.meta = dict(view.meta)
            total = gm.graph.call_function(aten.add.Tensor, (whole, bias))
        total.meta = dict(last.meta)
        last.replace_all_uses_with(total)
        gm.graph.erase_node(last)
        if view is not None:
            gm.graph.erase_node(node)
    gm.recompile()


def contracts(weight: fx.Node, place: Mapping[fx.Node, Placement]) -> bool:
    """Whether a matrix on the right of a product is a leaf, or a view of one, that lies in parts along its rows."""
    transposed = False
    while weight.op == "call_function" and (fx_nodes.is_view(weight) or weight.target is aten._to_copy.default):
        transposed ^= weight.target in (aten.t.default, aten.transpose.int, aten.permute.default)
        weight = fx_nodes.operand(weight)
    where = place.get(weight)
    return isinstance(where, Shard) and where.dim == int(transposed)


def _of_convolution(graph: fx.Graph, node: fx.Node, place: Mapping[fx.Node, Placement]) -> None:
    """The same for a convolution whose operand's channels, which are summed over, lie in parts. In place."""
    x, w, bias, *rest = node.args
    leaf = w
    while isinstance(leaf, fx.Node) and leaf.target is aten._to_copy.default:
        leaf = fx_nodes.operand(leaf)
    where, transposed = place.get(leaf), rest[3]  # type: ignore[arg-type]
    if not isinstance(bias, fx.Node) or not isinstance(where, Shard) or where.dim != int(not transposed):
        return
    channels = [bias.meta["val"].shape[0], *[1] * (node.meta["val"].ndim - 2)]
    with graph.inserting_before(node):
        summed = graph.call_function(aten.convolution.default, (x, w, None, *rest))
        seen = graph.call_function(aten.view.default, (bias, channels))
        total = graph.call_function(aten.add.Tensor, (summed, seen))
    for made in (summed, seen, total):
        made.meta = dict(node.meta)
    seen.meta["val"] = bias.meta["val"].view(channels)
    node.replace_all_uses_with(total)
    graph.erase_node(node)
