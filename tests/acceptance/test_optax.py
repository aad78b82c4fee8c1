"""Optimizers and schedules beside optax's own, in float64 (where optax is installed)."""

from typing import Any

import pytest
import torch

from fzero import optim

pytestmark = pytest.mark.acceptance
MASK = {"w": True, "bias": False}


def steps(tx: Any, apply: Any, params: Any, gradients: list[Any]) -> Any:
    state = tx.init(params)
    for grads in gradients:
        updates, state = tx.update(grads, state, params)
        params = apply(params, updates)
    return params


def test_optimizers_are_optaxs() -> None:
    optax, jax = pytest.importorskip("optax"), pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    lars = {"nesterov": True, "weight_decay": 0.1, "eps": 0.01}
    pairs = {
        "lamb": (optim.lamb(1e-2, weight_decay=0.1), optax.lamb(1e-2, weight_decay=0.1)),
        "lars": (optim.lars(1.0, weight_decay=0.1), optax.lars(1.0, weight_decay=0.1)),
        "lars_masked": (
            optim.lars(1.0, mask="w", **lars),
            optax.lars(1.0, weight_decay_mask=MASK, trust_ratio_mask=MASK, **lars),
        ),
        "adadelta": (optim.adadelta(0.5, 0.8, 1e-4), optax.adadelta(0.5, 0.8, 1e-4)),
        "ema": (optim.chain(optim.ema(0.9), optim.sgd(0.1)), optax.chain(optax.ema(0.9), optax.sgd(0.1))),
        "ema_biased": (optim.chain(optim.ema(0.9, debias=False), optim.sgd(0.1)),
                       optax.chain(optax.ema(0.9, debias=False), optax.sgd(0.1))),
    }  # fmt: skip
    torch.manual_seed(0)
    params = {"w": torch.randn(4, 6, dtype=torch.float64), "bias": torch.randn(6, dtype=torch.float64)}
    gradients = [{name: torch.randn_like(p) for name, p in params.items()} for _ in range(20)]
    given = [{name: jax.numpy.asarray(g.numpy()) for name, g in grads.items()} for grads in [params, *gradients]]
    for _name, (ours, theirs) in pairs.items():
        got = steps(ours, optim.apply_updates, params, gradients)
        wanted = steps(theirs, optax.apply_updates, given[0], given[1:])
        for leaf in params:
            torch.testing.assert_close(
                got[leaf], torch.tensor(wanted[leaf].tolist(), dtype=torch.float64), rtol=1e-12, atol=1e-13
            )


def test_schedules_are_optaxs() -> None:
    optax = pytest.importorskip("optax")
    pairs = {
        "polynomial": (optim.polynomial(1.0, 7, end=0.2, power=2.0), optax.polynomial_schedule(1.0, 0.2, 2.0, 7)),
        "exponential": (optim.exponential(1.0, 3, 0.5, end=0.1), optax.exponential_decay(1.0, 3, 0.5, end_value=0.1)),
        "staircase": (
            optim.exponential(1.0, 3, 0.5, staircase=True),
            optax.exponential_decay(1.0, 3, 0.5, staircase=True),
        ),
        "piecewise": (
            optim.piecewise(1.0, {3: 0.5, 6: 0.1}),
            optax.piecewise_constant_schedule(1.0, {3: 0.5, 6: 0.1}),
        ),
        "joined": (
            optim.joined([optim.linear_warmup(1.0, 4), optim.cosine(1.0, 6)], [4]),
            optax.join_schedules([optax.linear_schedule(0, 1.0, 4), optax.cosine_decay_schedule(1.0, 6)], [4]),
        ),
    }
    for name, (ours, theirs) in pairs.items():
        rates = [float(ours(torch.tensor(c))) for c in range(15)]
        assert rates == pytest.approx([float(theirs(c)) for c in range(15)], rel=1e-6, abs=1e-7), name
