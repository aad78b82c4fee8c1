"""localise: the captured step, whose leaves are whole, becomes the step of one rank of a mesh axis.

Each axis that cuts values by their dims is taken by itself, the outer one first: the step of one rank of `tp` is the
whole step of the next axis. The plan says which dims of leaves lie over the ranks. From there `fzero.shard.propagate`
places every value: in each region, whose transfers become ops of its graph, and in the outer graph, whose transfers are
sums of small values (`fzero::reduce` over the axis), such as the terms of a norm.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fzero._torch_compat import graph_module
from fzero.capture.graph import Graph, Region
from fzero.capture.step_ops import REDUCE, REGION
from fzero.errors import SpecError
from fzero.ir import fx_nodes, segments
from fzero.plan.state_plan import Plan
from fzero.shard import ops
from fzero.shard.join_sums import join_sums
from fzero.shard.moves import Move
from fzero.shard.placements import Placement, Replicated, Shard
from fzero.shard.propagate import OUTPUT, Inner, Sharded, propagate
from fzero.shard.split_bias import split_bias

R = Replicated()
SMALL_BYTES = 1 << 20  # a value of the outer graph that may be summed over the ranks


@dataclass(frozen=True)
class Sharding:
    """How a step lies over the ranks of an axis: the result of `localise`.

    graph: what was captured, with biases apart from products that are sums over ranks: what the local graph is equal
    to. local: the graph of one rank. outer: its outer graph, with its transfers. regions: by index, the same of each
    region. leaves: text of each parameter with its placement and local shape. before: of the axis outside of this one.
    """

    axis: str
    n: int
    graph: Graph
    local: Graph
    outer: Sharded
    regions: tuple[Sharded, ...]
    leaves: tuple[str, ...]
    before: Sharding | None = None

    @property
    def moves(self) -> tuple[Move, ...]:
        """The transfers of one microbatch over the axis, region by region, then those of the update."""
        return (*(move for region in self.regions for move in region.moves), *self.outer.moves)

    def __str__(self) -> str:
        return self._text() if self.before is None else f"{self.before}\n\n{self._text()}"

    def _text(self) -> str:
        rows = [f"leaves over {self.n} ranks of {self.axis}", *(f"  {leaf}" for leaf in self.leaves)]
        parts = [(f"region {i}, each microbatch", one) for i, one in enumerate(self.regions)] + [("update", self.outer)]
        for name, one in parts:
            sent = [move for move in one.moves if move.nbytes]
            total = sum(move.nbytes for move in sent)
            rows.append(f"{name}: {len(sent)} transfers, {total:,.0f} bytes sent by a rank")
            rows += [f"  {move}" for move in sent]
        whole = [text for one in (*self.regions, self.outer) for text in one.replicated]
        return "\n".join([*rows, *(f"computed whole: {text}" for text in whole)])


@dataclass(frozen=True)
class Proposal:
    """How a step is to lie over the ranks of an axis, to be proven: views that transfers went round are still there.

    graph, outer, regions: as in `Sharding`.
    """

    axis: str
    n: int
    graph: Graph
    outer: Sharded
    regions: tuple[Sharded, ...]


def localise(graph: Graph, plan: Plan, axis: str, sequence: bool = False) -> Proposal:
    """How a step lies over the ranks of an axis. graph: of one rank of all axes outside of it.

    sequence: sums lie in parts along dim 1, the sequence, from where they are taken to where they are needed whole.

    Raises SpecError where the update needs all of a leaf that is sharded, and as `propagate` does.
    """
    n = plan.mesh.size(axis)
    whole = _split(graph, plan, axis)
    holders = fx_nodes.placeholders(whole.gm.graph)
    given: list[Placement] = [leaf.layout.on(axis) for leaf in plan.leaves]
    given += [R] * (len(holders) - len(given))
    results = fx_nodes.outputs(whole.gm.graph)
    wanted = [*given[: len(plan.leaves)], *[R] * (len(results) - len(plan.leaves))]
    leaf_nodes = set(holders[: len(plan.leaves)])
    name_of = {node: leaf.path for node, leaf in zip(holders, plan.leaves, strict=False)}
    inside: dict[int, Sharded] = {}

    def within(node: fx.Node, here: list[Placement]) -> Inner:
        index = int(str(node.args[1]))
        inputs: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        names = [name_of.get(x, x.name) for x in inputs]
        made = _region(whole.regions[index], here, [x in leaf_nodes for x in inputs], names, n, axis, sequence)
        inside[index] = made
        values = tuple(x.meta["val"] for x in fx_nodes.outputs(made.gm.graph))
        return Inner(made.outputs, values, reads_rank(made))

    names = [leaf.path for leaf in plan.leaves]
    outer = propagate(whole.gm, given, wanted, n, axis, [x in leaf_nodes for x in holders], within, None, names)
    _check_moves(outer, plan, axis, holders, results)
    _small_sums(outer)
    return Proposal(axis, n, whole, outer, tuple(inside[i] for i in range(len(whole.regions))))


def settled(made: Proposal, plan: Plan) -> Sharding:
    """The proposal without what nothing reads, and the graph of one rank. Changes the proposal's graphs."""
    fx_nodes.drop_dead(made.outer.gm.graph)
    for node in made.outer.gm.graph.nodes:
        node.meta.pop("claim", None)  # of this axis: the next one says its own
    made.outer.gm.recompile()
    regions = tuple(map(_local_region, made.graph.regions, made.regions))
    local = replace(made.graph, gm=made.outer.gm, regions=regions)
    return Sharding(made.axis, made.n, made.graph, local, made.outer, made.regions, _leaves(plan, made.axis))


def unconstrained(graph: Graph, axes: Collection[str]) -> Graph:
    """The graph without `fzero::constrain` of other axes, which says nothing where there is one rank."""

    def idle(node: fx.Node) -> bool:
        return node.target is ops.CONSTRAIN and node.args[1] not in axes and bool(node.args[1] or not axes)

    def without(gm: fx.GraphModule) -> fx.GraphModule:
        if not any(map(idle, gm.graph.nodes)):
            return gm
        gm = graph_module(segments.copied(gm.graph))
        for node in list(gm.graph.nodes):
            if idle(node):
                node.replace_all_uses_with(fx_nodes.operand(node))
                gm.graph.erase_node(node)
        gm.recompile()
        return gm

    regions = tuple(replace(region, gm=without(region.gm)) for region in graph.regions)
    return replace(graph, gm=without(graph.gm), regions=regions)


def _split(graph: Graph, plan: Plan, axis: str) -> Graph:
    """The graph with biases added after products that are sums over ranks, and such products added to one another."""
    leaf_of = dict(zip(fx_nodes.placeholders(graph.gm.graph), plan.leaves, strict=False))
    regions = list(graph.regions)
    for node in graph.gm.graph.nodes:
        if node.target is REGION:
            index, inputs = int(str(node.args[1])), list(node.args[0])
            gm = graph_module(segments.copied(regions[index].gm.graph))
            placed = [leaf_of[x].layout.on(axis) if x in leaf_of else R for x in inputs]
            split_bias(gm, placed)
            join_sums(gm, placed)
            regions[index] = replace(regions[index], gm=segments.merge_equal(gm))
    return replace(graph, regions=tuple(regions))


def _region(
    region: Region,
    here: list[Placement],
    leaves: list[bool],
    names: list[str],
    n: int,
    axis: str,
    sequence: bool,
) -> Sharded:
    """A region as a rank runs it: gradients end where their leaves lie, the loss and what is beside it whole."""
    wanted: list[Placement] = [R] * len(region.values)
    for number, of in enumerate(region.grad_of):
        wanted[1 + number] = here[of]
    return propagate(region.gm, here, wanted, n, axis, leaves, sequence=Shard(1) if sequence else None, names=names)


def reads_rank(made: Sharded) -> bool:
    """Whether the graph of a rank, as it was proposed, reads the rank."""
    return bool(fx_nodes.placeholders(made.gm.graph)[-1].users)


def _local_region(region: Region, made: Sharded) -> Region:
    graph = made.gm.graph
    reads = reads_rank(made)
    fx_nodes.drop_dead(graph)
    for node in graph.nodes:
        node.meta.pop("claim", None)
    if not reads:
        graph.erase_node(fx_nodes.placeholders(graph)[-1])
    made.gm.recompile()
    values = tuple(x.meta["val"] for x in fx_nodes.outputs(graph))
    return replace(region, gm=made.gm, values=values, sliced=(*region.sliced, *([False] * reads)))


def _check_moves(outer: Sharded, plan: Plan, axis: str, holders: list[fx.Node], results: Sequence[Any]) -> None:
    """Raises SpecError for a transfer of the update that is no sum of a small value."""
    name_of = {node.name: leaf.path for node, leaf in zip(holders, plan.leaves, strict=False)}
    end_of = {str(node): leaf for node, leaf in zip(results, plan.leaves, strict=False)}
    for move in outer.moves:
        leaf = end_of.get(move.value)
        if move.nbytes and move.reader == OUTPUT and leaf is not None and isinstance(move.source, Shard):
            dims = ", ".join([*["None"] * move.source.dim, f"{axis!r}"])
            raise SpecError(
                f"the new value of {leaf.path} {list(leaf.shape)} lies in parts along dim {move.source.dim}, as leaves "
                f"that it is computed from, but every rank of {axis!r} is to hold all of it. Cut it as well: "
                f"shard={{{leaf.path!r}: P({dims})}}; or keep those leaves whole: P() before the rule that matches them"
            )
        if move.nbytes and (move.kind != "all_reduce" or move.nbytes > SMALL_BYTES):
            what = name_of.get(move.value, move.value)
            raise SpecError(
                f"the update reads all of {what} {move.line}, of which each rank of {axis!r} holds a part "
                f"({move.why}). Use an optimizer that works element by element, as adamw, or keep the leaf whole: "
                "shard={'<its path>': P()} before the rule that matches it"
            )


def _small_sums(outer: Sharded) -> None:
    """Transfers of the outer graph as `fzero::reduce` over the axis. In place."""
    for node in list(outer.gm.graph.nodes):
        if node.target is ops.ALL_REDUCE:
            x, axis, _, how = node.args
            node.target, node.args = REDUCE, (x, how, axis)
    outer.gm.recompile()


def _leaves(plan: Plan, axis: str) -> tuple[str, ...]:
    """A line for each parameter: what mirrors it lies alike."""
    shown = [leaf for leaf in plan.leaves if leaf.slot is not None and plan.buffers[leaf.buffer].kind == "param"]
    shown = shown or [leaf for leaf in plan.leaves if leaf.slot is not None]
    width = max((len(leaf.path) for leaf in shown), default=0)
    return tuple(
        f"{leaf.path:{width}}  {leaf.layout.on(axis)!s:5} {list(leaf.shape)} -> {list(leaf.local_shape)}"
        for leaf in shown
    )
