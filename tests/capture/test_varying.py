"""A value that differs between ranks does not reach the state."""

from typing import Any

import pytest
import torch
from capturing import batch, captured, here, mean_square, params, refused_step
from helpers import gloo
from torch import Tensor, nn

import fzero
from fzero.interop import from_module


def test_a_varying_value_that_reaches_the_state_is_refused() -> None:
    def directly(s: Any, b: Tensor) -> Any:
        return {"p": {"w": b[0]}}, {}  # here

    def through_ops(s: Any, b: Tensor) -> Any:
        rows = b.softmax(-1).t() @ b
        return {"p": {"w": torch.where(s["p"]["w"] > 0, rows.sum(0), s["p"]["w"])}}, {}  # here

    def through_aux(s: Any, b: Tensor) -> Any:
        (_, aux), _ = fzero.value_and_grad(lambda p, b: (mean_square(p, b), b.sum()), has_aux=True)(s["p"], b)
        return {"p": {"w": s["p"]["w"] + aux}}, {}  # here

    def own_gradients(s: Any, b: Tensor) -> Any:
        grads = torch.func.grad(mean_square)(s["p"], b)
        return {"p": {"w": s["p"]["w"] - grads["w"]}}, {}  # here

    def one_of_two(s: Any, b: Tensor) -> Any:
        new = fzero.pmean(b.sum()) + b.sum()
        return {"p": {"w": s["p"]["w"] + new}}, {}  # here

    for step in (directly, through_ops, through_aux, own_gradients, one_of_two):
        refused_step(
            step,
            "state['p/w'] would differ between ranks",
            here(step),
            "Reduce it with fzero.pmean or fzero.coded_mean",
            "keep one per rank with fzero.per_rank",
        )


def test_a_reduction_makes_a_value_replicated() -> None:
    def step(s: Any, b: Tensor) -> Any:
        (_, aux), grads = fzero.value_and_grad(lambda p, b: (mean_square(p, b), b.sum()), has_aux=True)(s["p"], b)
        new = s["p"]["w"] - grads["w"] + fzero.pmean(aux) + fzero.pmax(b).sum() + fzero.psum(b[0])
        return {"p": {"w": new}}, {"own": aux, "mean": fzero.pmean(aux), "rows": b * 2}

    graph = captured(step)
    assert sorted(graph.varying_metrics) == ["own", "rows"]


@pytest.mark.parametrize("within", [False, True])
def test_rows_beside_a_batch_that_microbatches_split_are_warned_of(
    within: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The complaint: with one row in a microbatch, targets of all rows broadcast to another loss, without a word."""
    rows, start = batch(), {"p": params()}

    def loss(p: Any, b: Any, target: Any = None) -> Tensor:
        return (b["x"] @ p["w"] - (b["y"] if within else target)).square().mean()

    def step(s: Any, b: Tensor) -> Any:
        target = b @ (s["p"]["w"] + 1)
        given = ({"x": b, "y": target},) if within else ({"x": b}, target)
        value, grads = fzero.value_and_grad(loss)(s["p"], *given)
        return {"p": fzero.tree.map(lambda p, g: p - g, s["p"], grads)}, {"loss": value}

    state = fzero.step(fzero.init(start, fzero.Spec(step=step, microbatches=len(rows))), rows)
    assert (f"microbatches={len(rows)} do not split it" in caplog.text) == (not within)
    one = fzero.step(fzero.init(start, fzero.Spec(step=step)), rows)
    assert torch.allclose(state.metrics["loss"], one.metrics["loss"]) == within


def test_integers_that_are_the_same_on_all_ranks_pass_a_mean_as_they_are() -> None:
    """The complaint: pmean of a BatchNorm's statistics needed a floating dtype, for its count of batches."""

    def loss(p: Any, b: Tensor, kept: Any) -> Any:
        return mean_square(p, b), {"count": kept["count"] + 1, "on": ~kept["on"], "mean": b.mean(), "seen": b.long()}

    def step(s: Any, b: Tensor, wrong: bool = False) -> Any:
        (_, aux), _ = fzero.value_and_grad(loss, has_aux=True)(s["p"], b, s["kept"])
        seen = aux.pop("seen")
        mean = fzero.pmean({**aux, "seen": seen} if wrong else aux)  # here
        return {**s, "kept": {name: mean[name] for name in s["kept"]}}, {"seen": mean.get("seen", seen)}

    kept = {"count": torch.tensor(3), "on": torch.tensor(True), "mean": torch.tensor(0.0)}
    tree = {"p": params(), "kept": kept}
    lowered = fzero.lower(fzero.Spec(step=step, microbatches=2), tree, batch(), world_size=4)
    assert "equal" not in str(lowered.graph.gm.graph)
    state = fzero.init(tree, fzero.Spec(step=step))
    for count in (4, 5):
        state = fzero.step(state, batch())
        assert state.tree["kept"]["count"].full() == count
        assert bool(state.tree["kept"]["on"].full()) == (count == 5)
    with pytest.raises(fzero.CaptureError, match=r"pmean of i64\[4, 3\] at test_varying.*Use fzero.psum or fzero.pmax"):
        fzero.lower(fzero.Spec(step=lambda s, b: step(s, b, True)), tree, batch(), world_size=2)
    assert fzero.pmean({"n": torch.tensor(3)})["n"] == 3, "a world of one"


def statistics_of_two_ranks() -> list[float]:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    params, buffers, apply = from_module(net, mutable=True)

    def loss(p: Any, b: Tensor, kept: Any) -> Any:
        out, kept = apply(p, kept, b)
        return out.square().mean(), kept

    def step(s: Any, b: Tensor) -> Any:
        (_, kept), _ = fzero.value_and_grad(loss, has_aux=True)(s["p"], b, s["b"])
        return {**s, "b": fzero.pmean(kept)}, {}

    state = fzero.init({"p": params, "b": buffers}, fzero.Spec(step=step, zero=3))
    for number in range(2):
        state = fzero.step(state, batch() + number + torch.distributed.get_rank())
    found = fzero.unshard(state.tree["b"])
    return [*found["1.running_mean"].tolist(), float(found["1.num_batches_tracked"])]


def test_statistics_of_two_ranks_are_one() -> None:
    first, second = (outcome.value for outcome in gloo(2, statistics_of_two_ranks))
    assert first == second
    assert first[-1] == 2


def test_per_rank_leaves_may_vary_but_do_not_spread() -> None:
    def keep(s: Any, b: Tensor) -> Any:
        return {**s, "r": s["r"] + b.sum()}, {}

    def spread(s: Any, b: Tensor) -> Any:
        return {**s, "p": {"w": s["p"]["w"] + s["r"]}}, {}  # here

    tree = {"p": params(), "r": fzero.per_rank(torch.zeros(()))}
    state = fzero.step(fzero.init(tree, fzero.Spec(step=keep)), batch())
    assert state.tree["r"].shape == (1,)
    assert state.tree["r"].full().tolist() == [batch().sum().item()]
    refused_step(spread, "state['p/w'] would differ between ranks", here(spread), state=tree)
    refused_step(
        lambda s, b: (fzero.per_rank(s), {}), "state['p/w'] became per_rank in the step: make it so in fzero.init"
    )
