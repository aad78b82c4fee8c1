"""localise: the captured step, whose leaves are whole, becomes the step of one rank of a mesh axis.

Each axis that cuts values by their dims is taken by itself, the outer one first: the step of one rank of `tp` is the
whole step of the next axis. The plan says which dims of leaves lie over the ranks. From there `fzero.shard.propagate`
places every value: in each region, whose transfers become ops of its graph, and in the outer graph, whose transfers are
sums of small values (`fzero::reduce` over the axis), such as the terms of a norm.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fzero._torch_compat import graph_module
from fzero.capture.graph import Graph, Region
from fzero.capture.step_ops import REDUCE, REGION
from fzero.errors import SpecError
from fzero.ir import fx_nodes, segments
from fzero.plan.state_plan import Plan
from fzero.shard import ops
from fzero.shard.choose_strategies import cheapest
from fzero.shard.join_sums import join_sums
from fzero.shard.moves import Move
from fzero.shard.placements import Placement, Replicated, Shard
from fzero.shard.propagate import propagate
from fzero.shard.sharding_problem import Chooser
from fzero.shard.split_bias import split_bias
from fzero.shard.versions import OUTPUT
from fzero.shard.write_local_graph import Inner, Sharded

R = Replicated()
_AS_SUMS = {  # what is a sum over ranks if it is written so
    "aten.all.default": "(~x).sum() == 0 for x.all()",
    "aten.min.default": "-(-x).amax() for x.min()",
    "aten.count_nonzero.default": "(x != 0).sum() for the count",
}
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

    def coded(self, codec: str, sent: Mapping[tuple[str, str], float]) -> Sharding:
        """With what sums send as messages of a codec, by axis and reason (`fzero.shard.coded_sums`)."""

        def told(move: Move) -> Move:
            nbytes = sent.get((self.axis, move.why))
            return move if nbytes is None else replace(move, nbytes=nbytes, codec=codec)

        regions = tuple(replace(region, moves=tuple(map(told, region.moves))) for region in self.regions)
        return replace(self, regions=regions, before=None if self.before is None else self.before.coded(codec, sent))

    def __str__(self) -> str:
        return self._text() if self.before is None else f"{self.before}\n\n{self._text()}"

    def strategies(self) -> str:
        """A line for each op of the step: its strategy and the runner-up, with their costs in bytes that a rank sends.

        The data is `chosen` of each of `regions` and of `outer`, by the ops of `graph`.
        """
        rows = [f"strategies over {self.n} ranks of {self.axis}"]
        for name, one in self._parts:
            width = max((len(x.name) for x in one.chosen), default=0)
            rows += [name, *(f"  {x.name:{width}}  {choice}  {x.meta.get('source', '')}".rstrip()
                             for x, choice in one.chosen.items())]  # fmt: skip
        text = "\n".join(rows)
        return text if self.before is None else f"{self.before.strategies()}\n\n{text}"

    @property
    def _parts(self) -> list[tuple[str, Sharded]]:
        return [*((f"region {i}, each microbatch", one) for i, one in enumerate(self.regions)), ("update", self.outer)]

    def _text(self) -> str:
        rows = [f"leaves over {self.n} ranks of {self.axis}", *(f"  {leaf}" for leaf in self.leaves)]
        for name, one in self._parts:
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


def localise(graph: Graph, plan: Plan, axis: str, sequence: bool = False, choose: Chooser = cheapest) -> Proposal:
    """How a step lies over the ranks of an axis. graph: of one rank of all axes outside of it.

    sequence: sums lie in parts along dim 1, the sequence, from where they are taken to where they are needed whole.
    choose: a strategy for each op.

    Raises SpecError where the update needs all of a leaf that is sharded, and as `propagate` does.
    """
    n = plan.mesh.size(axis)
    whole = _split(graph, plan, axis)
    holders = fx_nodes.placeholders(whole.gm.graph)
    given: list[Placement] = [leaf.layout.on(axis) for leaf in plan.leaves]
    given += [R] * (len(holders) - len(given))
    results = fx_nodes.outputs(whole.gm.graph)
    wanted = [*given[: len(plan.leaves)], *[R] * (len(results) - len(plan.leaves))]
    regions = _Regions(whole, plan, axis, sequence, choose)
    leaves, names = [x in regions.paths for x in holders], [leaf.path for leaf in plan.leaves]
    outer = propagate(whole.gm, given, wanted, n, axis, leaves, regions, None, names, choose)
    _check_moves(outer, whole, plan)
    _small_sums(outer)
    return Proposal(axis, n, whole, outer, tuple(regions.written[i] for i in range(len(whole.regions))))


class _Regions:
    """The regions of a step as a rank runs them, written as the outer graph comes to them. paths: of the leaves."""

    def __init__(self, whole: Graph, plan: Plan, axis: str, sequence: bool, choose: Chooser) -> None:
        self.regions, self.n, self.axis, self.choose = whole.regions, plan.mesh.size(axis), axis, choose
        self.sequence = Shard(1) if sequence else None
        holders = fx_nodes.placeholders(whole.gm.graph)
        self.paths = {node: leaf.path for node, leaf in zip(holders, plan.leaves, strict=False)}
        self.written: dict[int, Sharded] = {}

    def ends(self, node: fx.Node, inputs: Sequence[Placement]) -> list[Placement]:
        """Gradients end where their leaves lie, the loss and what is beside it whole."""
        region = self.regions[_number(node)]
        placed: list[Placement] = [R] * len(region.values)
        for number, of in enumerate(region.grad_of):
            placed[1 + number] = inputs[of]
        return placed

    def write(self, node: fx.Node, inputs: Sequence[Placement]) -> Inner:
        """Writes a region."""
        read: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        leaves, names = [x in self.paths for x in read], [self.paths.get(x, x.name) for x in read]
        made = self.written[_number(node)] = propagate(
            self.regions[_number(node)].gm, inputs, self.ends(node, inputs), self.n, self.axis, leaves, None,
            self.sequence, names, self.choose,
        )  # fmt: skip
        return Inner(tuple(x.meta["val"] for x in fx_nodes.outputs(made.gm.graph)), reads_rank(made))


def _number(node: fx.Node) -> int:
    """Which region a node stands for."""
    return int(str(node.args[1]))


def settled(made: Proposal, plan: Plan) -> Sharding:
    """The proposal without what nothing reads, and the graph of one rank. Changes the proposal's graphs."""
    fx_nodes.drop_dead(made.outer.gm.graph)
    for node in made.outer.gm.graph.nodes:
        node.meta.pop("claim", None)  # of this axis: the next one says its own
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
        return gm

    return graph.rewritten(without, update=True)


def _split(graph: Graph, plan: Plan, axis: str) -> Graph:
    """The graph with biases added after products that are sums over ranks, and such products added to one another."""
    leaf_of = dict(zip(fx_nodes.placeholders(graph.gm.graph), plan.leaves, strict=False))
    regions = list(graph.regions)
    for node in graph.gm.graph.nodes:
        if node.target is REGION:
            index, inputs = _number(node), list(node.args[0])
            gm = graph_module(segments.copied(regions[index].gm.graph))
            placed = [leaf_of[x].layout.on(axis) if x in leaf_of else R for x in inputs]
            split_bias(gm, placed)
            join_sums(gm, placed)
            regions[index] = replace(regions[index], gm=segments.merge_equal(gm))
    return replace(graph, regions=tuple(regions))


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
    values = tuple(x.meta["val"] for x in fx_nodes.outputs(graph))
    return replace(region, gm=made.gm, values=values, sliced=(*region.sliced, *([False] * reads)))


def _check_moves(outer: Sharded, whole: Graph, plan: Plan) -> None:
    """Raises SpecError for a transfer of the update that is no sum of a small value."""
    axis, nodes = outer.axis, {node.name: node for node in whole.gm.graph.nodes}
    leaf_of = dict(zip(fx_nodes.placeholders(whole.gm.graph), plan.leaves, strict=False))
    results = fx_nodes.outputs(whole.gm.graph)
    end_of = {str(node): leaf for node, leaf in zip(results, plan.leaves, strict=False)}
    for move in outer.moves:
        leaf = end_of.get(move.value)
        if move.nbytes and move.reader == OUTPUT and leaf is not None and isinstance(move.source, Shard):
            dims = ", ".join([*["None"] * move.source.dim, f"{axis!r}"])
            cut = f"Cut it as well: shard={{{leaf.path!r}: P({dims})}}; or keep"
            if not plan.buffers[leaf.buffer].dtype.is_floating_point:
                cut = "No rule cuts a leaf of integers: give it as floating numbers and cut it as well, or keep"
            raise SpecError(
                f"the new value of {leaf.path} {list(leaf.shape)} lies in parts along dim {move.source.dim}, as leaves "
                f"that it is computed from, but every rank of {axis!r} is to hold all of it. {cut} those leaves whole: "
                "P() before the rule that matches them"
            )
        if move.nbytes and (move.kind != "all_reduce" or move.nbytes > SMALL_BYTES):
            value = nodes[move.value]
            cut_leaves = [leaf_of[x] for x in _holders_behind(value, whole) if x in leaf_of]
            cut_leaves = [leaf for leaf in cut_leaves if isinstance(leaf.layout.on(axis), Shard)]
            params = [leaf.path for leaf in cut_leaves if plan.buffers[leaf.buffer].kind == "param"]
            paths = params or [leaf.path for leaf in cut_leaves]
            which = ", ".join([f"{path!r}: P()" for path in paths[:3]] + ["..."] * (len(paths) > 3))
            what = leaf_of[value].path if value in leaf_of else f"{move.value}, computed from {', '.join(paths[:3])},"
            as_sums = _AS_SUMS.get(str(nodes[move.reader].target), "") if move.reader in nodes else ""
            written = f"Write {as_sums}, use" if as_sums else "Use"
            raise SpecError(
                f"the update reads all of {what} {move.line}, of which each rank of {axis!r} holds a part "
                f"({move.why}). {written} an optimizer that works element by element, as adamw, or replicate "
                f"{'this leaf' if len(paths) == 1 else 'these leaves'}: shard={{{which}}} before the rules that match"
            )


def _holders_behind(value: fx.Node, whole: Graph) -> list[fx.Node]:
    """The inputs of the outer graph that a value is computed from, in order; of a gradient its leaf alone."""
    left, seen = [value], {value}
    while left:
        node = left.pop()
        region = node.args[0] if node.target is operator.getitem else None
        behind = node.all_input_nodes
        if isinstance(region, fx.Node) and region.target is REGION:
            number, grad_of = int(str(node.args[1])), whole.regions[_number(region)].grad_of
            if 1 <= number <= len(grad_of):
                inputs: list[fx.Node] = list(region.args[0])  # type: ignore[arg-type]
                behind = [inputs[grad_of[number - 1]]]
        left += [x for x in behind if x not in seen]
        seen.update(behind)
    return [x for x in fx_nodes.placeholders(whole.gm.graph) if x in seen]


def _small_sums(outer: Sharded) -> None:
    """Transfers of the outer graph as `fzero::reduce` over the axis. In place."""
    for node in list(outer.gm.graph.nodes):
        if node.target is ops.ALL_REDUCE:
            x, axis, _, how = node.args
            node.target, node.args = REDUCE, (x, how, axis)


def _leaves(plan: Plan, axis: str) -> tuple[str, ...]:
    """A line for each parameter: what mirrors it lies alike."""
    shown = [leaf for leaf in plan.leaves if leaf.slot is not None and plan.buffers[leaf.buffer].kind == "param"]
    shown = shown or [leaf for leaf in plan.leaves if leaf.slot is not None]
    width = max((len(leaf.path) for leaf in shown), default=0)
    return tuple(
        f"{leaf.path:{width}}  {leaf.layout.on(axis)!s:5} {list(leaf.shape)} -> {list(leaf.local_shape)}"
        for leaf in shown
    )
