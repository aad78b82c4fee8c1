"""moves: what it takes to bring a value from one placement to another: the transfers, their bytes, what is refused.

`transition` is the one place that says which transfer does that, over one axis; `transitions` over all axes of a mesh.
Lowering, the local graph of a model axis and a session's gathers write what these say.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fzero.errors import SpecError
from fzero.ir import fx_nodes
from fzero.ir.records import DTYPE_NAMES
from fzero.ir.wire import kind_bytes
from fzero.shard.factors import Call
from fzero.shard.layouts import AxisCut, Layout
from fzero.shard.placements import Flat, Partial, Placement, Replicated, Shard
from fzero.shard.rules import Unknown, strategies

aten = torch.ops.aten
NEVER = math.inf
VIEWS = {aten.view.default, aten._unsafe_view.default}
PRODUCTS: dict[Any, Sequence[tuple[int, int]]] = {  # (an operand, the dim of the result that it gives, from the end)
    aten.mm.default: ((1, 1), (0, 2)),
    aten.bmm.default: ((1, 1), (0, 2)),
    aten.addmm.default: ((2, 1), (1, 2)),
}


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer, or a part taken. nbytes: what one rank sends. dtype: in which it travels, and is summed. codec:
    of messages that stand for it. value, reader: names of global nodes."""

    kind: str
    value: str
    source: Placement
    target: Placement
    nbytes: float
    phase: str
    reader: str
    line: str
    is_leaf: bool
    dtype: torch.dtype
    codec: str = ""

    @property
    def why(self) -> str:
        """The value, its placements, who reads it and where, in words."""
        return f"{self.phase} {self.value} {self.source} -> {self.target} for {self.reader} {self.line}".rstrip()

    def __str__(self) -> str:
        return f"{self.kind:14} {self.codec or DTYPE_NAMES[self.dtype]:5} {self.nbytes:12,.0f} bytes  {self.why}"


@dataclass(frozen=True, slots=True)
class Transition:
    """One collective over an axis, or over several as one; "own_part" takes a part of what is there, without one."""

    kind: str
    axis: str
    source: Placement
    target: Placement


KINDS: dict[tuple[type, type], str] = {
    (Partial, Replicated): "all_reduce",
    (Partial, Shard): "reduce_scatter",
    (Partial, Flat): "reduce_scatter",
    (Shard, Replicated): "all_gather",
    (Flat, Replicated): "all_gather",
    (Shard, Shard): "all_to_all",
    (Replicated, Shard): "own_part",
    (Replicated, Flat): "own_part",
}


def transition(source: Placement, target: Placement, axis: str) -> tuple[Transition, ...]:
    """The transfers that bring a value from one placement over an axis to another: none, one, or two by way of all of
    it. Raises AssertionError for a target that is a sum which is missing: no transfer makes one.

    >>> [step.kind for step in transition(Partial(), Flat(), "dp")]
    ['reduce_scatter']
    >>> [step.kind for step in transition(Shard(0), Shard(0, groups=3), "tp")]
    ['all_gather', 'own_part']
    """
    if source == target:
        return ()
    assert not isinstance(target, Partial), f"{source} is never brought to {target}"
    if (type(source), type(target)) not in KINDS or (isinstance(target, Shard) and by_way_of_whole(source, target)):
        return transition(source, Replicated(), axis) + transition(Replicated(), target, axis)
    return (Transition(kind_of(source, target), axis, source, target),)


def transitions(source: Layout, target: Layout) -> tuple[Transition, ...]:
    """The transfers that bring a value from one layout to another. First the sums, in the order in which `source` has
    them, each to what `target` keeps of it. Then the other axes of `source`, the inner cut first, ZeRO's slices along
    several axes as one. Along an axis that `target` alone has a part is taken: before the sums where it is an outer
    cut of what they leave, else at the end.

    >>> from fzero.ir.mesh import Mesh
    >>> mesh = Mesh((("dp_out", 2), ("dp", 2)))
    >>> grad, rest = (Layout.over(mesh, "dp.dp_out", p) for p in (Partial(), Flat()))
    >>> [(step.kind, step.axis) for step in transitions(grad, Layout(rest.cuts[:1]))]
    [('reduce_scatter', 'dp'), ('all_reduce', 'dp_out')]
    >>> [(step.kind, step.axis) for step in transitions(rest, Layout())]
    [('all_gather', 'dp.dp_out')]
    """
    named = {cut.axis for cut in source.cuts}
    scattered = [cut.axis for cut in source.partial.cuts if target.on(cut.axis) != Replicated()]
    order = [cut.axis for cut in target.cuts if cut.axis in scattered]
    assert order == scattered, f"{source} is summed in another order than {target} is cut in"
    inner = max((i for i, cut in enumerate(target.cuts) if cut.axis in scattered), default=0)

    def taken(cuts: Sequence[AxisCut]) -> list[Transition]:
        own = [cut for cut in cuts if cut.axis not in named and cut.n > 1]
        return [step for cut in own for step in transition(Replicated(), cut.placement, cut.axis)]

    steps = taken(target.cuts[:inner])
    others = [cut for cut in reversed(source.cuts) if not isinstance(cut.placement, Partial)]
    for cut in (*source.partial.cuts, *others):
        for step in transition(cut.placement, target.on(cut.axis), cut.axis) if cut.n > 1 else ():
            if steps and (step.source, step.target) == (steps[-1].source, steps[-1].target) == (Flat(), Replicated()):
                step = replace(step, axis=f"{step.axis}.{steps.pop().axis}")
            steps.append(step)
    return (*steps, *taken(target.cuts[inner:]))


def kind_of(source: Placement, want: Placement) -> str:
    """The transfer from one placement to another, where it is one; "" where they are equal."""
    return "" if source == want else KINDS[type(source), type(want)]


def by_way_of_whole(source: Placement, want: Shard) -> bool:
    """Whether no one transfer does it: a maximum has no reduce_scatter, and parts of one dim are not cut anew."""
    if isinstance(source, Partial):
        return source.how != "sum"
    return isinstance(source, Shard) and source.dim == want.dim


def wire_bytes(source: Placement, want: Placement, value: torch.Tensor, n: int) -> float:
    """What one rank sends to bring a global value from a placement to another; infinite where there is no way."""
    if isinstance(want, Partial):
        return 0.0 if source == want else NEVER
    if isinstance(want, Shard) and source != want and by_way_of_whole(source, want):
        return wire_bytes(source, Replicated(), value, n)
    kind = kind_of(source, want)
    return kind_bytes(kind, value.nbytes // n if kind == "all_to_all" else value.nbytes, n)


def check_heads(x: fx.Node, source: Shard, reader: fx.Node, move: Move, n: int, axis: str, leaf: str) -> None:
    """Raises SpecError where a view takes a sharded dim apart into heads of which the ranks would cut some through.

    Fewer heads than ranks are brought together instead, as keys of grouped attention are. leaf: its path,
    whose rule cuts the dim.
    """
    before, after = x.meta["val"].shape, reader.meta["val"].shape
    outer = math.prod(before[: source.dim])
    rest = next((after[d:] for d in range(len(after)) if math.prod(after[:d]) >= outer), ())
    sizes = [size for size in rest if size > 1]
    heads = next(iter(sizes[sizes[:1] == [source.groups] :]), 1)  # q, k and v before the heads of each
    if heads < before[source.dim] and before[source.dim] % heads == 0 and heads % n and n % heads:
        fits = [k for k in range(2, heads + 1) if heads % k == 0 and before[source.dim] % k == 0]
        some = ", ".join(map(str, fits)) or "1"
        raise SpecError(
            f"{move.line}: a dim of {before[source.dim]:,} lies in parts over {n} ranks of {axis!r}, as {leaf} does, "
            f"and becomes {heads} heads: {n} ranks would cut some through, and {move.nbytes:,.0f} bytes be gathered. "
            f"Take as many ranks as divide the heads ({some}), or keep the leaves of that product whole: P() before "
            "their rule"
        )


def cutting_leaf(
    x: fx.Node, source: Shard, have: Mapping[fx.Node, Mapping[Placement, object]], leaves: Set[fx.Node], n: int
) -> fx.Node | None:
    """The leaf along whose cut dim a value lies in parts, through views and elementwise work, which carry the dim; None
    where it is another dim, such as the tokens of a batch.

    have: the placements of values. leaves: those that a rule cuts, and views and casts of them.
    """
    todo, seen = [(x, source)], {(x, source)}
    while todo:
        y, place = todo.pop()
        for position, dim_from_end in PRODUCTS.get(y.target, ()):
            operand = y.args[position]
            own = place.dim == y.meta["val"].ndim - dim_from_end and isinstance(operand, fx.Node) and operand in leaves
            if own and Replicated() not in have[operand]:  # type: ignore[index]
                return operand  # type: ignore[return-value]
        if fx_nodes.is_view(y) or torch.Tag.pointwise in getattr(y.target, "tags", ()):
            before = {(a, p) for a, p in _carried(y, place, n) if p in have.get(a, ())} - seen
            todo += sorted(before, key=str)
            seen |= before
    return None


def _carried(y: fx.Node, place: Shard, n: int) -> Iterator[tuple[fx.Node, Shard]]:
    """The operands from whose parts a node makes its value in such parts, each with its parts."""
    if y.target is operator.getitem:
        return
    try:
        found = strategies(y, n, sorted({1, place.groups}))
    except Unknown:
        return
    for strategy in found:
        if strategy.outputs[:1] == (place,):
            pairs = zip(Call.of(y).operands, strategy.inputs, strict=True)
            yield from ((a, p) for a, p in pairs if isinstance(p, Shard))
