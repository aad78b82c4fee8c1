"""sharding_problem: what a chooser is asked (a graph, to be placed on a mesh axis) and what it answers for each op."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from fzero.ir import fx_nodes
from fzero.shard.claims import constrains
from fzero.shard.factors import Call
from fzero.shard.moves import NEVER
from fzero.shard.placements import Placement, Shard, local_shape
from fzero.shard.rules import Strategy

CASTS = {torch.ops.aten._to_copy.default}
Ends = Callable[[fx.Node, Sequence[Placement]], Sequence[Placement]]


@dataclass(frozen=True)
class ShardingProblem:
    """A graph whose values are to be placed on the n ranks of a mesh axis.

    given: of each placeholder, in order. wanted: of each output. leaves: the leaves of the state, with views and casts
    of them (`leaf_values`). names: paths of leaves, for errors. sequence: where sums of values with that many dims, and
    one more, are to lie rather than whole. ends: of a node `fzero::region`, the placements of its outputs from those of
    its inputs; None where the graph has no such node.

    Raises SpecError where n does not divide a dim that is given in parts.
    """

    graph: fx.Graph
    given: Mapping[fx.Node, Placement]
    wanted: Sequence[Placement]
    n: int
    axis: str
    leaves: Collection[fx.Node] = frozenset()
    names: Mapping[fx.Node, str] = field(default_factory=dict)
    sequence: Shard | None = None
    ends: Ends | None = None

    def __post_init__(self) -> None:
        for x, placement in self.given.items():
            local_shape(x.meta["val"].shape, placement, self.n)

    def is_region(self, node: fx.Node) -> bool:
        """Whether a node stands for a graph of its own."""
        return self.ends is not None and node.target is torch.ops.fzero.region.default

    def is_free(self, node: fx.Node) -> bool:
        """Whether a strategy is to be chosen for a call: not where the user places a value (`constrain`), and not
        for one of several results."""
        return node.target is not operator.getitem and not constrains(node, self.axis)

    def calls(self) -> Iterator[fx.Node]:
        """The nodes that compute, in order."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def leaf_of(self, x: fx.Node) -> fx.Node:
        """The leaf that a value is a view or a cast of."""
        while x.op == "call_function":
            x = fx_nodes.operand(x)
        return x

    def name_of(self, x: fx.Node) -> str:
        """The path of the leaf that a value is a view or a cast of; the node's name where none is known."""
        leaf = self.leaf_of(x)
        return self.names.get(leaf, leaf.name)


@dataclass(frozen=True, slots=True)
class ChosenStrategy:
    """What was chosen for one op, and the runner-up, with their costs in bytes that a rank sends (`strategy_cost`).

    A cost is that of the operands, and of the result where an output wants it elsewhere. It is infinite where a leaf
    would move, or a sum would pass that is to be taken first. runner_up: None where the op allows one strategy.
    unknown: nothing is known of the op, so its operands are gathered.
    """

    strategy: Strategy
    cost: float = 0.0
    runner_up: Strategy | None = None
    runner_up_cost: float = NEVER
    unknown: bool = False

    def __str__(self) -> str:
        text = f"{self.strategy}  {self.cost:,.0f} bytes"
        if self.runner_up is None:
            return text
        second = f"{self.runner_up_cost:,.0f} bytes" if self.runner_up_cost < NEVER else "never"
        return f"{text}; next {self.runner_up}  {second}"


Chosen = Mapping[fx.Node, ChosenStrategy]
Chooser = Callable[[ShardingProblem], Chosen]  # a strategy for each call that `is_free`


def leaf_values(graph: fx.Graph, leaves: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The leaves, with the views and casts of one of them alone."""
    found = set(leaves)
    for node in graph.nodes:
        if node.target is operator.getitem or not any(x in found for x in node.all_input_nodes):
            continue
        if (node.target in CASTS or fx_nodes.is_view(node)) and len(Call.of(node).operands) == 1:
            found.add(node)
    return frozenset(found)
