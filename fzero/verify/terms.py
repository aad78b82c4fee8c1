"""terms: the meaning of a step, as a digest that no placement and no schedule may change.

Every value is a *term*: the hash of the op that made it and of its operands' terms, down to the leaves of the state and
the batch. `meaning.graph_meaning` gives the terms of the captured step under the semantics sentence (replicated state,
reductions in the graph). `abstract.program_meaning` runs a program on terms instead of tensors, node by node through
its segments. It gives the terms of the state that the program leaves behind. Verify checks that both are equal, for
every ZeRO stage, bucket size and prefetch depth, after every pass. So it refuses a program that reduces twice, skips a
microbatch or reads a moment from the wrong leaf.

Flat work is understood: an elementwise op on a range of a bucket is that op on each leaf in the range; so is an op on
blocks of 64 elements (`OpInfo.blockwise`) where no padding lies between the leaves; an op that needs all of a leaf
(`OpInfo.flat_form`) works on own slices where the leaf lies in one of them; a sum over the own slice is *partial* until
it is summed over the axis; a buffer of which only the own slice was written is an *own slice* until it is gathered.
Copies, clones and detaches have the term of their operand; a copy into another dtype is a cast.

A term knows over which axes it *varies*. The batch, a rank's place and the leaves that every rank keeps for itself
differ between ranks. So does a value computed from them, until it is reduced. Own slices of a varying value, brought
together, are no rank's value: `gathered` is a term of its own, which no captured step has.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fzero.ir import fx_nodes
from fzero.ir.mesh import DATA, parts_of
from fzero.ir.op_info import of
from fzero.ir.records import ALIGN, Per
from fzero.shard.ops import TRANSFERS

aten = torch.ops.aten
NOWHERE: frozenset[str] = frozenset()


class Undefined(Exception):
    """The program reads a value that it never computed, or computes something without a meaning. `op` is the number of
    the op, -1 where it is not known."""

    def __init__(self, what: str, op: int = -1) -> None:
        super().__init__(what)
        self.op = op


class Term(str):
    """The hash of an op and its operands; `varies` are the mesh axes over which its value differs between ranks."""

    __slots__ = ("varies",)
    varies: frozenset[str]

    def over(self, varies: frozenset[str]) -> Term:
        """The same term, varying over these axes."""
        varying = Term(self)
        varying.varies = varies
        return varying


def term(*parts: Any) -> Term:
    """The hash of a tuple of strings, numbers and terms; it varies where one of them does."""
    return Term(hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()).over(_varies(parts))


def _varies(value: Any) -> frozenset[str]:
    if isinstance(value, Term):
        return value.varies
    axes = NOWHERE
    for item in value if isinstance(value, (tuple, list)) else value.values() if isinstance(value, dict) else ():
        if isinstance(item, (Term, tuple, list, dict)) and (more := _varies(item)):
            axes |= more
    return axes


@dataclass(frozen=True)
class Vec:
    """Terms of the leaves in a flat range, by slot. `own_slice`: only of that along this axis. `block_size`: the
    elements of the range for each element of the value; a tuple where an op has several results. `parts`: of how many
    ranks there is such a range. `tight`: no padding
    lies in the range. `shapes`: those of the leaves that no rank boundary cuts. `tile`: (i, size) where it is only
    the i-th stretch of so many elements of that."""

    slots: Mapping[int, Term]
    own_slice: str | None
    span: tuple[int, int]
    block_size: Any = 1
    tight: bool = True
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    tile: tuple[int, int] | None = None
    parts: int = 1


@dataclass(frozen=True)
class PartialTerm:
    """The part of the sum `of` that the own slice along an axis adds."""

    of: Term
    axis: str


def apply(target: Any, args: Any, kwargs: Any) -> Any:
    """The value of one op on terms, `Vec`s and literals."""
    known = of(target)
    if known.meaning == "copy":
        return args[0]
    if target in TRANSFERS:
        return moved(TRANSFERS[target], *args)
    leaves = _leaves((args, kwargs))
    vectors = [a for a in leaves if isinstance(a, Vec)]
    if any(isinstance(a, PartialTerm) for a in leaves):
        raise Undefined(f"{target} uses a sum over one rank's slice as if it were the whole")
    if target is operator.getitem and isinstance(args[0], Vec):
        vector, index = args
        picked = replace(vector, slots={s: term("getitem", t, index) for s, t in vector.slots.items()})
        return _ratio(picked, vector.block_size[index]) if isinstance(vector.block_size, tuple) else picked
    name = "getitem" if target is operator.getitem else target._schema.name
    if not vectors:
        return term(name, *_plain((args, tuple(sorted(kwargs.items()))))) if name != "getitem" else term(name, *args)
    first = vectors[0]
    if known.whole_form is not None:
        return _leaf(target, args, kwargs)
    if known.blockwise is not None:
        results = known.blockwise[1]
        first = replace(_blocks(target, args, known.blockwise[0]), parts=1)
        first = replace(first, block_size=results) if len(results) > 1 else _ratio(first, results[0])
    elif len({(v.span, v.own_slice, v.block_size, v.tile, v.parts) for v in vectors}) > 1:
        raise Undefined(f"{target} works on ranges that do not match")

    def term_of(slot: int) -> Term:
        own = fx.node.map_aggregate((args, kwargs), lambda a: a.slots[slot] if isinstance(a, Vec) else a)
        return term(name, *_plain((own[0], tuple(sorted(own[1].items())))))

    if known.meaning == "sum":
        if len(first.slots) != 1 or first.tile is not None:
            raise Undefined(f"{target} sums over several leaves at once, or over a tile")
        (only,) = first.slots
        return PartialTerm(term_of(only), first.own_slice) if first.own_slice else term_of(only)
    if not known.pointwise and known.blockwise is None:
        raise Undefined(f"{target} is not elementwise and works on a flat range")
    return replace(first, slots={slot: term_of(slot) for slot in first.slots})


def _blocks(target: Any, args: Any, wanted: tuple[Per, ...]) -> Vec:
    """The range of an op on blocks: its operands' columns have the ratios it wants, and no block holds padding between
    leaves. Returns the first operand, a column of whole elements."""
    operands = args[: len(wanted)]
    if not all(
        isinstance(v, Vec) and v.block_size == block_size for v, block_size in zip(operands, wanted, strict=True)
    ):
        raise Undefined(f"{target} wants columns with an element for each {wanted}")
    if len({(_ratio(v, ALIGN).span, v.own_slice, v.tile, *v.slots) for v in operands}) > 1:
        raise Undefined(f"{target} works on ranges that do not match")
    if not all(v.tight or v.block_size != 1 for v in operands):
        raise Undefined(f"{target} takes padding into the blocks of a leaf")
    if any((v.parts > 1) != of(target).of_ranks for v in operands):
        raise Undefined(f"{target} works on the blocks of {operands[0].parts} ranks")
    first = operands[0]
    assert isinstance(first, Vec)
    return first


def _leaf(target: Any, args: Any, kwargs: Any) -> Vec:
    """The value of the flat form of an op on whole leaves: the op itself on the one leaf of the range."""
    vector, shape, *rest = args
    if not isinstance(vector, Vec) or len(vector.slots) != 1 or not vector.tight:
        raise Undefined(f"{target} works on one leaf at a time, without padding")
    ((slot, leaf),) = vector.slots.items()
    if slot not in vector.shapes or vector.tile is not None:
        raise Undefined(f"{target} needs a whole leaf, of which a rank boundary leaves each rank a part")
    if vector.shapes[slot] != tuple(shape):
        raise Undefined(f"{target} takes a leaf of shape {vector.shapes[slot]} for one of shape {tuple(shape)}")
    return replace(vector, slots={slot: apply(of(target).whole_form, (leaf, *rest), kwargs)})


def _ratio(vector: Vec, block_size: Per) -> Vec:
    """The same range in a column with one element for each `block_size`: whole blocks."""
    start, stop = vector.span
    stop = stop if block_size == 1 else -(-stop // ALIGN) * ALIGN
    return replace(vector, block_size=block_size, span=(start, stop))


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    fx.node.map_aggregate(value, leaves.append)
    return leaves


def _plain(value: Any) -> tuple[Any, ...]:
    """Arguments in a form whose repr is stable, and the same on every rank: of a device, its type."""

    def plain(a: Any) -> Any:
        return str(a) if isinstance(a, torch.dtype) else a.type if isinstance(a, torch.device) else a

    return fx.node.map_aggregate(value, plain)


def reduced(value: Any, how: str, axis: str, world: int, divisor: int) -> Any:
    """The term of a reduction over so many ranks, the same on every rank; over one rank it is only the division."""
    if world == 1:
        return value if divisor == 1 else apply(aten.div.Tensor, (value, divisor), {})
    return term("reduce", "sum" if how == "mean" else how, axis, world, divisor, value).over(
        _varies(value) - {*parts_of(axis)}
    )


def moved(kind: str, value: Any, axis: str, world: int, how: Any = "sum") -> Any:
    """The term of a transfer of a value that lies in parts: what every rank, or the own part of it, has then.

    Over data axes ranks differ: parts that are exchanged do, and all of them together are the same on every rank."""
    if kind == "all_reduce":
        return reduced(value, how, axis, world, 1)
    done, over = term("moved", kind, axis, world, value), frozenset(parts_of(axis)) & frozenset(DATA)
    return done.over(done.varies - over if kind == "all_gather" else done.varies | over)


def exchanged(value: Any, axis: str, world: int) -> Any:
    """The term of the own slice of every rank's value, in the order of ranks: of each slice one on all ranks."""
    return term("exchanged", axis, world, value).over(_varies(value) - {*parts_of(axis)})


def gathered(value: Any, axis: str) -> Any:
    """The term of own slices brought together: the value that they are of, if that is the same on every rank."""
    varies, over = _varies(value), {*parts_of(axis)}
    return term("gathered", axis, value).over(varies - over) if varies & over else value


def digest(state: Mapping[tuple[str, int | None], Any], metrics: Mapping[str, Any]) -> str:
    """The meaning of a state and its metrics, as text of a term."""
    return str(term(sorted(state.items(), key=str), sorted(metrics.items())))


def metric(value: Any, dtype: torch.dtype, shape: Sequence[int]) -> Term:
    """The term of a metric: its value, in the form in which the user gets it."""
    return term("metric", value, str(dtype), tuple(shape))


def part(value: Any, start: int, stop: int, shape: tuple[int, ...]) -> Term:
    """The term of elements [start, stop) of a contiguous tensor."""
    return term("part", value, start, stop, tuple(shape))


class _Memory:
    """The values of a segment's nodes, and which nodes look at the same memory. `look` and `write` change them;
    `evaluate` sets the values of nodes."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], shared: Mapping[int, int]) -> None:
        self.holders = {node: i for i, node in enumerate(fx_nodes.placeholders(gm.graph))}
        self.values: dict[fx.Node, Any] = dict(zip(self.holders, inputs, strict=False))
        self.written: dict[fx.Node, Any] = {}
        holders = list(self.holders)
        self.root = {holders[i]: holders[first] for i, first in shared.items()}
        self.looking: dict[fx.Node, list[fx.Node]] = {}
        for node, root in self.root.items():
            self.looking.setdefault(root, []).append(node)

    def value(self, node: fx.Node) -> Any:
        """The value of a node. Raises `Undefined` where its memory was written since."""
        value = self.values[node]
        if isinstance(value, Undefined):
            raise value
        return value

    def look(self, node: fx.Node, source: fx.Node) -> None:
        """Records that `node` is a view of `source`, or is `source` after a write."""
        root = self.root[node] = self.root.get(source, source)
        self.looking.setdefault(root, []).append(node)

    def write(self, node: fx.Node, value: Any) -> None:
        """Sets the value of all of `node`. Other nodes in the same memory must not be read any more."""
        root = self.root.get(node, node)
        if root is not node and node not in self.holders:
            raise Undefined(
                f"{node.name} is a view of {root.name}, and is written in place: only a whole tensor may be"
            )
        for other in (root, *self.looking.get(root, ())):
            if other is not node:
                self.values[other] = Undefined(f"{other.name} is read after its memory was written as {node.name}")
        self.values[node] = value
        if node in self.holders:
            self.written[node] = value


def evaluate(
    gm: fx.GraphModule, inputs: Sequence[Any], shared: Mapping[int, int] | None = None
) -> tuple[list[Any], dict[int, Any]]:
    """(the outputs' values, the values left in placeholders that were written to, by position). `shared` maps the
    position of an input that is in the same memory as an earlier one to that one's.

    Raises Undefined for a write into a part of a tensor, and where memory that was written is read as it was before."""
    memory = _Memory(gm, inputs, shared or {})
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        targets = fx_nodes.mutated(node)
        if node.target is aten.copy_.default:
            value = _copied(memory.value(node.args[1]), targets[0], node.args[1])
            memory.write(targets[0], value)
            memory.values[node] = value
            memory.look(node, targets[0])
            continue
        kwargs = {k: v for k, v in node.kwargs.items() if k != "out"}
        args, kwargs = fx.node.map_arg((node.args, kwargs), memory.value)
        if (in_place := of(node.target).in_place) is not None:
            pure, places = in_place
            result = apply(pure, args, kwargs)
            for index, place in enumerate(places):
                memory.write(fx_nodes.operand(node, place), apply(operator.getitem, (result, index), {}))
            continue
        if len(targets) > 1:
            raise Undefined(f"{node.target} writes to several tensors: it has no meaning yet")
        value = apply(node.target, args, kwargs)
        if isinstance(value, Vec):
            _only_scalars(node, targets, memory)
        if targets:
            memory.write(targets[0], value)
        elif fx_nodes.is_view(node):
            memory.look(node, fx_nodes.operand(node))
        memory.values[node] = value
    outs = [memory.value(n) if isinstance(n, fx.Node) else n for n in fx_nodes.outputs(gm.graph)]
    return outs, {memory.holders[n]: v for n, v in memory.written.items()}


def _copied(value: Any, into: fx.Node, source: Any) -> Any:
    """The value of a copy: its source, or a cast of it where the dtypes differ."""
    dtypes = [n.meta["val"].dtype if "val" in n.meta else None for n in (into, source)]
    return value if dtypes[0] is dtypes[1] else apply(aten._to_copy.default, (value,), {"dtype": dtypes[0]})


def _only_scalars(node: fx.Node, targets: Sequence[fx.Node], memory: _Memory) -> None:
    """Beside flat ranges an op takes values of one element alone: a slice has no rows to spread another over."""
    for other in node.all_input_nodes:
        if other not in targets and not isinstance(memory.values[other], Vec) and other.meta["val"].ndim:
            raise Undefined(f"{node.target} takes {other.name}, a whole tensor, beside a flat range")
