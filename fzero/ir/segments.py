"""Segments: the `torch.fx` graphs that `run` and `update` ops execute.

A segment is pure but for its destinations: placeholders are the op's reads in order, then one placeholder for each
write that goes into memory that already exists; the graph's outputs are the op's other writes, fresh tensors. Every
node carries `meta["val"]`, a fake tensor, so that bytes and liveness are read off the graph and nothing has to be run.

Equal text gives an equal hash: names, source lines and the layer a segment came from take no part, so twelve equal
layers share one segment.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode, OpOverload, graph_module, is_fake

aten = torch.ops.aten

# aliases of their input that their schema does not mark, or that only rename it
_ALIASES = {
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}
_RENAMES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
# pointwise by meaning, though torch does not tag them
_POINTWISE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    # forms that write into `out=` of ops that torch does tag
    aten.clip.Tensor_out,
    aten.elu.out,
    aten.gelu.out,
    aten.hardshrink.out,
    aten.hardsigmoid.out,
    aten.hardtanh.out,
    aten.leaky_relu.out,
    aten.mish.out,
    aten.softplus.out,
    aten.softshrink.out,
    aten.threshold.out,
    aten.true_divide.out,
    aten.where.self_out,
}


def is_compute(node: fx.Node) -> bool:
    return node.op == "call_function"


def schema(node: fx.Node) -> torch.FunctionSchema | None:
    return getattr(node.target, "_schema", None) if is_compute(node) else None


def op_name(node: fx.Node) -> str:
    """The name of a node's op, whatever its overload; empty for another function."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def is_view(node: fx.Node) -> bool:
    """Whether the result shares its input's memory (a getitem of a view does too)."""
    if not is_compute(node):
        return False
    if node.target is operator.getitem:
        return is_view(operand(node))
    if node.target in _ALIASES:
        return True
    if not node.args or not isinstance(node.args[0], fx.Node):  # `_conj` of a Python number
        return False
    return _aliasing(node)[0]


def operand(node: fx.Node, index: int = 0) -> fx.Node:
    """A node's argument that is a node."""
    found = node.args[index]
    assert isinstance(found, fx.Node)
    return found


def copied(graph: fx.Graph, env: dict[fx.Node, fx.Node] | None = None) -> fx.Graph:
    """The same graph again; `env` receives which node became which."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {} if env is None else env))
    return copy


def is_rename(node: fx.Node) -> bool:
    return is_compute(node) and node.target in _RENAMES


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on the same element of every full-shaped operand alone."""
    return is_compute(node) and (node.target in _POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ()))


def out_overload(target: Any) -> Any:
    """The overload of an op that takes the same and writes each result into a tensor given as `out=`, if torch has one
    that is a kernel and no copy in disguise. Whether it writes nothing else there, the caller must know."""
    mine = [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        rest = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        outs = [str(a.type) for a in other._schema.arguments if a.is_out]
        alike = len(outs) == len(target._schema.returns) and set(outs) == {"Tensor"} and rest == mine
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


Argument = tuple[int, str]  # position and name
Aliasing = tuple[bool, tuple[Argument, ...], tuple[Argument | None, ...]]


def _aliasing(node: fx.Node) -> Aliasing:
    """Whether the schema of a node's op says that a result shares memory with an operand, the arguments that it writes
    to, and by result the one of them that it returns."""
    if isinstance(node.target, OpOverload):
        return _aliasing_of(node.target)
    found = schema(node)
    return (False, (), ()) if found is None else _read_schema(found)


@functools.cache
def _aliasing_of(target: OpOverload) -> Aliasing:
    return _read_schema(target._schema)


def _read_schema(found: torch.FunctionSchema) -> Aliasing:
    shares = any(r.alias_info is not None and not r.alias_info.is_write for r in found.returns)
    known = [(i, a.name, a.alias_info) for i, a in enumerate(found.arguments)]
    written = {(i, name): alias.before_set for i, name, alias in known if alias is not None and alias.is_write}
    sets = [
        r.alias_info.before_set if r.alias_info is not None and r.alias_info.is_write else () for r in found.returns
    ]
    returned = tuple(next((own for own, names in written.items() if names & set(of)), None) for of in sets)
    return shares, tuple(written), returned


def base(node: fx.Node) -> fx.Node:
    """The node whose memory a view, or what an in-place op returns, looks at: itself where it has memory of its own."""
    while (owner := source(node)) is not None:
        node = owner
    return node


def source(node: fx.Node) -> fx.Node | None:
    """The operand whose memory a node's result lies in: what it looks at, or writes to and returns."""
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
    return next(iter(reversed(graph.nodes)))


def outputs(graph: fx.Graph) -> list[Any]:
    return list(output(graph).args[0])  # type: ignore[arg-type]


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def module(graph: fx.Graph) -> fx.GraphModule:
    """A checked graph as something to call; it owns no tensors."""
    graph.eliminate_dead_code()
    graph.lint()
    return graph_module(graph)


def extract(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node], dests: Sequence[fx.Node] = (),
    *, from_buffers: bool = True,
) -> fx.GraphModule:  # fmt: skip
    """A segment of these nodes: `inputs` become placeholders, `results` outputs; the first len(dests) results are
    copied into one trailing placeholder each, whose value is that of the node in `dests`.

    Outputs and inputs are dense, for a buffer has no room for gaps, and keep the order of their dims in memory: so each
    view that the step took of a value can be taken of what a buffer holds of it. Without `from_buffers` inputs are
    values of another segment, as they lie there.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(inputs):
        env[node] = graph.placeholder(f"x{index}")
        env[node].meta["val"] = dense_like(node.meta["val"]) if from_buffers else node.meta["val"]
    targets = []
    for index, node in enumerate(dests):
        targets.append(graph.placeholder(f"into{index}"))
        targets[-1].meta["val"] = node.meta["val"]
    for node in nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
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


def merge_equal(gm: fx.GraphModule) -> None:
    """Equal pure nodes become one (the views and casts that were made once per use). In place."""
    seen: dict[str, fx.Node] = {}
    outs = outputs(gm.graph)
    kept = {*outs, *(made for out in outs for made, _ in memory(out))}  # two outputs are two buffers: none is shared
    for node in list(gm.graph.nodes):
        if is_compute(node) and not mutated(node):
            key = f"{node.target} {fx.node.map_arg((node.args, node.kwargs), lambda n: n.name)}"
            if key in seen and node not in kept:
                node.replace_all_uses_with(seen[key])
                gm.graph.erase_node(node)
            else:
                seen[key] = node
    gm.meta.pop("digest", None)
    gm.meta.pop("as_planned", None)
    gm.recompile()


def dense_like(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same shape, dtype and device, without gaps, its dims in the same order in memory: what
    `clone` makes. A value without gaps is returned as it is."""
    if is_dense(value):
        return value
    strides = torch.empty_like(torch.empty_strided(value.shape, value.stride(), device="meta")).stride()
    with value.fake_mode if is_fake(value) else FakeTensorMode():  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor's elements lie side by side, in whatever order of its dims."""
    return dense(value.shape, value.stride())


def dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether such a layout has every element from its first to its last once."""
    dims = sorted((step, n) for n, step in zip(size, stride, strict=True) if n != 1)
    steps = itertools.accumulate((n for _, n in dims), operator.mul, initial=1)
    return 0 in size or all(step == wanted for (step, _), wanted in zip(dims, steps, strict=False))


def steps(x: torch.Tensor) -> list[int]:
    """The strides that say where a tensor's elements lie: of dims of more than one."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1] if x.numel() else []


def normalised(gm: fx.GraphModule) -> fx.GraphModule:
    """Renames of a value (detach, alias) gone, t(t(x)) = x, dead code gone. Works in place and returns its argument."""
    _true_statistics(gm)
    for node in list(gm.graph.nodes):
        if is_rename(node):
            node.replace_all_uses_with(node.args[0])
        elif _is_transpose(node) and _is_transpose(operand(node)):
            node.replace_all_uses_with(operand(operand(node)))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


_NORMS = {
    aten.native_layer_norm.default: 2,  # where the weight is
    aten.native_group_norm.default: 1,
    aten.native_batch_norm.default: 1,
    aten._native_batch_norm_legit.default: 1,
    aten._native_batch_norm_legit_functional.default: 1,
}


def _true_statistics(gm: fx.GraphModule) -> None:
    """A norm of 16-bit values with fp32 parameters keeps its mean and deviation in fp32 on the CPU; torch's shape rules
    (2.11, 2.13) say 16 bits. In place."""
    for node in gm.graph.nodes:
        weight = node.args[_NORMS[node.target]] if node.target in _NORMS else None
        if not isinstance(weight, fx.Node) or weight.meta["val"].device.type != "cpu":
            continue
        out, mean, deviation, *rest = node.meta["val"]
        if out.dtype.itemsize == 2 and weight.meta["val"].dtype is torch.float32:
            with mean.fake_mode:
                wide = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (mean, deviation)]
            node.meta["val"] = (out, *wide, *rest)
            for user in node.users:
                user.meta["val"] = node.meta["val"][user.args[1]]


def _is_transpose(node: fx.Node) -> bool:
    return node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0])


def text(gm: fx.GraphModule) -> str:
    """What the hash is of: nodes by position, with targets, literals, and the inputs' shapes, strides and dtypes."""
    index = {node: i for i, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            lines.append(f"%{index[node]} = input {val.dtype} {tuple(val.shape)} {val.stride()} {val.device.type}")
        else:
            args = fx.node.map_arg((node.args, node.kwargs), lambda n: _Name(f"%{index[n]}"))
            args = fx.node.map_aggregate(args, lambda a: a.type if isinstance(a, torch.device) else a)  # any rank's
            lines.append(f"%{index[node]} = {node.target} {args}")
    return "\n".join(lines)


class _Name(str):
    def __repr__(self) -> str:
        return str(self)


def digest(gm: fx.GraphModule) -> str:
    if "digest" not in gm.meta:
        gm.meta["digest"] = hashlib.blake2b(text(gm).encode(), digest_size=6).hexdigest()
    return str(gm.meta["digest"])


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's value: one, those of a tuple, or none."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (tuple, list)) else []


def propagate(gm: fx.GraphModule, inputs: Iterable[torch.Tensor]) -> fx.GraphModule:
    """`meta["val"]` of every node anew from these (fake) inputs."""
    for node, value in shapes(gm, inputs).items():
        node.meta["val"] = value
    return gm


def shapes(gm: fx.GraphModule, inputs: Iterable[torch.Tensor]) -> dict[fx.Node, Any]:
    """The (fake) value of every node from these (fake) inputs."""
    values: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(feed)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            mode = next((v.fake_mode for v in values.values() if is_fake(v)), None) or FakeTensorMode()
            with mode:
                values[node] = node.target(*args, **kwargs)
    return values


# --- bytes --------------------------------------------------------------------------------------------------------

Value = tuple[fx.Node, int]  # a node, and which of its results


@dataclass(frozen=True)
class Values:
    """What a segment allocates: of each result of each node (first node, last node, bytes), by position in the graph.

    A value lives until the last use of it or of any view of it. `outputs` are those that are returned, in order.
    """

    lives: dict[Value, tuple[int, int, int]]
    outputs: tuple[Value, ...]


def results(node: fx.Node, value: Any = None) -> list[tuple[int, torch.Tensor]]:
    """(position, fake tensor) of each tensor that a node allocates: none for views, in-place ops and getitem. `value`
    is the node's, where it is not that of its `meta`."""
    if not is_compute(node) or node.target is operator.getitem or is_view(node):
        return []
    if mutated(node) and not _also_returns(node):
        return []
    value = node.meta.get("val") if value is None else value
    found = enumerate(value) if isinstance(value, (tuple, list)) else [(0, value)]
    return [(index, one) for index, one in found if isinstance(one, torch.Tensor)]


def extent_bytes(value: torch.Tensor) -> int:
    """From the first byte of a tensor to its last: what it needs of memory that is its own."""
    if not value.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()


def _also_returns(node: fx.Node) -> bool:
    """Whether a node that writes to some of its arguments returns new tensors as well."""
    return any(r.alias_info is None for r in schema(node).returns)  # type: ignore[union-attr]


def values(gm: fx.GraphModule) -> Values:
    """The values of a segment and their lives."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    last: dict[Value, int] = {}
    lives: dict[Value, tuple[int, int, int]] = {}
    for node, at in position.items():
        end = max((position[user] for user in node.users), default=at)
        for key in memory(node):
            last[key] = max(last.get(key, 0), end)
        for index, value in results(node):
            lives[node, index] = (at, at, extent_bytes(value))
    lives = {key: (first, max(first, last.get(key, 0)), size) for key, (first, _, size) in lives.items()}
    returned = [key for out in outputs(gm.graph) if isinstance(out, fx.Node) for key in memory(out)]
    return Values(lives, tuple(returned))


def memory(node: fx.Node) -> Iterator[Value]:
    """The results whose memory a node's value keeps alive. What writes here returns what it writes, or nothing."""
    if node.op not in ("call_function", "placeholder"):
        return
    root, index = node, None
    while is_compute(root):
        if mutated(root):
            root = mutated(root)[0]
        elif is_view(root):
            root = operand(root)
        elif root.target is operator.getitem:
            root, index = operand(root), root.args[1]
            if results(root):
                break
        else:
            break
    if isinstance(index, int):
        yield (root, index)
    else:
        for i, _ in results(root):
            yield (root, i)
