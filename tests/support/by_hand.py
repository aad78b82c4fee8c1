"""by_hand: small graphs written op by op, and what it takes to place their values on an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fzero.ir import fx_nodes
from fzero.shard.placements import Placement
from fzero.shard.sharding_problem import ShardingProblem, leaf_values

aten = torch.ops.aten


class Draft:
    """A graph being written; its values lie on the meta device."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        given, named = fx.node.map_arg((args, kwargs), lambda x: x.meta["val"])
        node.meta["val"] = op(*given, **named)
        return node

    def returning(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(torch.nn.Module(), self.graph)


def problem_of(
    gm: fx.GraphModule, given: Sequence[Placement], wanted: Sequence[Placement], n: int = 2,
    leaves: Sequence[int] = (), **more: Any,
) -> ShardingProblem:  # fmt: skip
    """The problem of placing a graph. leaves: numbers of the placeholders that are leaves."""
    holders = fx_nodes.placeholders(gm.graph)
    own = leaf_values(gm.graph, {holders[i] for i in leaves})
    return ShardingProblem(gm.graph, dict(zip(holders, given, strict=True)), wanted, n, "tp", own, **more)


def feed(gm: fx.GraphModule, seed: int = 0) -> list[Tensor]:
    """Whole numbers for the inputs, whose sums and products are exact."""
    g = torch.Generator().manual_seed(seed)
    like = [x.meta["val"] for x in fx_nodes.placeholders(gm.graph)]
    return [torch.randint(-2, 3, tuple(x.shape), generator=g).to(x.dtype) for x in like]
