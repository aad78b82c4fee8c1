"""meaning: what a step computes, as a digest that no placement and no schedule may change.

Every value is a *term*: the hash of the op that made it and of its operands' terms, down to the leaves of the state and
the batch. `graph_meaning` gives the terms of the captured step under the semantics sentence (replicated state,
reductions in the graph); `abstract.program_meaning` runs a program on terms instead of tensors, node by node through
its segments, and gives those of the state it leaves behind. They must be equal, for every ZeRO stage, bucket size and
prefetch depth, after every pass: that is what verify checks, so a program that reduces twice, skips a microbatch or
reads a moment from the wrong leaf is refused whatever it looks like.

Flat work is understood: an elementwise op on a range of a bucket is that op on each leaf in the range; so is an op on
blocks of 64 elements (`BLOCKWISE`) where no padding lies between the leaves; an op that needs all of a leaf (`WHOLE`)
works on own slices where the leaf lies in one of them; a sum over the own slice is *partial* until it is summed over
the axis; a buffer of which only the own slice was written is *mine* until it is gathered.
Copies, clones and detaches have the term of their operand.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fzero import optim, segments
from fzero.capture import Graph, Region
from fzero.plan.layout import Plan
from fzero.program import ALIGN

assert optim  # it registers the ops of IN_PLACE and BLOCKWISE
aten = torch.ops.aten
_COPIES = {
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
}
_SUMS = {"aten::sum", "fzero::sum_squares"}


class Undefined(Exception):
    """The program reads what it never computed, or computes what no value is; says which."""


def term(*parts: Any) -> str:
    """The hash of a tuple of strings, numbers and terms."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Vec:
    """Terms of the leaves in a flat range; `mine`: only of the own slice. There is one element for each `per` of the
    range (of an op's several results: for each, its own); `tight`: no padding lies in it; `shapes`: those of the leaves
    that are there as a whole, because no rank boundary cuts them."""

    slots: Mapping[int, str]
    mine: bool
    span: tuple[int, int]
    per: Any = 1
    tight: bool = True
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Partial:
    """The sum over the own slice of what `of` is the sum of."""

    of: str


def apply(target: Any, args: Any, kwargs: Any) -> Any:
    """The value of one op on terms, `Vec`s and literals."""
    vectors = [a for a in _leaves((args, kwargs)) if isinstance(a, Vec)]
    if target in _COPIES:
        return args[0]
    if any(isinstance(a, Partial) for a in _leaves((args, kwargs))):
        raise Undefined(f"{target} uses a sum over one rank's slice as if it were the whole")
    if target is operator.getitem and isinstance(args[0], Vec):
        vector, index = args
        picked = replace(vector, slots={s: term("getitem", t, index) for s, t in vector.slots.items()})
        return _ratio(picked, vector.per[index]) if isinstance(vector.per, tuple) else picked
    name = "getitem" if target is operator.getitem else target._schema.name
    if not vectors:
        return term(name, *_plain((args, tuple(sorted(kwargs.items()))))) if name != "getitem" else term(name, *args)
    first = vectors[0]
    if target in FLAT_FORMS:
        return _leaf(target, args, kwargs)
    if target in BLOCKWISE:
        first = replace(_blocks(target, args), per=BLOCKWISE[target][1])
    elif len({(v.span, v.mine, v.per) for v in vectors}) > 1:
        raise Undefined(f"{target} works on ranges that do not match")

    def at(slot: int) -> str:
        own = fx.node.map_aggregate((args, kwargs), lambda a: a.slots[slot] if isinstance(a, Vec) else a)
        return term(name, *_plain((own[0], tuple(sorted(own[1].items())))))

    if name in _SUMS:
        if len(first.slots) != 1:
            raise Undefined(f"{target} sums over several leaves at once")
        (only,) = first.slots
        return Partial(at(only)) if first.mine else at(only)
    elementwise = target in segments._POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ())
    if not elementwise and target not in BLOCKWISE:
        raise Undefined(f"{target} is not elementwise and works on a flat range")
    return replace(first, slots={slot: at(slot) for slot in first.slots})


def _blocks(target: Any, args: Any) -> Vec:
    """The range of an op on blocks: its operands' columns have the ratios it wants, and no block holds padding between
    leaves. Returns the first operand, a column of whole elements."""
    wanted, _ = BLOCKWISE[target]
    operands = args[: len(wanted)]
    if not all(isinstance(v, Vec) and v.per == per for v, per in zip(operands, wanted, strict=True)):
        raise Undefined(f"{target} wants columns with an element for each {wanted}")
    if len({(_ratio(v, ALIGN).span, v.mine, *v.slots) for v in operands}) > 1:
        raise Undefined(f"{target} works on ranges that do not match")
    if not all(v.tight for v in operands):
        raise Undefined(f"{target} takes padding into the blocks of a leaf")
    first = operands[0]
    assert isinstance(first, Vec)
    return first


def _leaf(target: Any, args: Any, kwargs: Any) -> Vec:
    """What the flat form of an op on whole leaves gives: the op itself on the one leaf of the range."""
    vector, shape, *rest = args
    if not isinstance(vector, Vec) or len(vector.slots) != 1 or not vector.tight:
        raise Undefined(f"{target} works on one leaf at a time, without padding")
    ((slot, of),) = vector.slots.items()
    if slot not in vector.shapes:
        raise Undefined(f"{target} needs a whole leaf, of which a rank boundary leaves each rank a part")
    if vector.shapes[slot] != tuple(shape):
        raise Undefined(f"{target} takes a leaf of shape {vector.shapes[slot]} for one of shape {tuple(shape)}")
    return replace(vector, slots={slot: apply(FLAT_FORMS[target], (of, *rest), kwargs)})


def _ratio(vector: Vec, per: int) -> Vec:
    """The same range in a column with one element for each `per`: whole blocks."""
    start, stop = vector.span
    return replace(vector, per=per, span=(start, -(-stop // per) * per))


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate(value, lambda a: found.append(a))
    return found


def _plain(value: Any) -> tuple[Any, ...]:
    """Arguments in a form whose repr is stable, and the same on every rank: of a device, its type."""

    def plain(a: Any) -> Any:
        return str(a) if isinstance(a, torch.dtype) else a.type if isinstance(a, torch.device) else a

    return fx.node.map_aggregate(value, plain)


# in-place op -> (its pure form, for each of the pure form's results the argument it goes to)
IN_PLACE: dict[Any, tuple[Any, tuple[int, ...]]] = {
    torch.ops.fzero.adamw_.default: (torch.ops.fzero.adamw.default, (0, 2, 3)),
    torch.ops.fzero.adamw8_.default: (torch.ops.fzero.adamw8.default, (0, 2, 3, 4, 5)),
}

# op on blocks of 64 elements -> (per operand, elements of the leaf for one of its own; the same per result). Like an
# elementwise op it runs on slices: a block of the results depends on the same block of the operands alone
BLOCKWISE: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {
    torch.ops.fzero.adamw8.default: ((1, 1, 1, ALIGN, 1, ALIGN), (1, 1, ALIGN, 1, ALIGN)),
}


# op that needs all of a leaf -> its form that takes the leaf's elements in 1-D, then its shape; of no elements, none
WHOLE: dict[Any, Any] = {
    torch.ops.fzero.orthogonalize.default: torch.ops.fzero.orthogonalize_flat.default,
}
FLAT_FORMS = {flat: target for target, flat in WHOLE.items()}


def evaluate(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
    """(the outputs' values, the values left in placeholders that were written to, by position)."""
    values: dict[fx.Node, Any] = {}
    holders = segments.placeholders(gm.graph)
    values.update(zip(holders, inputs, strict=False))
    written: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        targets = segments.mutated(node)
        if node.target is aten.copy_.default:
            values[node] = written[targets[0]] = values[node.args[1]]
            values[targets[0]] = values[node]
            continue
        kwargs = {k: v for k, v in node.kwargs.items() if k != "out"}
        args, kwargs = fx.node.map_arg((node.args, kwargs), lambda n: values[n])
        if node.target in IN_PLACE:
            pure, places = IN_PLACE[node.target]
            result = apply(pure, args, kwargs)
            for index, place in enumerate(places):
                holder = node.args[place]
                assert isinstance(holder, fx.Node)
                values[holder] = written[holder] = apply(operator.getitem, (result, index), {})
        elif targets:
            values[node] = apply(node.target, args, kwargs)
            values[targets[0]] = written[targets[0]] = values[node]
        else:
            values[node] = apply(node.target, args, kwargs)
    outs = [values[n] if isinstance(n, fx.Node) else n for n in segments.outputs(gm.graph)]
    return outs, {holders.index(n): v for n, v in written.items()}


# --- the captured step ------------------------------------------------------------------------------------------------


def grad_places(
    region: Region, inputs: Sequence[Any], leaf_nodes: Sequence[Any], plan: Plan
) -> dict[int, tuple[str, int]]:
    """For each output of a region that is the gradient of a flat leaf: that leaf's (bucket, slot)."""
    places: dict[int, tuple[str, int]] = {}
    position = {node: i for i, node in enumerate(leaf_nodes)}
    for number, of in enumerate(region.grad_of):
        leaf = plan.leaves[position[inputs[of]]] if inputs[of] in position else None
        if leaf is not None and leaf.slot is not None:
            spot = (plan.buffers[leaf.buffer].bucket or "", leaf.slot)
            if spot not in places.values():
                places[1 + number] = spot
    return places


def graph_meaning(graph: Graph, plan: Plan, reduce: str, names: Sequence[str]) -> str:
    """The meaning of a captured step. `names` are the buffers of its inputs after the state's leaves."""
    nodes = segments.placeholders(graph.gm.graph)
    leaf_nodes = nodes[: len(plan.leaves)]
    values: dict[fx.Node, Any] = {}
    for node, leaf in zip(leaf_nodes, plan.leaves, strict=True):
        values[node] = term("input", leaf.buffer, leaf.slot)
    for node, name in zip(nodes[len(plan.leaves) :], names, strict=True):
        values[node] = term("input", name, None)
    n = plan.world_size
    folded: set[fx.Node] = set()  # means of a region's outputs: one division, by ranks x microbatches
    for node in graph.gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.fzero.region.default:
            folded |= _region_terms(graph, plan, node, leaf_nodes, values, reduce)
        elif node.target is torch.ops.fzero.reduce.default:
            if node not in folded:
                source, how, axis = node.args
                values[node] = reduced(values[source], how, axis, n, n if how == "mean" else 1)
        elif node.target is torch.ops.fzero.axis_index.default:
            values[node] = term("input", f"rank:{node.args[0]}", None)
        elif node not in values:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: values[a])
            values[node] = apply(node.target, args, kwargs)
    outs = [values[x] for x in segments.outputs(graph.gm.graph)]
    state = {(leaf.buffer, leaf.slot): t for leaf, t in zip(plan.leaves, outs, strict=False)}
    metrics = dict(zip(graph.metric_names, outs[len(plan.leaves) :], strict=True))
    return digest(state, metrics)


def reduced(value: str, how: str, axis: str, world: int, divisor: int) -> str:
    """The term of a reduction; over one rank it is only the division."""
    if world == 1:
        return value if divisor == 1 else apply(aten.div.Tensor, (value, divisor), {})
    return term("reduce", "sum" if how == "mean" else how, axis, divisor, value)


def digest(state: Mapping[tuple[str, int | None], Any], metrics: Mapping[str, Any]) -> str:
    return term(sorted(state.items(), key=str), sorted(metrics.items()))


def _region_terms(
    graph: Graph, plan: Plan, node: fx.Node, leaf_nodes: Sequence[fx.Node], values: dict[fx.Node, Any],
    reduce: str,
) -> set[fx.Node]:  # fmt: skip
    """Sets the values of a region's picked outputs and of the means over ranks taken of them."""
    region = graph.regions[int(node.args[1])]  # type: ignore[arg-type]
    inputs: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    places = grad_places(region, inputs, leaf_nodes, plan)
    n, k = plan.world_size, region.microbatches
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
                divisor = 1 if summed else n * k
                if index not in places:
                    values[user] = reduced(_sum(parts), "sum", axis, n, divisor)
                else:
                    over = _travelled(axis, n, divisor, region.values[index].dtype, region.wire.get(index))
                    each = reduce == "each"
                    values[user] = _sum([over(p) for p in parts]) if each else over(_sum(parts))
                folded.add(user)
        values[pick] = _sum(parts) if summed else reduced(_sum(parts), "sum", "", 1, k)
    return folded


def _travelled(
    axis: str, world: int, divisor: int, dtype: torch.dtype, wire: torch.dtype | None
) -> Callable[[str], str]:
    """The reduction of a gradient, in the dtype it travels in."""

    def over(value: str) -> str:
        narrow = wire is not None and wire is not dtype and world > 1
        value = apply(aten._to_copy.default, (value,), {"dtype": wire}) if narrow else value
        value = reduced(value, "sum", axis, world, divisor)
        return apply(aten._to_copy.default, (value,), {"dtype": dtype}) if narrow else value

    return over


def _micro(value: str, like: torch.Tensor, m: int, k: int) -> str:
    chunk = like.numel() // k
    return part(value, m * chunk, (m + 1) * chunk, (like.shape[0] // k, *like.shape[1:]))


def part(value: str, start: int, stop: int, shape: tuple[int, ...]) -> str:
    """The term of elements [start, stop) of a contiguous tensor."""
    return term("part", value, start, stop, tuple(shape))


def _sum(parts: Sequence[str]) -> str:
    total = parts[0]
    for one in parts[1:]:
        total = apply(aten.add.Tensor, (total, one), {})
    return total
