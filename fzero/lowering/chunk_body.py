"""chunk_body: the nodes of a region that run once for each chunk of tokens, from the product that makes logits on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fzero.errors import SpecError
from fzero.ir import fx_nodes
from fzero.lowering.token_dims import NotByTokensError, TokenDim, TokenWays, Way, by_tokens

aten = torch.ops.aten
NORMALISERS = (aten._log_softmax.default, aten._softmax.default, aten.logsumexp.default)
HEADS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}  # products, with the place of the features
PRODUCTS = (*HEADS, aten.bmm.default)


@dataclass
class ChunkBody:
    """What runs for each chunk. `grown` makes it, and nothing changes it afterwards.

    num: tokens of a sequence. nodes: in order. ways: of each op of them, how it works token by token. tokens: of each
    value of them that holds tokens. summed: the values that are sums over tokens. joined: those of which the whole is
    needed after all chunks, as the gradient of the features.
    """

    head: fx.Node
    num: int
    nodes: list[fx.Node] = field(default_factory=list)
    ways: dict[fx.Node, TokenWays] = field(default_factory=dict)
    tokens: dict[fx.Node, TokenDim] = field(default_factory=dict)
    summed: list[fx.Node] = field(default_factory=list)
    joined: list[fx.Node] = field(default_factory=list)

    @property
    def results(self) -> set[fx.Node]:
        """The values that are complete only after the last chunk."""
        return {*self.summed, *self.joined}


def heads(graph: fx.Graph) -> list[fx.Node]:
    """The products of features and a weight of more classes, whose results a softmax is taken of."""
    found = []
    for node in graph.nodes:
        if node.target in NORMALISERS and not node.meta.get("phase"):
            x = fx_nodes.operand(node)
            while x.op == "call_function" and x.target not in HEADS and follows_one(x):
                x = fx_nodes.operand(x)
            if x.target in HEADS and not x.meta.get("phase"):
                rows, classes = x.meta["val"].shape
                if rows > 1 and classes > features_of(x).meta["val"].shape[1]:
                    found.append(x)
    return list(dict.fromkeys(found))


def features_of(head: fx.Node) -> fx.Node:
    """The features that a head makes logits of, one row a token."""
    return fx_nodes.operand(head, HEADS[head.target])


def grown(head: fx.Node) -> ChunkBody:
    """All that follows from a head's logits token by token, forward and backward. Raises SpecError, with the op and
    its line, where logits of all tokens are needed at once."""
    features = features_of(head)
    outer = _sequences(head)
    body = ChunkBody(head, features.meta["val"].shape[0] // outer)
    known = {features: TokenDim(0, outer, 0, body.num)}
    refused: dict[fx.Node, str] = {}
    ended: set[fx.Node] = set()
    width = features.meta["val"].shape[1]
    order = list(head.graph.nodes)
    for node in order[order.index(head) :]:
        if node.target is operator.getitem and node.args[0] in body.ways:
            body.nodes.append(node)
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if node is not head:
            known = {x: body.tokens[x] for x in node.all_input_nodes if x in body.tokens and x not in ended}
        if not known:
            continue
        try:
            ways = by_tokens(node, known)
        except NotByTokensError as error:
            refused[node] = str(error)
            continue
        _add(body, node, ways)
        if node.target in PRODUCTS and node is not head and _width(body, node) <= width:
            ended.add(node)  # the gradient of the features: what follows is of the layers before
    _finish(body, refused, width)
    return body


def _add(body: ChunkBody, node: fx.Node, ways: TokenWays) -> None:
    body.nodes.append(node)
    body.ways[node] = ways
    for value, way in _results(node, ways.results):
        if isinstance(way, TokenDim):
            body.tokens[value] = way
        else:
            body.summed.append(value)


def _results(node: fx.Node, ways: Sequence[Way]) -> list[tuple[fx.Node, Way]]:
    """The values of a node with their ways: itself, or the items of its tuple."""
    if isinstance(node.meta["val"], torch.Tensor):
        return [(node, ways[0])]
    kept = [i for i, x in enumerate(node.meta["val"]) if isinstance(x, torch.Tensor)]
    return [(user, ways[kept.index(int(str(user.args[1])))]) for user in node.users]


def _finish(body: ChunkBody, refused: dict[fx.Node, str], width: int) -> None:
    """Notes what is joined. Raises SpecError for what is too wide, or needed before all chunks are done."""
    inside = set(body.nodes)
    for value in body.tokens:
        outside = [user for user in value.users if user not in inside]
        if not outside:
            continue
        if _width(body, value) > width:
            raise _needed_at_once(outside[0], refused.get(outside[0], f"it reads {value.name} of all tokens"))
        body.joined.append(value)
    late = body.results
    for node in body.head.graph.nodes:
        if node in inside:
            if bad := next((x for x in node.all_input_nodes if x in late and x not in body.tokens), None):
                raise _needed_at_once(node, f"it reads {bad.name}, which is known after all tokens")
        elif any(x in late for x in node.all_input_nodes):
            late.add(node)


def _width(body: ChunkBody, value: fx.Node) -> int:
    """Elements of a value for each token; 0 for one without tokens."""
    tokens = body.tokens.get(value)
    return 0 if tokens is None else int(value.meta["val"].numel() // max(tokens.num, 1) // _rows(body))


def _rows(body: ChunkBody) -> int:
    return int(features_of(body.head).meta["val"].shape[0] // body.num)


def _sequences(head: fx.Node) -> int:
    """How many sequences the rows of a head's features are of: from the views before and after it."""
    features = features_of(head)
    rows = features.meta["val"].shape[0]
    views = (aten.view.default, aten._unsafe_view.default)
    shapes = [fx_nodes.operand(features).meta["val"].shape] if features.target in views else []
    shapes += [user.meta["val"].shape for user in head.users if user.target in views]
    for shape in shapes:
        if len(shape) > 2 and shape[:-1].numel() == rows:
            return int(shape[:-2].numel())
    return 1


def follows_one(node: fx.Node) -> bool:
    """Whether a value is a view, a copy, or an elementwise function of its first operand."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return fx_nodes.is_view(node) or fx_nodes.is_pointwise(node) or node.target in (
        aten._to_copy.default, aten.clone.default, aten._unsafe_view.default
    )  # fmt: skip


def _needed_at_once(node: fx.Node, why: str) -> SpecError:
    line = f" ({node.meta['source']})" if node.meta.get("source") else ""
    return SpecError(
        f"Spec(loss_chunks=): {fx_nodes.op_name(node) or node.name}{line} does not run by chunks of the sequence: "
        f"{why}. Write the loss token by token from the logits on, or leave loss_chunks out"
    )
