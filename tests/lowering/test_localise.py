"""What is said of how a step lies over the ranks of an axis: the strategies that were chosen, as data and as text."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero import P, optim
from fzero.ir import fx_nodes
from fzero.lowering.localise import Sharding
from fzero.shard.moves import NEVER
from fzero.shard.placements import Partial, Replicated, Shard
from fzero.shard.rules import Strategy
from fzero.shard.strategy_cost import TRANSFER


@cache
def sharding(*axes: str) -> Sharding:
    """An MLP of two products, the first cut by columns and the second by rows, on a batch of 8 by 64."""

    def loss(p: Any, x: Tensor) -> Tensor:
        return (x + (x @ p["up"]).relu() @ p["down"]).square().mean()

    params = {"up": torch.empty(64, 256, device="meta"), "down": torch.empty(256, 64, device="meta")}
    rules = {"up": P(None, axes), "down": P(axes, None)}
    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), mesh=dict.fromkeys(axes, 2), shard=rules)
    found = fzero.lower(spec, params, torch.empty(8, 64, device="meta")).sharding
    assert found is not None
    return found


def test_each_op_has_its_strategy_and_the_runner_up() -> None:
    """As data, by the nodes of the graph that was captured."""
    made = sharding("tp")
    (region,) = made.regions
    nodes = {node.name: node for node in made.graph.regions[0].gm.graph.nodes if fx_nodes.is_compute(node)}
    assert {node.name for node in region.chosen} == set(nodes)
    first, last, total = (region.chosen[nodes[name]] for name in ("mm", "mm_1", "add"))
    whole, columns, rows = Replicated(), Shard(1), Shard(0)
    assert first.strategy == Strategy((whole, columns), (columns,))
    assert (first.cost, first.runner_up, first.runner_up_cost) == (0.0, Strategy((rows, whole), (rows,)), NEVER)
    assert last.strategy == Strategy((columns, rows), (Partial(),))
    assert total.strategy == Strategy((whole, whole), (whole,))
    value = 8 * 64 * 4
    assert total.cost == value + TRANSFER, "an all-reduce sends two halves"
    assert total.runner_up == Strategy((rows, rows), (rows,))
    assert total.runner_up_cost == value + 3 * value / 2, "a part that nobody asked for, and a scatter"
    assert sum(move.nbytes for move in region.moves if move.reader == "add") == value


def test_it_is_printed_on_request() -> None:
    made = sharding("tp")
    lines = made.strategies().splitlines()
    assert lines[:2] == ["strategies over 2 ranks of tp", "region 0, each microbatch"]
    ops = [line.split()[0] for line in lines[2 : lines.index("update")]]
    assert ops == [node.name for node in made.regions[0].chosen]
    (row,) = (line for line in lines if line.split()[0] == "add" and "2,048" in line)
    text = " ".join(row.split("test_localise")[0].split())
    assert text == "add R, R -> R 2,048 bytes; next S0, S0 -> S0 5,120 bytes"
    assert "next" not in str(made), "the list of transfers is as it was"


def test_of_two_axes_each_is_told() -> None:
    text = sharding("tp", "mp").strategies()
    assert [line for line in text.splitlines() if line.startswith("strategies")] == [
        "strategies over 2 ranks of tp",
        "strategies over 2 ranks of mp",
    ]


def test_a_ranks_graph_holds_nothing_that_nobody_reads() -> None:
    """Claims are for the judge alone, and what was proposed and not taken is gone."""
    for region in sharding("tp").local.regions:
        nodes = [node for node in region.gm.graph.nodes if node.op == "call_function"]
        assert all(node.users for node in nodes)
        assert not any("claim" in node.meta for node in region.gm.graph.nodes)
