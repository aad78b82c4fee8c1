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
    `+ bias`: the bias is added once, after the sum over ranks. In place: of the graph alone, of which its caller makes
    a module."""
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
        if view is not None and not _fits(bias, node, view):
            view = None  # the bias is added before it
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


def _fits(bias: fx.Node, product: fx.Node, view: fx.Node) -> bool:
    """Whether a bias of the product's last dim is one of the view's last dim."""
    width = product.meta["val"].shape[-1]
    return tuple(bias.meta["val"].shape) == (width,) and tuple(view.meta["val"].shape[-1:]) == (width,)


def contracts(weight: fx.Node, place: Mapping[fx.Node, Placement], dim: int = 0) -> bool:
    """Whether the dim of a weight over which a product sums is one along which its leaf lies in parts.

    weight: the leaf, or views and casts of it. dim: of `weight`; 0 for the matrix on the right of a product.
    """
    while weight.op == "call_function" and (fx_nodes.is_view(weight) or weight.target is aten._to_copy.default):
        source = fx_nodes.operand(weight)
        if weight.target in (aten.t.default, aten.transpose.int, aten.permute.default):
            ndim = source.meta["val"].ndim
            order = list(range(ndim))
            if weight.target is aten.permute.default:
                order = [int(d) % ndim for d in weight.args[1]]  # type: ignore[arg-type,union-attr]
            else:
                a, b = (int(str(d)) % ndim for d in (weight.args[1:] or (0, ndim - 1)))
                order[a], order[b] = order[b], order[a]
            dim = order[dim]
        elif weight.target is aten.select.int:
            dim += dim >= int(str(weight.args[1])) % source.meta["val"].ndim
        elif weight.target is aten.unsqueeze.default:
            dim -= dim > int(str(weight.args[1])) % weight.meta["val"].ndim
        weight = source
    where = place.get(weight)
    return isinstance(where, Shard) and where.dim == dim


def _of_convolution(graph: fx.Graph, node: fx.Node, place: Mapping[fx.Node, Placement]) -> None:
    """The same for a convolution whose operand's channels, which are summed over, lie in parts. In place."""
    x, w, bias, *rest = node.args
    if not isinstance(bias, fx.Node) or not isinstance(w, fx.Node) or not contracts(w, place, int(not rest[3])):
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
