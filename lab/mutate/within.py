"""within: edits of what a segment computes. Operands, literals, casts, views, writes, results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import quiet_fakes
from fzero.ir import forms, fx_nodes, segments
from fzero.ir.program import Program
from lab.mutate.edits import Edit, find, pick, put

aten = torch.ops.aten
Change = Callable[[random.Random, fx.Graph], Any]
CAST = aten._to_copy.default
ODD_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def inside(change: Change) -> Edit:
    """The edit that makes a change, of something the first time, to a copy of one run's segment."""

    def edit(rng: random.Random, p: Program) -> Program | None:
        runs = find(p, lambda op: op.computes)
        tried = (changed(rng, p, index, change) for index in rng.sample(runs, min(len(runs), 6)))
        return next((broken for broken in tried if broken is not None), None)

    return edit


def changed(rng: random.Random, p: Program, index: int, change: Change) -> Program | None:
    """The program with a change in a copy of one run's segment; None where it makes none, or no segment."""
    graph = segments.copied(p.segments[p.ops[index].segment].graph)
    if change(rng, graph) is None:
        return None
    try:
        gm = segments.module(graph)
        with quiet_fakes():
            forms.propagate(gm, [node.meta["val"] for node in fx_nodes.placeholders(graph)])
    except Exception:  # its shapes or dtypes do not fit: no segment at all
        return None
    key = segments.digest(gm)
    if key == p.ops[index].segment:
        return None
    return replace(put(p, index, p.ops[index].with_attrs(segment=key)), segments={**p.segments, key: gm})


def _nodes(graph: fx.Graph, test: Callable[[fx.Node], Any] = lambda node: True) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and test(node)]


def _form(node: Any) -> object:
    """The facts that must agree for one value to stand for another: dtype and shape. None for a value that is no
    tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None


def _single(node: fx.Node) -> bool:
    return _form(node) is not None and not fx_nodes.mutated(node)


def _copies(graph: fx.Graph) -> list[fx.Node]:
    return _nodes(graph, lambda node: node.target is aten.copy_.default)


def _new(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A node in front of another one."""
    with node.graph.inserting_before(node):
        return node.graph.call_function(target, args, kwargs)


# --- operands ---------------------------------------------------------------------------------------------------------


def exchange_operands(rng: random.Random, graph: fx.Graph) -> Any:
    """Two operands of an op change places."""
    pairs = [
        (node, a, b)
        for node in _nodes(graph, _single)
        for a in range(len(node.args))
        for b in range(a)
        if node.args[a] is not node.args[b] and _form(node.args[a]) == _form(node.args[b]) is not None
    ]
    if (chosen := pick(rng, pairs)) is None:
        return None
    node, a, b = chosen
    args = list(node.args)
    args[a], args[b] = args[b], args[a]
    node.args = tuple(args)
    return node


def wrong_operand(rng: random.Random, graph: fx.Graph) -> Any:
    """An operand becomes another value of its form that is there by then."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    node = pick(rng, _nodes(graph, lambda n: n.all_input_nodes))
    if node is None:
        return None
    old = rng.choice([n for n in node.all_input_nodes if n not in fx_nodes.mutated(node)] or [None])
    others = [n for n in order if order[n] < order[node] and n is not old and _form(n) == _form(old) is not None]
    new = pick(rng, others)
    return None if new is None or old is None else node.replace_input_with(old, new) or node


def exchange_branches(rng: random.Random, graph: fx.Graph) -> Any:
    """The two branches of a `where` change places."""
    node = pick(rng, _nodes(graph, lambda n: fx_nodes.op_name(n) == "where"))
    if node is None:
        return None
    flag, yes, no = node.args
    node.args = (flag, no, yes)
    return node


# --- literals ---------------------------------------------------------------------------------------------------------


def _is_literal(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def wrong_literal(rng: random.Random, graph: fx.Graph) -> Any:
    """A number or a flag in an op's arguments, in a list too, is another."""
    node = pick(rng, _nodes(graph, lambda n: any(map(_is_literal, _literals(n)))))
    if node is None:
        return None
    chosen, seen = rng.randrange(sum(map(_is_literal, _literals(node)))), [0]

    def other(value: Any) -> Any:
        if not _is_literal(value):
            return value
        seen[0] += 1
        if seen[0] - 1 != chosen:
            return value
        return (
            not value
            if isinstance(value, bool)
            else value + rng.choice((-1, 1) if isinstance(value, int) else (0.5, -0.3))
        )

    node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), other)
    return node


def _literals(node: fx.Node) -> list[Any]:
    literals: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), lambda a: literals.append(a))
    return literals


def exchange_literals(rng: random.Random, graph: fx.Graph) -> Any:
    """Two numbers of two ops change places: one decay for another, a bound for a factor."""
    places = [(n, i) for n in _nodes(graph) for i, a in enumerate(n.args) if isinstance(a, float)]
    (a, i), (b, j) = rng.sample(places, 2) if len(places) > 1 else ((None, 0), (None, 0))
    if a is None or b is None or (a is b and i == j):
        return None
    own, other = a.args[i], b.args[j]
    a.args = (*a.args[:i], other, *a.args[i + 1 :])
    b.args = (*b.args[:j], own, *b.args[j + 1 :])
    return a


def wrong_view(rng: random.Random, graph: fx.Graph) -> Any:
    """An op sees a square operand transposed."""

    def square(node: fx.Node) -> bool:
        form = _form(node)
        return form is not None and len(shape := tuple(node.meta["val"].shape)) == 2 and shape[0] == shape[1] > 1

    places = [(n, a) for n in _nodes(graph) for a in n.all_input_nodes if square(a) and a not in fx_nodes.mutated(n)]
    if (chosen := pick(rng, places)) is None:
        return None
    node, operand = chosen
    node.replace_input_with(operand, _new(node, aten.t.default, operand))
    return node


# --- casts ------------------------------------------------------------------------------------------------------------


def drop_cast(rng: random.Random, graph: fx.Graph) -> Any:
    """A cast is left out."""
    node = pick(rng, _nodes(graph, lambda n: n.target is CAST))
    return None if node is None else node.replace_all_uses_with(fx_nodes.operand(node)) and node


def wrong_cast(rng: random.Random, graph: fx.Graph) -> Any:
    """A cast goes to another dtype, or a value goes through fewer bits and back."""
    if rng.random() < 0.5 and (node := pick(rng, _nodes(graph, lambda n: n.target is CAST))) is not None:
        node.kwargs = {**node.kwargs, "dtype": rng.choice([d for d in ODD_DTYPES if d is not node.kwargs.get("dtype")])}
        return node
    node = pick(rng, _nodes(graph, lambda n: _single(n) and n.meta["val"].dtype is torch.float32 and n.users))
    if node is None:
        return None
    with graph.inserting_after(node):
        narrow = graph.call_function(CAST, (node,), {"dtype": torch.bfloat16})
    with graph.inserting_after(narrow):
        wide = graph.call_function(CAST, (narrow,), {"dtype": torch.float32})
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not narrow)
    return node


def reorder_cast(rng: random.Random, graph: fx.Graph) -> Any:
    """op(cast(x)) becomes cast(op(x)), and the other way round."""

    def after(n: fx.Node) -> bool:
        return (
            fx_nodes.is_pointwise(n)
            and n.target is not CAST
            and len(n.all_input_nodes) == 1
            and n.all_input_nodes[0].target is CAST
        )

    def before(n: fx.Node) -> bool:
        if n.target is not CAST:
            return False
        source = fx_nodes.operand(n)
        return fx_nodes.is_pointwise(source) and source.target is not CAST and len(source.all_input_nodes) == 1

    node = pick(rng, _nodes(graph, lambda n: _single(n) and (after(n) or before(n))))
    if node is None:
        return None
    inner = node.all_input_nodes[0]
    first = _new(node, node.target, *node.args, **node.kwargs)
    first.replace_input_with(inner, inner.all_input_nodes[0])
    second = _new(node, inner.target, *inner.args, **inner.kwargs)
    second.replace_input_with(inner.all_input_nodes[0], first)
    node.replace_all_uses_with(second)
    return node


# --- values -----------------------------------------------------------------------------------------------------------


def drop_node(rng: random.Random, graph: fx.Graph) -> Any:
    """A value becomes one of the operands it was computed from."""
    places = [(n, a) for n in _nodes(graph, _single) if n.users for a in n.all_input_nodes if _form(a) == _form(n)]
    if (chosen := pick(rng, places)) is None:
        return None
    chosen[0].replace_all_uses_with(chosen[1])
    return chosen


def repeat_node(rng: random.Random, graph: fx.Graph) -> Any:
    """f(x) becomes f(f(x))."""
    places = [(n, a) for n in _nodes(graph, _single) if n.users for a in n.all_input_nodes if _form(a) == _form(n)]
    if (chosen := pick(rng, places)) is None:
        return None
    node, operand = chosen
    again = _new(node, node.target, *node.args, **node.kwargs)
    node.replace_input_with(operand, again)
    return node


def constant_value(rng: random.Random, graph: fx.Graph) -> Any:
    """A value becomes zeros or ones of its form."""
    node = pick(rng, _nodes(graph, lambda n: _single(n) and n.users and not fx_nodes.is_view(n)))
    if node is None:
        return None
    with graph.inserting_after(node):
        plain = graph.call_function(rng.choice((aten.zeros_like.default, aten.ones_like.default)), (node,))
    node.replace_all_uses_with(plain, delete_user_cb=lambda user: user is not plain)
    return node


# --- writes and results -----------------------------------------------------------------------------------------------


def drop_write(rng: random.Random, graph: fx.Graph) -> Any:
    """A destination keeps what it held."""
    node = pick(rng, _nodes(graph, fx_nodes.mutated))
    if node is None or node.users:
        return None
    graph.erase_node(node)
    return node


def exchange_destinations(rng: random.Random, graph: fx.Graph) -> Any:
    """Two copies go to each other's destination."""
    pairs = [
        (a, b) for a in _copies(graph) for b in _copies(graph) if a is not b and _form(a.args[0]) == _form(b.args[0])
    ]
    if (chosen := pick(rng, pairs)) is None:
        return None
    a, b = chosen
    a.args, b.args = (b.args[0], a.args[1]), (a.args[0], b.args[1])
    return a


def write_into_view(rng: random.Random, graph: fx.Graph) -> Any:
    """Only a part of a destination is written, through a view of it."""
    node = pick(
        rng,
        [
            n
            for n in _copies(graph)
            if isinstance(n.args[1], fx.Node) and n.meta["val"].ndim and n.meta["val"].shape[0] > 1
        ],
    )
    if node is None or node.users:
        return None
    dest, source = fx_nodes.operand(node), fx_nodes.operand(node, 1)
    half = max(dest.meta["val"].shape[0] // 2, 1)
    node.args = tuple(_new(node, aten.slice.Tensor, whole, 0, 0, half) for whole in (dest, source))
    return node


def write_again(rng: random.Random, graph: fx.Graph) -> Any:
    """A destination is written once more, with another value."""
    node = pick(rng, _copies(graph))
    if node is None:
        return None
    values = [n for n in graph.nodes if n.op != "output" and n is not node.args[1] and _form(n) == _form(node.args[0])]
    value = pick(rng, [n for n in values if n is not node and n is not node.args[0]])
    if value is None:
        return None
    last = fx_nodes.output(graph)
    return _new(last, aten.copy_.default, node.args[0], value)


def exchange_results(rng: random.Random, graph: fx.Graph) -> Any:
    """Two results of a segment change places."""
    results = fx_nodes.outputs(graph)
    pairs = [
        (a, b)
        for a in range(len(results))
        for b in range(a)
        if results[a] is not results[b] and _form(results[a]) == _form(results[b]) is not None
    ]
    if (chosen := pick(rng, pairs)) is None:
        return None
    a, b = chosen
    results[a], results[b] = results[b], results[a]
    fx_nodes.output(graph).args = (results,)
    return chosen


def wrong_result(rng: random.Random, graph: fx.Graph) -> Any:
    """A segment returns another value of the form: an input, one that it returns already, one on the way."""
    results = fx_nodes.outputs(graph)
    places = [
        (i, n)
        for i, r in enumerate(results)
        for n in graph.nodes
        if n.op != "output" and n is not r and _form(n) == _form(r) is not None
    ]
    if (chosen := pick(rng, places)) is None:
        return None
    results[chosen[0]] = chosen[1]
    fx_nodes.output(graph).args = (results,)
    return chosen
