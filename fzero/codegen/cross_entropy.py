"""cross_entropy: the loss over a vocabulary inside a cluster, written so that no matrix of logits is kept in fp32.

A compiler that is given `log_softmax` and the gradient of `nll_loss` writes both as matrices: of all log-probabilities,
and of zeros but for one element a row. With `lse` the logarithm of a row's sum of exponentials and y the row's target,

    loss = mean(lse - x[y])                        dx = (exp(x - lse) - (column == y)) / rows

is the same with one number a row between. Two passes over the logits are left, which read them as they are, in 16 bits.
Rows whose target is `ignore_index` count nothing. Sums round in another order, as in all that a compiler fuses.

Logits that are part of wider rows (`pad.py`) are read with all columns of these: a kernel that stops at column 50,257
loads element by element. Columns behind the vocabulary count as -inf, so their gradients are the zeros that a pad of
the gradient would write.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), without its single pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fzero.ir import forms, fx_nodes, segments

aten = torch.ops.aten
CHAIN = (aten.view.default, aten._unsafe_view.default, aten._to_copy.default)  # between logits, loss and product
REDUCED = (1, 2)  # `reduction`: mean, sum


def by_rows(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph of a cluster with its cross entropies written so; itself where it has none."""
    if not any(map(is_loss, gm.graph.nodes)):
        return gm
    graph = segments.copied(gm.graph)
    for node in list(graph.nodes):
        if is_loss(node):
            _rewrite(graph, node)
    done = segments.module(graph)
    return forms.propagate(done, [n.meta["val"] for n in fx_nodes.placeholders(graph)])


def is_loss(node: fx.Node) -> bool:
    """Whether a node is a log_softmax over rows that a reduced loss and its gradient alone read."""
    if node.target is not aten._log_softmax.default or node.meta["val"].ndim != 2 or node.args[1] not in (1, -1):
        return False
    users = list(node.users)
    losses = [u for u in users if u.target is aten.nll_loss_forward.default and u.args[0] is node and _is_plain(u, 2)]
    zeros = [u for u in users if u.target is aten.nll_loss_backward.default and _is_plain(u, 3)]
    ends = [u for u in users if u.target is aten._log_softmax_backward_data.default and u.args[0] in zeros]
    whole = all(list(u.users) == [end] for u, end in zip(zeros, ends, strict=False)) and len(zeros) == len(ends)
    return bool(losses) and whole and len(users) == len(losses) + len(zeros) + len(ends)


def _is_plain(node: fx.Node, weight: int) -> bool:
    """Whether a loss, or its gradient, weighs no classes and is a mean or a sum."""
    return node.args[weight] is None and node.args[weight + 1] in REDUCED


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    x = fx_nodes.operand(node)
    with graph.inserting_before(node):
        x = _whole_rows(graph, x)
        most = graph.call_function(aten.amax.default, (x, [1], True))
        powers = graph.call_function(aten.exp.default, (_call(graph, aten.sub.Tensor, x, most),))
        total = graph.call_function(aten.sum.dim_IntList, (powers, [1], True))
        lse = _kept(graph, _call(graph, aten.add.Tensor, most, _call(graph, aten.log.default, total)), x)
    for user in list(node.users):
        if user.target is aten.nll_loss_forward.default:
            _forward(graph, user, x, lse)
    for user in list(node.users):
        if user.target is aten._log_softmax_backward_data.default:
            _backward(graph, user, x, lse)


def _whole_rows(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """The logits with the whole rows that they are the first columns of, the others -inf; else as they are."""
    value, source = x.meta["val"], uncut(x)
    if source is None:
        return x
    wide = source.meta["val"]
    found = _cast(graph, source, value.dtype)
    columns = graph.call_function(aten.arange.default, (wide.shape[1],), {"device": value.device})
    outside = _call(graph, aten.ge.Scalar, columns, value.shape[1])
    found = _call(graph, aten.masked_fill.Scalar, found, outside, -math.inf)
    found.meta["val"] = torch.empty_like(wide, dtype=value.dtype)
    return found


def uncut(x: fx.Node) -> fx.Node | None:
    """The matrix of wider rows whose first columns logits are, but for one cast at most; None where there is none."""
    value, source, casts = x.meta["val"], x, 0
    while source.target in CHAIN:
        casts += source.target is aten._to_copy.default
        source = fx_nodes.operand(source)
    if source.target is not aten.slice.Tensor or source.meta["val"].shape != value.shape or casts > 1:
        return None
    wide, first = fx_nodes.operand(source), source.args[2] if len(source.args) > 2 else 0
    fits = wide.meta["val"].shape[0] == value.shape[0] and first in (0, None) and len(source.args) <= 4
    return wide if fits else None


def _kept(graph: fx.Graph, node: fx.Node, x: fx.Node) -> fx.Node:
    """A number for each row of x that a compiler keeps in memory: what it inlines is computed again for each column."""
    return _call(graph, aten.as_strided.default, node, [x.meta["val"].shape[0], 1], [1, 1])


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    return graph.call_function(target, args)


def _rows(graph: fx.Graph, target: fx.Node, ignored: int) -> tuple[fx.Node, fx.Node]:
    """(whether each row counts, its column of the target as a matrix of one column)."""
    valid = _call(graph, aten.ne.Scalar, target, ignored)
    zero = _call(graph, aten.zeros_like.default, target)
    return valid, _call(graph, aten.unsqueeze.default, _call(graph, aten.where.self, valid, target, zero), 1)


def _forward(graph: fx.Graph, node: fx.Node, x: fx.Node, lse: fx.Node) -> None:
    """The loss and the number of rows that count."""
    _, target, _, reduction, ignored = node.args
    with graph.inserting_before(node):
        valid, column = _rows(graph, target, ignored)  # type: ignore[arg-type]
        each = _call(graph, aten.sub.Tensor, lse, _call(graph, aten.gather.default, x, 1, column))
        each = _call(graph, aten.squeeze.dim, each, 1)
        each = _call(graph, aten.where.self, valid, each, _call(graph, aten.zeros_like.default, each))
        count = _call(graph, aten.sum.default, _cast(graph, valid, x.meta["val"].dtype))
        loss = _call(graph, aten.sum.default, each)
        loss = _call(graph, aten.div.Tensor, loss, count) if reduction == 1 else loss
    for user in list(node.users):
        user.replace_all_uses_with((loss, count)[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _backward(graph: fx.Graph, node: fx.Node, x: fx.Node, lse: fx.Node) -> None:
    """The gradient of the logits."""
    zeros = fx_nodes.operand(node)
    grad, _, target, _, reduction, ignored, count = zeros.args
    value = x.meta["val"]
    with graph.inserting_before(node):
        valid, column = _rows(graph, target, ignored)  # type: ignore[arg-type]
        columns = graph.call_function(aten.arange.default, (value.shape[1],), {"device": value.device})
        hit = _cast(graph, _call(graph, aten.eq.Tensor, columns, column), value.dtype)
        share = _call(graph, aten.exp.default, _call(graph, aten.sub.Tensor, x, lse))
        scale = _call(graph, aten.div.Tensor, grad, count) if reduction == 1 else grad
        scale = _call(graph, aten.where.self, valid, scale, _call(graph, aten.zeros_like.default, scale))
        difference = _call(graph, aten.sub.Tensor, share, hit)
        scale = _kept(graph, _call(graph, aten.unsqueeze.default, scale, 1), x)
        found = _call(graph, aten.mul.Tensor, difference, scale)
        for pad in _pads_of(node, value):
            pad.replace_all_uses_with(_cast(graph, found, pad.meta["val"].dtype))
        if value.shape != node.meta["val"].shape:
            found = _call(graph, aten.slice.Tensor, found, 1, 0, node.meta["val"].shape[1])
    node.replace_all_uses_with(found)
    graph.erase_node(node)
    graph.erase_node(zeros)


def _pads_of(node: fx.Node, wide: torch.Tensor, casts: int = 0) -> list[fx.Node]:
    """The pads that give a gradient, or a view or one cast of it, the rows `wide` of the logits."""
    found: list[fx.Node] = []
    more = wide.shape[1] - node.meta["val"].shape[-1]
    for user in node.users:
        if user.target in CHAIN:
            more_casts = casts + (user.target is aten._to_copy.default)
            found += _pads_of(user, wide, more_casts) if more_casts < 2 else []
        elif user.target is aten.constant_pad_nd.default and user.meta["val"].shape == wide.shape:
            behind = user.args[1] in ([0, more], [0, more, 0, 0]) and not any(user.args[2:])
            found += [user] if behind else []
    return found
