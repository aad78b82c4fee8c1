"""write_local_graph: given a strategy for each op of a graph, the graph that each rank of the axis runs. Nothing is
chosen here: an operand is moved where it does not lie yet as the strategy takes it (`Versions`), by an op of
`fzero.shard.ops`, at its first reader.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import fx

from fzero._torch_compat import graph_module
from fzero.errors import FzeroError
from fzero.ir import fx_nodes
from fzero.shard import ops
from fzero.shard.claims import Claim, claim, constraint
from fzero.shard.local_graph import LocalGraph
from fzero.shard.moves import Move
from fzero.shard.placements import Placement, Replicated
from fzero.shard.rules import Strategy, localised
from fzero.shard.sharding_problem import Chosen, ChosenStrategy, ShardingProblem
from fzero.shard.versions import Step, Versions, result_index

R = Replicated()


@dataclass(frozen=True)
class Sharded:
    """A graph as each of n ranks of a mesh axis runs it.

    gm: the placeholders are the global graph's, in local shapes, then the rank on the axis (0-d int64). Views that a
    transfer went round are still there. inputs, outputs: the placements of the placeholders but the last, and of the
    outputs. moves: in order. replicated: what was computed whole because nothing is known of the op. chosen: of each
    op of the global graph its strategy, the runner-up and their costs.
    """

    gm: fx.GraphModule
    n: int
    axis: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    moves: tuple[Move, ...]
    replicated: tuple[str, ...]
    chosen: Mapping[fx.Node, ChosenStrategy] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> float:
        """What one rank sends."""
        return sum(move.nbytes for move in self.moves)


@dataclass(frozen=True)
class Inner:
    """A graph within a graph, as a rank runs it: the values of its outputs. reads_rank: it takes the rank on the axis
    as one more input."""

    values: tuple[torch.Tensor, ...]
    reads_rank: bool


class Regions(Protocol):
    """The graphs that nodes `fzero::region` of a graph stand for. inputs: how those of the node lie."""

    def ends(self, node: fx.Node, inputs: Sequence[Placement]) -> Sequence[Placement]:
        """How its outputs lie."""

    def write(self, node: fx.Node, inputs: Sequence[Placement]) -> Inner:
        """Writes what is inside, as a rank runs it."""


def write(problem: ShardingProblem, chosen: Chosen, regions: Regions | None = None) -> Sharded:
    """The graph of one rank, in which each op is computed under the strategy chosen for it.

    chosen: for each call of which `problem.is_free`. regions: where `problem.ends` is given.

    Raises SpecError where n does not divide a dim, and FzeroError for an op without a strategy and for a strategy that
    takes addends of a value that has none. That a strategy is one of the op's is judged by `fzero.verify.sharding`.
    """
    local, graph = LocalGraph(problem.n, problem.axis), problem.graph
    nodes = {(x, p): local.placeholder(x, p) for x, p in problem.given.items()}
    device = next((x.meta["val"].device for x in problem.given), torch.device("cpu"))
    if regions is None:
        local.rank = local.graph.placeholder(f"rank_{problem.axis}")
    else:
        local.rank = local.graph.call_function(torch.ops.fzero.axis_index.default, (problem.axis, device))
    local.rank.meta["val"] = local.fake(lambda: torch.zeros((), dtype=torch.int64, device=device))
    writer = _Writer(problem, local, regions, Versions(problem), nodes)
    ends = [*zip(fx_nodes.outputs(graph), problem.wanted, strict=True)]
    alone = {x: want for x, want in ends if isinstance(x, fx.Node) and [u.op for u in x.users] == ["output"]}
    for node in problem.calls():
        strategy = None
        if problem.is_free(node):
            if node not in chosen:
                raise FzeroError(f"{node} {node.meta.get('source', '')}: a chooser gave no strategy for this op")
            strategy = chosen[node].strategy
        writer.write(node, strategy)
        if node in alone:  # at once, not behind all else: what reduces a gradient waits for it
            writer.at(node, alone[node])
    local.graph.output([writer.at(x, want) if isinstance(x, fx.Node) else x for x, want in ends])
    unknown = [x for x in problem.calls() if x in chosen and chosen[x].unknown]
    return Sharded(
        graph_module(local.graph), problem.n, problem.axis, tuple(problem.given.values()), tuple(problem.wanted),
        tuple(local.moves), tuple(f"{x.target} {x.meta.get('source', '')}".rstrip() for x in unknown), dict(chosen),
    )  # fmt: skip


@dataclass
class _Writer:
    """nodes: the local node of a value under a placement. results: of each call what it gave, and its local operands.
    Only its methods write the fields."""

    problem: ShardingProblem
    local: LocalGraph
    regions: Regions | None
    versions: Versions
    nodes: dict[tuple[fx.Node, Placement], fx.Node]
    results: dict[fx.Node, tuple[fx.Node | list[fx.Node], Strategy, tuple[fx.Node, ...]]] = field(default_factory=dict)

    def write(self, node: fx.Node, strategy: Strategy | None) -> None:
        """Writes one op: its operands where the strategy takes them, the local call, the placement of its result."""
        made: fx.Node | list[fx.Node]
        if strategy is not None and self.problem.is_region(node):
            made = self._region(node, strategy)
        else:
            self.local.phase = node.meta.get("phase")
            made = self._getitem(node) if node.target is operator.getitem else self._call(node, strategy)
        self.versions.made(node, strategy)
        if isinstance(made, fx.Node) and isinstance(node.meta["val"], torch.Tensor):
            self.nodes[node, next(iter(self.versions.have[node]))] = made

    def at(self, x: fx.Node, want: Placement, reader: fx.Node | None = None) -> fx.Node:
        """The local node of a global value under a placement; moved once, for all who want it."""
        for step in self.versions.bring(x, want, reader):
            self.nodes[step.value, step.placement] = self._brought(step)
        return self.nodes[x, want]

    def _brought(self, step: Step) -> fx.Node:
        x, way = step.value, step.way
        if way is None:
            return self.local.addend(self.nodes[x, R], x)
        if isinstance(way, Move):
            return self.local.move(self.nodes[x, way.source], way, x)
        made = self._computed(x, way, [self.nodes[pair] for pair in self.versions.reads(x, way)])
        assert isinstance(made, fx.Node)
        return made

    def _computed(self, x: fx.Node, strategy: Strategy, given: Sequence[fx.Node]) -> fx.Node | list[fx.Node]:
        """The local call of a node: its result, or the results of a form that has several."""
        order = iter(given)
        whole = all(isinstance(p, Replicated) for p in (*strategy.inputs, *strategy.outputs))
        args, kwargs = (x.args, x.kwargs) if whole else localised(x, strategy, self.problem.n)
        tensors = set(self.versions.operands(x))
        args, kwargs = fx.node.map_arg((args, kwargs), lambda a: next(order) if a in tensors else a)
        if strategy.local:
            made = self.local.form(x, strategy, args, kwargs)
        else:
            made = self.local.node(x.target, args, kwargs, x)
        if isinstance(made, fx.Node):
            kind = "form" if strategy.local else "call"
            claim(made, Claim(kind, x.name, strategy.outputs, tuple(given), strategy.local))
        return made

    def _call(self, node: fx.Node, strategy: Strategy | None) -> fx.Node | list[fx.Node]:
        """A call under a strategy; without one, a value that the user places."""
        given = [self.at(x, want, node) for x, want in self.versions.reads(node, strategy)]
        if strategy is None:
            made = self.local.node(torch.ops.aten.alias.default, tuple(given), {}, node)
            return claim(made, Claim("call", node.name, (constraint(node),)))
        if node.target in ops.TRANSFERS:
            given = [self.local.in_memory(x, node) for x in given]
        results = self._computed(node, strategy, given)
        self.results[node] = results, strategy, tuple(given)
        return results

    def _region(self, node: fx.Node, strategy: Strategy) -> fx.Node:
        """A node that stands for a graph of its own."""
        assert self.regions is not None
        given = [self.at(x, want, node) for x, want in self.versions.reads(node, strategy)]
        inner = self.regions.write(node, strategy.inputs)
        args = ([*given, self.local.rank] if inner.reads_rank else given, *node.args[1:])
        made = self.local.graph.call_function(torch.ops.fzero.region.default, args)
        made.meta = {**node.meta, "val": list(inner.values)}
        claim(made, Claim("region", node.name, strategy.outputs))
        self.results[node] = made, strategy, tuple(given)
        return made

    def _getitem(self, node: fx.Node) -> fx.Node:
        """One of the results of a call."""
        index, position = int(str(node.args[1])), result_index(node)
        made, strategy, given = self.results[fx_nodes.operand(node)]
        if not isinstance(made, list):
            return self.local.node(operator.getitem, (made, index), {}, node)
        return claim(made[index], Claim("form", node.name, strategy.outputs, given, strategy.local, position))
