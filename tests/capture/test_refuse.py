"""Refusals by name: ambient randomness, and reductions and gradients where they do not belong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import (
    agrees,
    batch,
    here,
    mean_square,
    params,
    refused,
    refused_step,
    said,
)
from torch import Tensor

import fzero
from fzero import CaptureError

# --- ambient randomness -----------------------------------------------------------------------------------------------

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda b: torch.rand(3),
    "randn_like": torch.randn_like,
    "dropout": lambda b: F.dropout(b, 0.5),
    "module": lambda b: torch.nn.Dropout(0.5)(b),
    "bernoulli": lambda b: torch.bernoulli(b.sigmoid()),
    "randperm": lambda b: torch.randperm(3),
    "normal_": lambda b: torch.empty(3).normal_(),
    "randint": lambda b: torch.randint(0, 3, (3,)),
    "multinomial": lambda b: torch.multinomial(b + 1, 1),
    "gumbel_softmax": F.gumbel_softmax,
    "seeded": lambda b: torch.rand(3, generator=torch.Generator().manual_seed(0)),
    "init": lambda b: torch.nn.init.kaiming_uniform_(torch.empty(3, 3)),
    "attention": lambda b: F.scaled_dot_product_attention(b[None], b[None], b[None], dropout_p=0.5),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", RANDOM)
def test_ambient_randomness_is_refused(name: str) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) + RANDOM[name](b).sum()  # here

    def step(s: Any, b: Tensor) -> Any:
        return s, {"m": RANDOM[name](b).sum()}  # here

    parts = ("draws from torch's ambient generator", "lsewhere use fzero.random with a key from the state or the batch")
    line = here(loss) if name not in ("module", "init", "seeded", "randperm") else Path(__file__).name
    before = torch.get_rng_state()
    refused(loss, line if name in ("randn_like", "gumbel_softmax") else Path(__file__).name, *parts)
    refused_step(step, *parts)
    assert torch.equal(torch.get_rng_state(), before), "the refused draw did not happen"


def test_dropout_that_draws_nothing_is_fine() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        q = (b * p["w"]).view(1, 1, 4, 3)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.0, is_causal=True).sum()
        return y + mean_square(p, F.dropout(F.dropout(b, 0.0), 0.5, training=False))

    agrees(loss)


def test_keyed_randomness_is_fine_and_draws_anew_each_step() -> None:
    def step(s: Any, b: Tensor) -> Any:
        key = fzero.random.fold_in(fzero.random.key(1), s["n"])
        return {**s, "n": s["n"] + 1}, {"draw": fzero.random.uniform(key)}

    state = fzero.init({"n": 0}, fzero.Spec(step=step))
    drawn = []
    for n in range(3):
        state = fzero.step(state, batch())
        drawn.append(state.metrics["draw"].item())
        assert drawn[-1] == fzero.random.uniform(fzero.random.fold_in(fzero.random.key(1), n)).item()
    assert len(set(drawn)) == 3


# --- value_and_grad and reductions where they do not belong -----------------------------------------------------------


def test_value_and_grad_inside_a_loss_or_a_transform_is_refused() -> None:
    def in_loss(p: Any, b: Tensor) -> Tensor:
        return fzero.value_and_grad(mean_square)(p, b)[0]  # here

    def in_vmap(p: Any, b: Tensor) -> Tensor:
        per_row = lambda x: fzero.grad(mean_square)(p, x[None])["w"]  # noqa: E731  # here
        return torch.vmap(per_row)(b).sum()

    def in_grad(p: Any, b: Tensor) -> Tensor:
        inner = lambda w: fzero.value_and_grad(mean_square)({"w": w}, b)[0]  # noqa: E731  # here
        return torch.func.grad(inner)(p["w"]).sum()

    parts = ("value_and_grad was called inside a loss or a torch.func transform", "Inside a loss use torch.func.grad")
    for fn in (in_loss, in_vmap, in_grad):
        refused(fn, here(fn), *parts)
        refused_step(lambda s, b, fn=fn: (s, {"m": fn(s["p"], b)}), here(fn), *parts) if fn is not in_loss else None
    said(CaptureError, lambda: in_vmap(params(), batch()), here(in_vmap), *parts)


@pytest.mark.parametrize("op", ["pmean", "psum", "pmax"])
def test_reductions_inside_a_loss_are_refused(op: str) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return getattr(fzero, op)(mean_square(p, b))  # here

    refused(loss, f"fzero.{op} was called inside a loss at", here(loss), "reduce what value_and_grad returns")


def test_reductions_of_the_wrong_thing() -> None:
    refused_step(lambda s, b: (s, {"m": fzero.psum(3)}), "fzero.psum of a value: needed a tensor, got 3")
    refused_step(lambda s, b: (s, {"m": fzero.psum({"a": ["x"]})}), "fzero.psum of a/0: needed a tensor, got 'x'")
    refused_step(lambda s, b: (s, {"m": fzero.pmean(b.long())}), "needed a floating dtype. Use psum, or cast")
    refused_step(lambda s, b: (s, {"m": fzero.pmean(b, "tp")}), "over axis 'tp'", "the data axes dp")
