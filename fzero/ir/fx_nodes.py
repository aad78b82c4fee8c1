"""fx_nodes: questions about one node of an fx graph, or about the graph's ends.

The answers come from the op's schema where it has one: whether a result shares memory with an operand (`is_view`),
which arguments an op writes to (`mutated`), whose memory a result lies in (`source`, `base`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import OpOverload
from fzero.ir.op_info import of


def is_compute(node: fx.Node) -> bool:
    """Whether a node calls an op; placeholders and the output do not."""
    return node.op == "call_function"


def schema(node: fx.Node) -> torch.FunctionSchema | None:
    """The schema of a node's op; None for a node that calls none, or a function without one (getitem)."""
    return getattr(node.target, "_schema", None) if is_compute(node) else None


def op_name(node: fx.Node) -> str:
    """The name of a node's op without its overload (`add` of `aten.add.Tensor`); "" for another function."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def is_view(node: fx.Node) -> bool:
    """Whether the result shares its input's memory (a getitem of a view does too)."""
    if not is_compute(node):
        return False
    if node.target is operator.getitem:
        return is_view(operand(node))
    if of(node.target).view:
        return True
    if not node.args or not isinstance(node.args[0], fx.Node):  # `_conj` of a Python number
        return False
    return _aliasing(node)[0]


def operand(node: fx.Node, index: int = 0) -> fx.Node:
    """The positional argument `index`, which must be a node."""
    argument = node.args[index]
    assert isinstance(argument, fx.Node)
    return argument


def drop_dead(graph: fx.Graph) -> None:
    """Erases the nodes that nothing uses, but those that write or draw. In place. The graph is in order."""
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "get_attr" or (is_compute(node) and not _is_impure(node))):
            graph.erase_node(node)


_impure: dict[Any, bool] = {}  # by an op, what torch says of its nodes, which takes as long as all else


def _is_impure(node: fx.Node) -> bool:
    if node.target not in _impure:
        _impure[node.target] = node.is_impure()
    return _impure[node.target]


def copy_node(graph: fx.Graph, node: fx.Node, env: Callable[[fx.Node], Any], name: str | None = None) -> fx.Node:
    """A copy of a node in `graph`, whose operands `env` gives: `graph.node_copy` in half of its time, for torch 2.13
    walks each operand for symbolic sizes, of which there are none. name: that of the node, if it is not copied again:
    for a free number torch walks the numbers in use."""
    copy = graph.create_node(node.op, node.target, name=name or node.name, type_expr=node.type)
    copy.args = fx.node.map_arg(node.args, env)
    if node.kwargs:
        copy.kwargs = fx.node.map_arg(node.kwargs, env)
    copy.meta.update(node.meta)
    return copy


def ancestors(*nodes: fx.Node) -> set[fx.Node]:
    """The nodes that these need, themselves included."""
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def is_rename(node: fx.Node) -> bool:
    """Whether a node only gives its operand another name (detach, alias)."""
    return is_compute(node) and of(node.target).rename


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on the same element of every full-shaped operand alone."""
    return is_compute(node) and of(node.target).pointwise


@functools.cache
def out_overload(target: Any) -> Any:
    """The overload that takes the arguments of op `target` and writes each result into a tensor given as `out=`.

    None where torch has none. A form that torch generates counts as none: it is a copy in disguise. Whether the
    overload uses `out` for anything else, the caller must know.
    """
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        rest = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        outs = [str(a.type) for a in other._schema.arguments if a.is_out]
        alike = len(outs) == len(target._schema.returns) and set(outs) == {"Tensor"} and rest == wanted
        if alike and torch.Tag.generated not in other.tags:
            return other
    return None


def mutated(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes to."""
    written: list[Any] = []
    for position, name in _aliasing(node)[1]:
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        written += value if isinstance(value, (list, tuple)) else [value]
    return [v for v in written if isinstance(v, fx.Node)]


def also_returns(node: fx.Node) -> bool:
    """Whether a node that writes to some of its arguments returns new tensors as well."""
    return any(r.alias_info is None for r in schema(node).returns)  # type: ignore[union-attr]


Argument = tuple[int, str]  # position and name
Aliasing = tuple[bool, tuple[Argument, ...], tuple[Argument | None, ...]]


def _aliasing(node: fx.Node) -> Aliasing:
    """(whether a result shares memory with an operand; the arguments that are written to; for each result, the written
    argument that it is, or None). All three are read from the schema of the node's op."""
    known = _aliasings.get(id(node.target))
    if known is None:
        of_op = schema(node)
        known = node.target, (False, (), ()) if of_op is None else _read_schema(of_op)
        if isinstance(node.target, OpOverload):
            _aliasings[id(node.target)] = known
    return known[1]


_aliasings: dict[int, tuple[Any, Aliasing]] = {}  # of ops that were asked for, by id: torch's hash of one is slow


def _read_schema(of_op: torch.FunctionSchema) -> Aliasing:
    shares = any(r.alias_info is not None and not r.alias_info.is_write for r in of_op.returns)
    arguments = [(i, a.name, a.alias_info) for i, a in enumerate(of_op.arguments)]
    written = {(i, name): alias.before_set for i, name, alias in arguments if alias is not None and alias.is_write}
    sets = [
        r.alias_info.before_set if r.alias_info is not None and r.alias_info.is_write else () for r in of_op.returns
    ]
    returned = tuple(next((own for own, names in written.items() if names & set(of)), None) for of in sets)
    return shares, tuple(written), returned


def base(node: fx.Node) -> fx.Node:
    """The node that owns the memory of a view, or of an in-place op's result; the node itself where it owns its own."""
    while (owner := source(node)) is not None:
        node = owner
    return node


def source(node: fx.Node) -> fx.Node | None:
    """The operand whose memory a node's result lies in: a view's operand, or the argument that an op writes to and
    returns. None where the result has memory of its own."""
    if not is_compute(node):
        return None
    if is_view(node):
        return operand(node)
    op, index = (operand(node), node.args[1]) if node.target is operator.getitem else (node, 0)
    returned = _aliasing(op)[2]
    which = returned[index] if isinstance(index, int) and index < len(returned) else None
    if which is None:
        return None
    position, name = which
    value = op.args[position] if position < len(op.args) else op.kwargs.get(name)
    return value if isinstance(value, fx.Node) else None


def output(graph: fx.Graph) -> fx.Node:
    """The graph's output node."""
    return next(iter(reversed(graph.nodes)))


def outputs(graph: fx.Graph) -> list[Any]:
    """The nodes that a graph returns, in order."""
    return list(output(graph).args[0])  # type: ignore[arg-type]


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """A graph's inputs, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]
