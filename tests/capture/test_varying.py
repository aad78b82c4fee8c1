"""A value that differs between ranks does not reach the state."""

from typing import Any

import torch
from capturing import batch, captured, here, mean_square, params, refused_step
from torch import Tensor

import fzero


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
            "Reduce it with fzero.pmean, or keep one per rank with fzero.per_rank",
        )


def test_a_reduction_makes_a_value_replicated() -> None:
    def step(s: Any, b: Tensor) -> Any:
        (_, aux), grads = fzero.value_and_grad(lambda p, b: (mean_square(p, b), b.sum()), has_aux=True)(s["p"], b)
        new = s["p"]["w"] - grads["w"] + fzero.pmean(aux) + fzero.pmax(b).sum() + fzero.psum(b[0])
        return {"p": {"w": new}}, {"own": aux, "mean": fzero.pmean(aux), "rows": b * 2}

    graph = captured(step)
    assert sorted(graph.varying_metrics) == ["own", "rows"]


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
