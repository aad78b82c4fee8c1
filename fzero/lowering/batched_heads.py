"""batched_heads: a head that torch computes as one product for each sequence, written as one product of all rows.

torch takes `bmm` for `h @ w` where h is not contiguous and w does not require grad: features shifted by a token, and a
head that is frozen, as beside LoRA.

    bmm(h, expand(w))  becomes  view(mm(view(h), w))        so does that of the backward, by the transpose of w
"""

from __future__ import annotations

import torch
from torch import fx

from fzero.ir import fx_nodes
from fzero.lowering.chunk_body import HEADS, NORMALISERS, follows_one
from fzero.lowering.node_writer import NodeWriter

aten = torch.ops.aten
TURNS = (aten.transpose.int, aten.permute.default)


def batched_heads(graph: fx.Graph) -> list[fx.Node]:
    """The batched products by one weight for all sequences, of more classes than features, that a softmax is taken
    of."""
    found = []
    for node in graph.nodes:
        if node.target in NORMALISERS and not node.meta.get("phase"):
            x = fx_nodes.operand(node)
            while x.op == "call_function" and x.target not in HEADS and follows_one(x):
                x = fx_nodes.operand(x)
            if x.target is aten.bmm.default and not x.meta.get("phase") and _shared(fx_nodes.operand(x, 1)):
                features, classes = fx_nodes.operand(x, 1).meta["val"].shape[1:]
                found += [x] if classes > features else []
    return list(dict.fromkeys(found))


def unbatched(graph: fx.Graph) -> None:
    """Writes these products, and those of their backward, as products of all rows. In place."""
    for weights in {fx_nodes.operand(head, 1): None for head in batched_heads(graph)}:
        turned = [user for user in weights.users if user.target in TURNS]
        for by in (weights, *turned):
            for user in [user for user in by.users if user.target is aten.bmm.default and user.args[1] is by]:
                _rewrite(user, weights, by)


def _rewrite(product: fx.Node, weights: fx.Node, by: fx.Node) -> None:
    """Writes a product by the weights, or by what turns them, with the weight of one sequence."""
    rows, like = fx_nodes.operand(product), product.meta["val"]
    weight = _shared(weights)
    assert weight is not None
    with product.graph.inserting_before(product):
        write = NodeWriter(product.graph, product)
        one = weight if by is weights else write(aten.permute.default, (weight, [1, 0]))
        flat = write(aten.view.default, (rows, [-1, rows.meta["val"].shape[2]]))
        done = write(aten._unsafe_view.default, (write(aten.mm.default, (flat, one)), list(like.shape)))
    product.replace_all_uses_with(done)
    product.graph.erase_node(product)


def _shared(weights: fx.Node) -> fx.Node | None:
    """The matrix that every sequence is multiplied by; None where each has its own."""
    x, shape = weights, weights.meta["val"].shape
    while x.target in (aten.view.default, aten._unsafe_view.default) and x.meta["val"].shape == shape:
        x = fx_nodes.operand(x)
    if x.target is not aten.expand.default or x.meta["val"].shape != shape:
        return None
    matrix = fx_nodes.operand(x)
    return matrix if matrix.meta["val"].shape == shape[1:] else None
