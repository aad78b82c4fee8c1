"""meaning: the meaning of a captured step, which every program lowered from it must have.

The semantics sentence on terms (`fzero.verify.terms`): state is replicated, each region runs once for every microbatch,
and reductions are where the graph says. Where a gradient is summed and in which dtype it travels is the plan's choice,
and part of the numbers: so it is part of the meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.capture.graph import Graph, Region
from fzero.capture.leaf_like import leaf_like
from fzero.capture.step_ops import CodedCall, FedCall
from fzero.ir import coded_mean as kernel
from fzero.ir import fx_nodes
from fzero.ir.code_ops import OPS, CodeOps
from fzero.ir.fed_mean import owed
from fzero.ir.mesh import parts_of
from fzero.ir.program import Program
from fzero.ir.recorder import record
from fzero.ir.records import SlotKey
from fzero.kernels.codecs import codec_named, message_bytes
from fzero.plan.state_plan import Plan
from fzero.plan.wires import Wire
from fzero.verify.terms import (
    Term,
    apply,
    digest,
    evaluate,
    exchanged,
    metric,
    moved,
    part,
    reduced,
    term,
)

aten = torch.ops.aten


def _gradients_in_buckets(
    region: Region, inputs: Sequence[fx.Node], places: Mapping[fx.Node, SlotKey]
) -> dict[int, SlotKey]:
    """For each output of a region that is the gradient for a leaf in a bucket, or for what is like one, its slot."""
    found: dict[int, SlotKey] = {}
    dtypes: dict[str, torch.dtype] = {}
    seen: set[SlotKey] = set()
    for number, of in enumerate(region.grad_of, 1):
        place, dtype = places.get(inputs[of]), region.values[number].dtype
        if place is not None and place not in seen:
            seen.add(place)
            if dtypes.setdefault(place.bucket, dtype) is dtype:
                found[number] = place
    return found


def _places(graph: Graph, plan: Plan) -> dict[fx.Node, SlotKey]:
    """The slots of leaves in buckets, and of the values that are like one."""
    slots = [None if leaf.slot is None else SlotKey(plan.buffers[leaf.buffer].bucket or "", leaf.slot)
             for leaf in plan.leaves]  # fmt: skip
    return leaf_like(graph, graph.gm, [leaf.path for leaf in plan.leaves if leaf.per_rank], slots)


def graph_meaning(graph: Graph, plan: Plan, reduce: str, program: Program) -> str:
    """The meaning of a captured step. What the step is given beside the state is in the program's buffers of kinds
    "batch" and "constant", in their order: so a run fills them."""
    names = [*(n for n, b in program.buffers.items() if b.kind == "batch"),
             *(n for n, b in program.buffers.items() if b.kind == "constant")]  # fmt: skip
    nodes = fx_nodes.placeholders(graph.gm.graph)
    leaf_nodes = nodes[: len(plan.leaves)]
    values: dict[fx.Node, Any] = {}
    for node, leaf in zip(leaf_nodes, plan.leaves, strict=True):
        values[node] = term("input", leaf.buffer, leaf.slot)
    for node, name in zip(nodes[len(plan.leaves) :], names, strict=True):
        values[node] = term("input", name, None)
    places = _places(graph, plan)
    folded: set[fx.Node] = set()  # means of a region's outputs: one division, by ranks x microbatches
    for node in graph.gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.fzero.region.default:
            folded |= _region_terms(graph, plan, node, places, values, reduce)
        elif node.target is torch.ops.fzero.reduce.default:
            if node not in folded:
                source, how, axis = node.args
                n = plan.mesh.size(str(axis))
                values[node] = reduced(values[source], how, axis, n, n if how == "mean" else 1)
        elif node.target is torch.ops.fzero.coded_mean.default:
            _coded_terms(plan, node, values)
        elif node.target is torch.ops.fzero.fed_mean.default:
            continue  # with the region whose gradient it is
        elif node.target is torch.ops.fzero.axis_index.default:
            values[node] = term("input", f"rank:{node.args[0]}", None)
        elif node not in values:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: values[a])
            values[node] = apply(node.target, args, kwargs)
    outs = fx_nodes.outputs(graph.gm.graph)
    state = {(leaf.buffer, leaf.slot): values[x] for leaf, x in zip(plan.leaves, outs, strict=False)}
    shown = dict(zip(graph.metric_names, outs[len(plan.leaves) :], strict=True))
    forms = {name: x.meta["val"] for name, x in shown.items()}
    return digest(state, {n: metric(values[x], forms[n].dtype, forms[n].shape) for n, x in shown.items()})


def _region_terms(
    graph: Graph, plan: Plan, node: fx.Node, of_leaf: Mapping[fx.Node, SlotKey], values: dict[fx.Node, Any],
    reduce: str,
) -> set[fx.Node]:  # fmt: skip
    """Sets the values of a region's picked outputs and of the means over ranks taken of them."""
    region = graph.regions[int(node.args[1])]  # type: ignore[arg-type]
    inputs: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    places = _gradients_in_buckets(region, inputs, of_leaf)
    k = region.microbatches
    runs = []
    for m in range(k):
        feed = [_micro(values[x], x.meta["val"], m, k) if cut else values[x]
                for x, cut in zip(inputs, region.sliced, strict=True)]  # fmt: skip
        runs.append(evaluate(region.gm, feed)[0])
    folded: set[fx.Node] = set()
    for pick in node.users:
        index = int(pick.args[1])  # type: ignore[arg-type]
        parts = [outs[index] for outs in runs]
        summed = index in region.summed
        if not summed and not region.values[index].dtype.is_floating_point:
            values[pick] = parts[-1]
            continue
        how = "sum" if summed else "mean"
        for user in pick.users:
            if user.target is torch.ops.fzero.reduce.default and user.args[1] == how:
                axis = str(user.args[2])
                n = plan.mesh.size(axis)
                divisor = 1 if summed else n * k
                if index not in places:
                    values[user] = reduced(_sum(parts), "sum", axis, n, divisor)
                else:
                    wire = plan.bucket_layouts[places[index][0]].wire
                    if wire is not None and wire.feedback:
                        wire = None  # of another phase, whose gradients are coded
                    coders = wire if isinstance(wire, CodeOps) else _coders(wire, region, index)
                    inner, *outer = _travelled(plan, axis, divisor, coders)
                    value = _sum([inner(p) for p in parts]) if reduce == "each" else inner(_sum(parts))
                    for over in outer:
                        value = over(value)
                    values[user] = value
                folded.add(user)
            elif user.target is torch.ops.fzero.fed_mean.default:
                _fed_terms(plan, user, _sum(parts), 1 if summed else k, values)
        values[pick] = _sum(parts) if summed else reduced(_sum(parts), "sum", "", 1, k)
    return folded


def _fed_terms(plan: Plan, node: fx.Node, gradient: Any, parts: int, values: dict[fx.Node, Any]) -> None:
    """Sets the values of the results of a gradient's reduction in codes that feed back what they lose."""
    call = FedCall.of(node)
    likes, n = [a.meta["val"] for a in (call.x, call.error)], plan.mesh.size(call.axis)
    code = partial(owed, codec=call.codec, parts=parts, ranks=n)
    lost, mean = _computed(code, [gradient, values[call.error]], likes)
    (over,) = _travelled(plan, call.axis, n * parts if call.op == "mean" else 1, OPS[call.codec])
    for pick in node.users:
        values[pick] = lost if pick.args[1] else over(mean)


def _coded_terms(plan: Plan, node: fx.Node, values: dict[fx.Node, Any]) -> None:
    """Sets the values of the results of a mean that travels in codes."""
    call = CodedCall.of(node)
    like, n = call.x.meta["val"], plan.mesh.size(call.axis)
    x, errors = values[call.x], [values[e] for e in call.errors]
    if n == 1:
        results = _computed(kernel.alone, [x, *errors], [like, *(e.meta["val"] for e in call.errors)])
    else:
        length = kernel.slice_length(call.sizes, n)
        parts = like.new_empty(n * message_bytes(length, codec_named(call.codec)), dtype=torch.uint8)
        mean, place = like.new_empty(length), like.new_empty((), dtype=torch.int64)
        code = partial(kernel.sent, sizes=call.sizes, ranks=n, codec=call.codec)
        add = partial(kernel.averaged, sizes=call.sizes, ranks=n, codec=call.codec, both=call.both)
        join = partial(kernel.joined, sizes=call.sizes, ranks=n, codec=call.codec, both=call.both)
        sent, *worker = _computed(code, [x, *errors[:1]], [like, like])
        rank, arrived = term("input", f"rank:{call.axis}", None), moved("all_to_all", sent, call.axis, n)
        own, *server = _computed(add, [arrived, rank, *errors[1:]], [parts, place, mean])
        whole = parts if call.both else like.new_empty(n * length)
        results = [*_computed(join, [moved("all_gather", own, call.axis, n)], [whole]), *worker, *server]
    for pick in node.users:
        values[pick] = results[int(str(pick.args[1]))]


def _computed(fn: Callable[..., list[torch.Tensor]], values: Sequence[Any], likes: Sequence[torch.Tensor]) -> list[Any]:
    """The terms of the results of a function of tensors of these forms."""
    with FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _, x in zip(values, likes, strict=False)]
        gm = record(fn, fakes)
    return evaluate(gm, values)[0]


Coders = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _coders(wire: Wire | None, region: Region, index: int) -> Coders | None:
    """What a rank makes of a gradient before it is sent, and of the sum: by the wire that its bucket has, else casts to
    the dtype that the region says and back. None where it travels as it is."""
    value = region.values[index]
    if wire is not None:
        coded = wire.encode(value)
        return partial(_elementwise, wire.encode, value), partial(_elementwise, wire.decode, coded)
    travels = region.wire.get(index, value.dtype)
    if travels is value.dtype:
        return None

    def cast(dtype: torch.dtype) -> Callable[[Any], Any]:
        return lambda term: apply(aten._to_copy.default, (term,), {"dtype": dtype})

    return cast(travels), cast(value.dtype)


def _elementwise(fn: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor, value: Any) -> Any:
    """The term of a function of tensors of one form."""
    with FakeTensorMode():
        gm = record(lambda x: [fn(x)], [torch.empty(like.shape, dtype=like.dtype)])
    return evaluate(gm, [value])[0][0]


def _travelled(plan: Plan, axis: str, divisor: int, coders: Coders | CodeOps | None) -> list[Callable[[Any], Any]]:
    """The sums of a gradient over each of the axes that the step reduces it over, the innermost first, coded for each.
    The last divides."""

    def over(value: Any, name: str) -> Any:
        world = plan.mesh.size(name) if name else 1
        by = divisor if name == last else 1
        if coders is None or world == 1:
            return reduced(value, "sum", name, world, by)
        if isinstance(coders, CodeOps):
            messages = exchanged(apply(coders.encode, (value,), {}), name, world)
            return apply(coders.decode_sum, (messages, by), {})
        encode, decode = coders
        return decode(reduced(encode(value), "sum", name, world, by))

    axes = [name for name in reversed(parts_of(axis)) if plan.mesh.size(name) > 1] or [""]
    last = axes[-1]
    return [partial(over, name=name) for name in axes]


def _micro(value: Any, like: torch.Tensor, m: int, k: int) -> Term:
    chunk = like.numel() // k
    return part(value, m * chunk, (m + 1) * chunk, (like.shape[0] // k, *like.shape[1:]))


def _sum(parts: Sequence[Any]) -> Any:
    total = parts[0]
    for value in parts[1:]:
        total = apply(aten.add.Tensor, (total, value), {})
    return total
