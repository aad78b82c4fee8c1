"""plain_losses: means of a loss as sums over tokens, divided once; so that a chunk of tokens has an addend of each.

nll(x, y, mean)          becomes   nll(x, y, sum) / count(y)
nll_back(g, x, y, mean)  becomes   nll_back(g / count(y), x, y, sum)        count(y): of targets that are not ignored
mean(x)                  becomes   sum(x) / n
ones_like(x)             becomes   full(shape, 1), which depends on no value
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fzero.errors import SpecError
from fzero.lowering.node_writer import NodeWriter
from fzero.precision import LOW

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers of a loss's reduction
FORWARD = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
FILLS: dict[Any, float | None] = {  # by op, what it fills with; None: its second argument
    aten.ones_like.default: 1, aten.zeros_like.default: 0, aten.full_like.default: None, aten.new_zeros.default: 0,
    aten.new_ones.default: 1, aten.zeros.default: 0, aten.ones.default: 1,
}  # fmt: skip


def made_plain(gm: fx.GraphModule) -> None:
    """Writes the means of a graph's losses as sums, and its fills as values of their own. In place."""
    counts: dict[tuple[fx.Node, int, torch.dtype], fx.Node] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        with gm.graph.inserting_before(node):
            write = NodeWriter(gm.graph, node)
            if node.target in FILLS:
                _replace(node, _filled(write, node))
            elif node.target in FORWARD:
                _forward(write, node, counts)
            elif node.target in BACKWARD:
                _backward(write, node, counts)
            elif node.target is aten.mean.default and not node.kwargs:
                _replace(node, _mean(write, node))


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _filled(write: NodeWriter, node: fx.Node) -> fx.Node:
    like, value = node.meta["val"], FILLS[node.target]
    number = node.args[1] if value is None else value
    return write(aten.full.default, (list(like.shape), number), {"dtype": like.dtype, "device": like.device})


def _mean(write: NodeWriter, node: fx.Node) -> fx.Node:
    (x,), like = node.all_input_nodes, node.meta["val"]
    wide = {"dtype": torch.float32} if like.dtype in LOW else {}
    done = write(aten.div.Tensor, (write(aten.sum.default, (x,), wide), x.meta["val"].numel()))
    return write(aten._to_copy.default, (done,), {"dtype": like.dtype}) if wide else done


def _forward(write: NodeWriter, node: fx.Node, counts: dict[Any, fx.Node]) -> None:
    x, target, _, reduction, ignored = node.args
    if reduction != MEAN:
        return
    like = x.meta["val"]  # type: ignore[union-attr]
    count = _count(write, node, counts)
    low = like.dtype in LOW
    x = write(aten._to_copy.default, (x,), {"dtype": torch.float32}) if low else x
    total = write.item(write(node.target, (x, target, None, SUM, ignored)), 0)
    loss = write(aten.div.Tensor, (total, count))
    loss = write(aten._to_copy.default, (loss,), {"dtype": like.dtype}) if low else loss
    for user in list(node.users):
        _replace(user, (loss, count)[user.args[1]])  # type: ignore[index]
    node.graph.erase_node(node)


def _backward(write: NodeWriter, node: fx.Node, counts: dict[Any, fx.Node]) -> None:
    """Only a mean reads the count, its last operand."""
    grad, x, target, _, reduction, ignored, _ = node.args
    like = x.meta["val"]  # type: ignore[union-attr]
    if reduction != MEAN:
        unread = write(aten.full.default, ([], 0), {"dtype": like.dtype, "device": like.device})
        node.args = (*node.args[:6], unread)
        return
    low = like.dtype in LOW
    if low:
        grad, x = (write(aten._to_copy.default, (v,), {"dtype": torch.float32}) for v in (grad, x))
    count = _count(write, node, counts)
    grad = write(aten.div.Tensor, (grad, count))
    done = write(node.target, (grad, x, target, None, SUM, ignored, count))
    _replace(node, write(aten._to_copy.default, (done,), {"dtype": like.dtype}) if low else done)


def _count(write: NodeWriter, node: fx.Node, counts: dict[Any, fx.Node]) -> fx.Node:
    """How many targets are not ignored, as a floating scalar."""
    place = 0 if node.target in FORWARD else 1
    x, target, weight, _, ignored = node.args[place : place + 5]
    if weight is not None:
        line = f" ({node.meta['source']})" if node.meta.get("source") else ""
        raise SpecError(
            f"Spec(loss_chunks=): the mean of a cross_entropy{line} has weights of classes, so its divisor is no count "
            "of tokens. Use reduction='sum' and divide by the sum of the weights, or leave loss_chunks out"
        )
    dtype = x.meta["val"].dtype  # type: ignore[union-attr]
    key = (target, ignored, dtype)
    if key not in counts:
        kept = write(aten.ne.Scalar, (target, ignored))
        num = write(aten.sum.default, (kept,))
        counts[key] = write(aten._to_copy.default, (num,), {"dtype": torch.float32 if dtype in LOW else dtype})
    return counts[key]
