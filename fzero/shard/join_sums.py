"""join_sums: products of which each rank has an addend are added to one another first, then to the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from fzero.ir import fx_nodes
from fzero.shard.moves import VIEWS
from fzero.shard.placements import Placement
from fzero.shard.split_bias import contracts

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 1, aten.bmm.default: 1}  # where the weight stands


def join_sums(gm: fx.GraphModule, placed: Sequence[Placement]) -> None:
    """`((x + q) + k) + v` of which q, k and v are sums over ranks becomes `x + ((q + k) + v)`: one sum is taken instead
    of three. So it is in the backward of a layer whose input is its residual too (BERT). In place: of the graph alone,
    of which its caller makes a module."""
    place = dict(zip(fx_nodes.placeholders(gm.graph), placed, strict=True))
    inner: set[fx.Node] = set()
    for node in reversed(list(gm.graph.nodes)):
        if node in inner or not _is_plain(node):
            continue
        terms = list(_terms(node, inner))
        sums = [x for x in terms if is_sum(x, place)]
        rest = [x for x in terms if x not in sums]
        if len(sums) < 2 or not rest or len(sums) + len(rest) != len(terms):
            continue
        with gm.graph.inserting_before(node):
            total = _added(gm.graph, [_added(gm.graph, rest, node), _added(gm.graph, sums, node)], node)
        node.replace_all_uses_with(total)
    fx_nodes.drop_dead(gm.graph)


def is_sum(x: fx.Node, place: Mapping[fx.Node, Placement]) -> bool:
    """Whether a value is a product, or a view of one, over a dim along which its weight, a leaf, lies in parts."""
    while x.op == "call_function" and len(x.users) == 1 and (x.target in VIEWS or x.target is aten._to_copy.default):
        x = fx_nodes.operand(x)
    if x.target not in PRODUCTS or len(x.users) != 1:
        return False
    return contracts(fx_nodes.operand(x, PRODUCTS[x.target]), place)


def _is_plain(node: fx.Node) -> bool:
    """Whether a node adds two tensors of the result's shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    value = node.meta["val"]
    return all(
        isinstance(a, fx.Node) and (a.meta["val"].shape, a.meta["val"].dtype) == (value.shape, value.dtype)
        for a in node.args
    )


def _terms(node: fx.Node, inner: set[fx.Node]) -> Iterator[fx.Node]:
    """What a tree of additions adds. inner: gets those that nothing else reads."""
    for x in node.args:
        assert isinstance(x, fx.Node)
        if _is_plain(x) and len(x.users) == 1:
            inner.add(x)
            yield from _terms(x, inner)
        else:
            yield x


def _added(graph: fx.Graph, terms: Sequence[fx.Node], like: fx.Node) -> fx.Node:
    total, *rest = terms
    for x in rest:
        total = graph.call_function(aten.add.Tensor, (total, x))
        total.meta = dict(like.meta)
    return total
