"""segments: the `torch.fx` graphs that `run` and `update` ops execute: cut out, joined, normalised, named by a hash.

A segment is pure but for its destinations. Its placeholders are the op's reads in order, then one placeholder for each
write that goes into memory that already exists. The graph's outputs are the op's other writes, fresh tensors. Every
node carries `meta["val"]`, a fake tensor, so that bytes and liveness are read off the graph and nothing has to be run.

Equal text gives an equal hash. Names, source lines and the layer that a segment came from take no part, so twelve equal
layers share one segment.

A segment does not change once its digest was asked for: a change makes a new segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from fzero import backend
from fzero._torch_compat import FakeTensorMode, graph_module
from fzero.ir.fx_nodes import copy_node, drop_dead, is_compute, is_rename, is_view, mutated, operand, output, outputs
from fzero.ir.fx_values import contiguous_like, dense_like, is_dense, memory
from fzero.ir.op_info import of

aten = torch.ops.aten


def copied(graph: fx.Graph, env: dict[fx.Node, fx.Node] | None = None) -> fx.Graph:
    """A copy of a graph. `env`, where it is given, maps the graph's nodes to the copy's afterwards."""
    copy, env = fx.Graph(), {} if env is None else env
    for node in graph.nodes:
        if node.op != "output":
            env[node] = copy_node(copy, node, env.__getitem__)
    copy.output(fx.node.map_arg(output(graph).args[0], env.__getitem__))
    return copy


def module(graph: fx.Graph) -> fx.GraphModule:
    """A graph as something to call, checked, without dead code. It owns no tensors."""
    drop_dead(graph)
    graph.lint()
    return graph_module(graph)


def extract(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node], dests: Sequence[fx.Node] = (),
    *, from_buffers: bool = True,
) -> fx.GraphModule:  # fmt: skip
    """A segment of these nodes: `inputs` become placeholders, `results` outputs.

    The first len(dests) results are copied into one trailing placeholder each, of the shape and dtype of the node in
    `dests`; they are not outputs. A destination in a buffer is contiguous, whatever the order of the dims of what is
    copied there.

    Inputs and outputs are dense, for a buffer has no room for gaps, and keep the order of their dims in memory. So each
    view that the step took of a value can be taken of its copy in a buffer. Without `from_buffers` the inputs and
    destinations are values of another segment, in the layout that they have there.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(inputs):
        env[node] = graph.placeholder(f"x{index}")
        env[node].meta["val"] = dense_like(node.meta["val"]) if from_buffers else node.meta["val"]
    targets = []
    for index, node in enumerate(dests):
        targets.append(graph.placeholder(f"into{index}"))
        targets[-1].meta["val"] = contiguous_like(node.meta["val"]) if from_buffers else node.meta["val"]
    for node in nodes:
        env[node] = copy_node(graph, node, lambda n: env[n])
    for target, node in zip(targets, results, strict=False):
        graph.call_function(aten.copy_.default, (target, env[node])).meta["val"] = target.meta["val"]
    owned: list[fx.Node] = []
    for node in (env[node] for node in results[len(dests) :]):
        if is_view(node) or node.op == "placeholder" or node in owned or not is_dense(node.meta["val"]):
            held = dense_like(node.meta["val"])
            order = torch.contiguous_format if held.is_contiguous() else torch.preserve_format
            copy = graph.call_function(aten.clone.default, (node,), {"memory_format": order})
            copy.meta["val"] = held
            owned.append(copy)
        else:
            owned.append(node)
    graph.output(owned)
    return module(graph)


def copy_segment(*likes: torch.Tensor) -> fx.GraphModule:
    """The segment that copies each input into its destination: tensors of these shapes and dtypes."""
    graph = fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(len(likes))]
    dests = [graph.placeholder(f"into{i}") for i in range(len(likes))]
    with FakeTensorMode():  # one for all: to make one reads the whole stack
        fakes = [torch.empty(like.shape, dtype=like.dtype) for like in likes]
    for value, dest, fake in zip(values, dests, fakes, strict=True):
        done = graph.call_function(aten.copy_.default, (dest, value))
        for node in (value, dest, done):
            node.meta["val"] = fake
    graph.output([])
    return module(graph)


def merge_equal(gm: fx.GraphModule) -> fx.GraphModule:
    """The segment with equal pure nodes as one: the views and casts that were made once per use."""
    graph = copied(gm.graph)
    seen: dict[str, fx.Node] = {}
    outs = outputs(graph)
    kept = {*outs, *(owner for out in outs for owner, _ in memory(out))}  # two outputs are two buffers: none is shared
    for node in list(graph.nodes):
        if is_compute(node) and not mutated(node):
            key = f"{node.target} {fx.node.map_arg((node.args, node.kwargs), lambda n: n.name)}"
            if key in seen and node not in kept:
                node.replace_all_uses_with(seen[key])
                graph.erase_node(node)
            else:
                seen[key] = node
    return module(graph)


def normalised(gm: fx.GraphModule) -> fx.GraphModule:
    """Removes renames of a value (detach, alias), t(t(x)) and dead code, and makes a cast of a number a scalar. In
    place; returns its argument."""
    _true_statistics(gm)
    for node in list(gm.graph.nodes):
        if node.target is aten._to_copy.default and not isinstance(node.args[0], fx.Node):  # `0 + x` under `vmap`
            node.target = aten.scalar_tensor.default
        elif is_rename(node):
            node.replace_all_uses_with(node.args[0])
        elif _is_transpose(node) and _is_transpose(operand(node)):
            node.replace_all_uses_with(operand(operand(node)))
    drop_dead(gm.graph)
    gm.recompile()
    return gm


def _true_statistics(gm: fx.GraphModule) -> None:
    """Corrects the dtype of a norm's mean and deviation. In place."""
    for node in gm.graph.nodes:
        if of(node.target).norm_weight is not None:
            given = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
            results = true_statistics(node.target, given, node.meta["val"])
            for user in node.users if results is not node.meta["val"] else ():
                user.meta["val"] = results[user.args[1]]
            node.meta["val"] = results


def true_statistics(op: Any, args: Sequence[Any], results: Any) -> Any:
    """The results of a call on fake tensors, those of a norm with the dtypes that its kernel gives them.

    A norm of 16-bit values with fp32 parameters keeps mean and deviation in fp32 on the CPU; torch's shape rules (2.11,
    2.13) say 16 bits.
    """
    place = of(op).norm_weight
    weight = args[place] if place is not None else None
    if not isinstance(weight, torch.Tensor) or not backend.of(weight.device).on_host:
        return results
    out, mean, deviation, *rest = results
    if out.dtype.itemsize != 2 or weight.dtype is not torch.float32:
        return results
    with mean.fake_mode:
        wide = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (mean, deviation)]
    return (out, *wide, *rest)


def _is_transpose(node: fx.Node) -> bool:
    return node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0])


def text(gm: fx.GraphModule) -> str:
    """The text that the hash is of: nodes by position, with targets, literals, and the inputs' shapes, strides and
    dtypes. Of a device it has the type alone, so that every rank's text is equal."""
    return "\n".join(_lines(list(gm.graph.nodes), {}))


def cut_text(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node], dests: Sequence[fx.Node]
) -> str:
    """The same of what `extract` is given: equal texts give equal segments, so that one of them need be made."""
    given = {node: f"x{i}" for i, node in enumerate(inputs)}
    own = {node: f"%{i}" for i, node in enumerate(nodes)}
    ends = [own.get(node) or given[node] for node in results]
    return "\n".join([*map(_value_text, inputs), *_lines(nodes, given), " ".join(ends), *map(_value_text, dests)])


def _lines(nodes: Sequence[fx.Node], given: Mapping[fx.Node, str]) -> Iterator[str]:
    """A line for each node. given: names of values from elsewhere."""
    names = {node: _Name(name) for node, name in given.items()}
    names |= {node: _Name(f"%{i}") for i, node in enumerate(nodes)}
    for node in nodes:
        if node.op == "placeholder":
            yield f"{names[node]} = input {_value_text(node)}"
        else:
            args = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            args = fx.node.map_aggregate(args, lambda a: a.type if isinstance(a, torch.device) else a)  # any rank's
            yield f"{names[node]} = {node.target} {args}"


def _value_text(node: fx.Node) -> str:
    val = node.meta["val"]
    return f"{val.dtype} {tuple(val.shape)} {val.stride()} {val.device.type}"


class _Name(str):
    """A string whose `repr` is the string itself: the name of a node in `text`."""

    def __repr__(self) -> str:
        return str(self)


_DIGESTS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of the segments that are in use


def digest(gm: fx.GraphModule) -> str:
    """A segment's hash, 12 hexadecimal digits of its `text`. The segment must not change afterwards."""
    if gm not in _DIGESTS:
        _DIGESTS[gm] = hashlib.blake2b(text(gm).encode(), digest_size=6).hexdigest()
    return _DIGESTS[gm]


def notes(gm: fx.GraphModule) -> dict[str, Any]:
    """Facts that were computed from a segment, by the name of the module that computed them.

    Each module reads and writes its own entry alone. Notes live as long as the segment, which must not change. (They
    may hold its nodes, and nodes hold the segment: in a table by weak references a note would keep its own key alive.)
    """
    table: dict[str, Any] = gm.meta.setdefault("fzero.notes", {})
    return table
