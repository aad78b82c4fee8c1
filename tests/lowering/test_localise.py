"""The step of one rank of an axis that cuts dims: it computes what one rank alone does; and what is said of it: the
strategies that were chosen, as data and as text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from naive_steps import stepped, written
from torch import Tensor

import fzero
from fzero import P, optim
from fzero.errors import SpecError
from fzero.ir import fx_nodes
from fzero.lowering.localise import Sharding, unconstrained
from fzero.shard import ops
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


def test_products_that_are_sums_over_ranks_are_added_before_they_are_summed() -> None:
    """Of two that are added to a residual one sum is taken."""

    def loss(p: Any, x: Tensor) -> Tensor:
        return (x + x[:, :32] @ p["a"] + x[:, 32:] @ p["b"]).square().mean()

    params = {name: torch.empty(32, 64, device="meta") for name in "ab"}
    rules = {name: P("tp", None) for name in "ab"}
    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), mesh={"tp": 2}, shard=rules)
    found = fzero.lower(spec, params, torch.empty(8, 64, device="meta")).sharding
    assert found is not None
    assert "region 0, each microbatch: 1 transfers" in str(found)


# --- what it computes -------------------------------------------------------------------------------------------------


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 2


PARAMS = {
    "up": {"w": drawn(16, 8, seed=1), "b": drawn(16, seed=2)},
    "down": {"w": drawn(8, 16, seed=3), "b": drawn(8, seed=4)},
    "norm": drawn(8, seed=5),
}  # fmt: skip
RULES = {"up/w": P("tp", None), "up/b": P("tp"), "down/w": P(None, "tp")}
CLIPPED: dict[str, Any] = {"optimizer": optim.adamw(0.1), "clip_norm": 0.01}


def mlp(p: Any, x: Tensor) -> Tensor:
    """A bias after a product that is a sum over ranks, and two such products that are added."""
    inner = F.layer_norm(x, (8,), p["norm"])
    hidden = torch.relu(F.linear(inner, p["up"]["w"], p["up"]["b"]))
    return (
        (x + F.linear(hidden, p["down"]["w"], p["down"]["b"]) + F.linear(hidden.sin(), p["down"]["w"])).square().mean()
    )


def rows(rank: int, step: int) -> Tensor:
    return drawn(4, 6, 8, seed=100 + 10 * step + rank)


@pytest.mark.parametrize(
    ("mesh", "given"),
    [
        ({"tp": 2}, {}), ({"dp": 2, "tp": 2}, {"zero": 3, "microbatches": 2}), ({"dp": 2, "tp": 4}, {"zero": 1}),
        ({"tp": 2}, {"sequence": "tp"}), ({"tp": 4}, {"sequence": "tp", "microbatches": 2}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled(2)
def test_ranks_compute_what_one_computes(mesh: dict[str, int], given: dict[str, Any]) -> None:
    data = mesh.get("dp", 1)
    spec = {"loss": mlp, **CLIPPED, **given}
    found = stepped(fzero.Spec(**spec, mesh=mesh, shard=RULES), PARAMS, rows, world=data * mesh["tp"], steps=2)
    spec.pop("sequence", None)
    wanted = stepped(fzero.Spec(**spec, mesh={"dp": data}), PARAMS, rows, world=data, steps=2)
    for path, value in wanted.leaves.items():
        torch.testing.assert_close(found.leaves[path], value, rtol=1e-4, atol=1e-5)
    for metrics in found.metrics:
        torch.testing.assert_close(metrics["loss"], wanted.metrics[0]["loss"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(metrics["grad_norm"], wanted.metrics[0]["grad_norm"], rtol=1e-5, atol=1e-6)


def test_with_a_sequence_axis_sums_lie_in_parts_of_tokens() -> None:
    rules = {"up": P(None, "tp"), "down": P("tp", None)}
    params = {"up": torch.empty(8, 16, device="meta"), "down": torch.empty(16, 8, device="meta")}

    def loss(p: Any, x: Tensor) -> Tensor:
        return (x + (x @ p["up"]).relu() @ p["down"]).square().mean()

    def sums(sequence: str | None) -> list[tuple[Any, Any]]:
        spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), mesh={"tp": 2}, shard=rules, sequence=sequence)
        found = fzero.lower(spec, params, torch.empty(2, 4, 8, device="meta")).sharding
        assert found is not None
        return [(m.source, m.target) for m in found.moves if m.source == Partial() and m.nbytes > 4]

    assert sums("tp") == [(Partial(), Shard(1))]
    assert sums(None) == [(Partial(), Replicated())]


def test_two_axes_compute_what_one_rank_computes() -> None:
    rules = {"up/w": P("tp", "mp"), "up/b": P("tp"), "down/w": P("mp", "tp")}
    spec = {"loss": mlp, **CLIPPED}
    found = stepped(fzero.Spec(**spec, mesh={"tp": 2, "mp": 2}, shard=rules), PARAMS, rows, world=4)
    wanted = stepped(fzero.Spec(**spec), PARAMS, rows, world=1)
    for path, value in wanted.leaves.items():
        torch.testing.assert_close(found.leaves[path], value, rtol=1e-4, atol=1e-5)


# --- steps that ranks cannot share ------------------------------------------------------------------------------------


def lowered(update: Any, params: Any, rules: Any = None, n: int = 2) -> Sharding:
    def step(state: Any, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(state["params"], x)
        return update(state, grads), {"loss": loss}

    spec = fzero.Spec(step=step, mesh={"tp": n}, shard=rules or {"w": P("tp", None)})
    batch = torch.empty(3, params["params"]["w"].shape[0], device="meta")
    found = written(spec, params, batch, n).sharding
    assert found is not None
    return found


def test_an_update_that_needs_all_of_a_sharded_leaf_is_refused() -> None:
    def product(state: Any, grads: Any) -> Any:
        w = state["params"]["w"]
        return {"params": {"w": w - grads["w"] @ w.T @ w}}

    with pytest.raises(SpecError, match=r"the update reads all of .*test_localise.py:\d+, of which each rank of 'tp'"):
        lowered(product, {"params": {"w": torch.empty(6, 4, device="meta")}})


def test_the_leaf_to_replicate_is_named_and_then_it_runs() -> None:
    def turned(state: Any, grads: Any) -> Any:
        w, v = state["params"]["w"], state["turn"]["v"]
        return {"params": {"w": w - (grads["w"] * 2) @ (v.T @ v)}, "turn": {"v": v}}

    state = {name: {leaf: torch.empty(6, 6, device="meta")} for name, leaf in (("params", "w"), ("turn", "v"))}
    said = r"all of .*computed from params/w, .*replicate this leaf: shard=\{'params/w': P\(\)\} before the rules"
    with pytest.raises(SpecError, match=said):
        lowered(turned, state, {"w": P(None, "tp"), "turn/v": P("tp", None)})
    assert lowered(
        turned, state, {"params/w": P(), "turn/v": P("tp", None)}
    ).outer.moves  # the sum of the product of `v`


@pytest.mark.parametrize(
    ("refused", "said", "runs"),
    [
        (lambda x: x.isfinite().all(), r"\(~x\)\.sum\(\) == 0", lambda x: (~x.isfinite()).sum() == 0),
    ],
    ids=["all"],
)
def test_what_can_be_written_as_a_sum_over_ranks_is_said(refused: Any, said: str, runs: Any) -> None:
    def by(of: Any) -> Any:
        return lambda state, grads: {"params": {"w": state["params"]["w"] - grads["w"] * of(grads["w"])}}

    state = {"params": {"w": torch.empty(6, 4, device="meta")}}
    with pytest.raises(SpecError, match=f"Write {said} .*use an optimizer that works element by element"):
        lowered(by(refused), state)
    assert [move.kind for move in lowered(by(runs), state).outer.moves if move.nbytes] == ["all_reduce"]


@pytest.mark.parametrize(
    ("of", "sums"),
    [(torch.linalg.vector_norm, 1), (torch.amin, 1), (torch.var, 2), (lambda x: x.logsumexp((0, 1)), 2)],
    ids=["norm", "amin", "var", "logsumexp"],
)
def test_an_update_takes_what_has_a_local_form(of: Any, sums: int) -> None:
    def by(state: Any, grads: Any) -> Any:
        return {"params": {"w": state["params"]["w"] - grads["w"] * of(grads["w"])}}

    found = lowered(by, {"params": {"w": torch.empty(6, 4, device="meta")}})
    reduces = [n for n in found.outer.gm.graph.nodes if n.target is torch.ops.fzero.reduce.default]
    assert [node.args[2] for node in reduces].count("tp") == sums

    def step(state: Any, x: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(state["params"], x)
        return by(state, grads), {"loss": loss}

    start, spec = {"params": {"w": drawn(6, 4, seed=1)}}, fzero.Spec(step=step)
    rules: dict[str, Any] = {"mesh": {"tp": 2}, "shard": {"w": P("tp", None)}}
    one, two = (
        stepped(replace(spec, **more), start, lambda rank, step: drawn(3, 6, seed=2), world=world).leaves["params/w"]
        for world, more in ((1, {}), (2, rules))
    )
    torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-7)


def test_a_new_leaf_that_would_lie_in_parts_is_refused_by_the_rule_that_it_needs() -> None:
    def copied(state: Any, grads: Any) -> Any:
        return {"params": {"w": state["params"]["w"] - grads["w"]}, "copy": {"v": grads["w"] * 2}}

    state = {name: {leaf: torch.empty(6, 4, device="meta")} for name, leaf in (("params", "w"), ("copy", "v"))}
    said = r"the new value of copy/v \[6, 4\] lies in parts along dim 1.*shard=\{'copy/v': P\(None, 'tp'\)\}"
    with pytest.raises(SpecError, match=said):
        lowered(copied, state, {"w": P(None, "tp")})
    rules = {"w": P(None, "tp"), "copy/v": P(None, "tp")}
    assert [move for move in lowered(copied, state, rules).outer.moves if move.nbytes] == []


@pytest.mark.parametrize(("columns", "fits"), [(1 << 18, True), ((1 << 18) + 64, False)])
def test_only_small_values_are_summed_in_an_update(columns: int, fits: bool) -> None:
    """A MiB of a vector that is a sum over the ranks' rows."""

    def centred(state: Any, grads: Any) -> Any:
        return {"params": {"w": state["params"]["w"] - grads["w"] / (1 + grads["w"].square().sum(0))}}

    state = {"params": {"w": torch.empty(2, columns, device="meta")}}
    if not fits:
        with pytest.raises(
            SpecError, match=r"the update reads all of .* Use an optimizer that works element by element"
        ):
            lowered(centred, state)
        return
    made = lowered(centred, state)
    assert [move.nbytes for move in made.outer.moves if move.nbytes] == [1 << 20]
    (total,) = (
        node
        for node in made.local.gm.graph.nodes
        if node.target is torch.ops.fzero.reduce.default and node.args[2] == "tp"
    )
    assert total.args[1] == "sum"


# --- text -------------------------------------------------------------------------------------------------------------


def test_the_list_of_transfers() -> None:
    lines = str(sharding("tp")).splitlines()
    assert lines[:4] == [
        "leaves over 2 ranks of tp",
        "  params/down  S0    [256, 64] -> [128, 64]",
        "  params/up    S1    [64, 256] -> [64, 128]",
        "region 0, each microbatch: 1 transfers, 2,048 bytes sent by a rank",
    ]
    assert lines[4].startswith("  all_reduce     f32          2,048 bytes  ")
    assert lines[5:] == ["update: 0 transfers, 0 bytes sent by a rank"]
    both = str(sharding("tp", "mp")).split("\n\n")
    assert [text.splitlines()[0] for text in both] == ["leaves over 2 ranks of tp", "leaves over 2 ranks of mp"]
    assert both[1].splitlines()[1] == "  params/down  S0    [256, 64] -> [64, 64]"


def test_what_is_computed_whole_is_told() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return torch.linalg.inv(x @ p["w"]).square().mean()

    params = {"w": torch.empty(4, 4, device="meta")}
    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), mesh={"tp": 2}, shard={"w": P(None, "tp")})
    found = written(spec, params, torch.empty(4, 4, device="meta"), 2).sharding
    assert any(line.startswith("computed whole: ") and "inv" in line for line in str(found).splitlines())


def test_the_transfers_are_those_of_the_regions_and_of_the_update() -> None:
    made = sharding("tp")
    assert made.moves == (*made.regions[0].moves, *made.outer.moves)


def test_a_constraint_of_an_axis_without_ranks_says_nothing() -> None:
    """One of every axis stays where an axis cuts values."""

    def loss(p: Any, x: Tensor) -> Tensor:
        h = fzero.constrain(x @ p["w"], P(None, "tp"))
        return fzero.constrain(h.sin(), P()).square().mean()

    spec = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), mesh={"tp": 2}, shard={"w": P(None, "tp")})
    params, batch = {"w": torch.empty(4, 6, device="meta")}, torch.empty(3, 4, device="meta")
    found = written(spec, params, batch, 2)
    assert found.sharding is not None
    captured = found.sharding.graph

    def constraints(axes: list[str]) -> set[str]:
        nodes = (node for region in unconstrained(captured, axes).regions for node in region.gm.graph.nodes)
        return {str(node.args[1]) for node in nodes if node.target is ops.CONSTRAIN}

    assert constraints(["tp"]) == {"tp", ""}
    assert constraints(["mp"]) == {""}
    assert constraints([]) == set()
    assert unconstrained(captured, []).regions[0].gm is not captured.regions[0].gm
    assert constraints(["tp"]) == {"tp", ""}, "the captured graph is as it was"
