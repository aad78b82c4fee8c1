"""Steps whose own work mixes slices and wholes: columns that are gathered, written again, and gathered again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import differing, run, run_reference
from torch import Tensor

import fzero
from fzero import tree


def loss(p: Any, x: Tensor) -> Tensor:
    return (p["a"] * x.sum()).sin().sum() + (p["b"] ** 2).sum()


def scaled_by_a_new_leaf(state: Any, x: Tensor) -> Any:
    """The new b needs all of the new a, which lies in the same column."""
    value, g = fzero.value_and_grad(loss)(state["params"], x)
    a, b = (state["params"][k] - 0.1 * g[k] for k in ("a", "b"))
    return {"params": {"a": a, "b": b * (1 + a.max())}, "ema": state["ema"]}, {"loss": value, "most": a.max()}


def centred(state: Any, x: Tensor) -> Any:
    value, g = fzero.value_and_grad(loss)(state["params"], x)
    a, b = (state["params"][k] - 0.1 * g[k] for k in ("a", "b"))
    return {"params": {"a": a, "b": b - b.mean()}, "ema": a}, {"loss": value, "most": a.max()}


def running(state: Any, x: Tensor) -> Any:
    """The sums up to each element of a leaf are no elementwise work, though they have its shape."""
    value, g = fzero.value_and_grad(loss)(state["params"], x)
    a, b = (state["params"][k] - 0.1 * g[k] for k in ("a", "b"))
    return {"params": {"a": a, "b": b.cumsum(0) / 32}, "ema": a.flip(0)}, {"loss": value}


def one_trains_and_one_decays(state: Any, x: Tensor) -> Any:
    """Two pieces of outer work write one column: one before the gradients are there, one after."""

    def of_a(p: Any, x: Tensor, b: Tensor) -> Tensor:
        return loss({**p, "b": b}, x)

    value, g = fzero.value_and_grad(of_a)({"a": state["params"]["a"]}, x, state["params"]["b"])
    params = {"a": state["params"]["a"] - 0.1 * g["a"], "b": state["params"]["b"] * 0.99}
    return {"params": params, "ema": state["ema"]}, {"loss": value}


def batch(rank: int, step: int) -> Tensor:
    return torch.full((3,), 0.1 * (rank + 1) + 0.01 * step)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("step", [scaled_by_a_new_leaf, centred, one_trains_and_one_decays])
@pytest.mark.sampled(2)
def test_a_column_written_after_it_was_gathered_is_gathered_again(step: Any, world: int) -> None:
    check(step, world)


def test_what_needs_the_elements_before_is_no_work_of_slices() -> None:
    check(running, 2)


def check(step: Any, world: int) -> None:
    """All stages have the same bits, and those of one process but for rounding."""
    start = {"params": {"a": torch.linspace(0.5, 1, 70), "b": torch.linspace(1, 2, 64)}, "ema": torch.zeros(70)}
    runs = [run(fzero.Spec(step=step, zero=zero), start, batch, world=world, steps=3) for zero in (0, 1, 2, 3)]
    spec, graph = fzero.Spec(step=step, zero=0), runs[0].lowered.graph
    expected, _ = run_reference(spec, start, batch, world=world, steps=3, graph=graph)
    for one in runs:
        assert all(torch.equal(one.final[path], runs[0].final[path]) for path in one.paths)
        for path, value in one.final.items():
            torch.testing.assert_close(value, expected[path], rtol=1e-5, atol=1e-6)


# --- one op with several results --------------------------------------------------------------------------------------


def exponents_are_kept(state: Any, x: Tensor) -> Any:
    """One result of an op goes on in slices, the other is a leaf that lies elsewhere, of integers."""
    value, g = fzero.value_and_grad(loss)(state["params"], x)
    parts = {k: torch.frexp(g[k]) for k in g}
    params = {k: state["params"][k] - 0.1 * parts[k].mantissa for k in g}
    return {"params": params, "exponents": {k: parts[k].exponent for k in g}}, {"loss": value}


def moments_are_kept(state: Any, x: Tensor) -> Any:
    """Adam's parameters wait for a sum over ranks, and one of its moments for none. Moments change their places."""
    value, g = fzero.value_and_grad(loss)(state["params"], x)
    rate, one = torch.tensor(0.1, dtype=torch.float64), torch.ones((), dtype=torch.int64)
    params, mu, nu = {}, {}, {}
    for k in ("a", "b"):
        grad = g[k]
        for _ in range(6):  # more than is computed again
            grad = grad * 1.01 + 0.001
        p = state["params"][k]
        new, mu[k], nu[k] = torch.ops.fzero.adamw(
            p, grad, state["mu"][k], state["nu"][k], one, rate, 0.9, 0.99, 1e-8, 0.0, True
        )
        total = fzero.psum(g["a"].sum() + x.sum(), "dp")
        params[k] = torch.where(total < 1e9, new, p)
    nu["b"] = nu["b"] * fzero.pmean(x.mean(), "dp").exp()
    return {"params": params, "mu": mu, "nu": nu, "a mu": mu["a"]}, {"loss": value}


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("step", [exponents_are_kept, moments_are_kept])
def test_results_of_one_op_that_go_different_ways(step: Any, zero: int) -> None:
    params = {"a": torch.linspace(0.5, 1, 128), "b": torch.linspace(1, 2, 64)}
    zeros = tree.map(torch.zeros_like, params)
    start = {"params": params, "mu": zeros, "nu": zeros, "a mu": zeros["a"]}
    if step is exponents_are_kept:
        start = {"params": params, "exponents": tree.map(lambda leaf: leaf.int(), zeros)}
    one = run(fzero.Spec(step=step, zero=zero), start, batch, world=2, steps=2)
    expected, _ = run_reference(fzero.Spec(step=step, zero=0), start, batch, world=2, steps=2, graph=one.lowered.graph)
    assert differing(one.final, expected) == []
