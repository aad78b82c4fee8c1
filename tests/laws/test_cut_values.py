"""An update that reads full values of its own (noise, means over ranks) has one set of bits at all stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import differing, run, run_reference
from torch import Tensor

import fzero
from fzero import optim, random

TX = optim.adamw(1e-2)
SHAPES = {"up": (5, 7), "scale": (7,), "down": (7, 3), "bias": (3,)}


def start() -> Any:
    params = {name: torch.randn(shape) / 3 for name, shape in SHAPES.items()}
    return {"params": params, "opt": TX.init(params), "key": random.key(1)}


def loss(params: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["up"] * params["scale"]) @ params["down"] + params["bias"]).square().mean()


def noised(state: Any, x: Tensor, kind: str) -> Any:
    key, noise = random.split(state["key"])
    keys = dict(zip(SHAPES, random.split(noise, len(SHAPES)), strict=True))
    value, grads = fzero.value_and_grad(loss)(state["params"], x)
    if kind == "noise":
        grads = {name: g + 0.1 * random.normal(keys[name], g.shape) for name, g in grads.items()}
    elif kind == "noise and norm":
        grads = {name: g + 0.1 * random.normal(keys[name], g.shape) for name, g in grads.items()}
        size = optim.global_norm(grads)
        grads = {name: g / torch.clamp(size, min=0.1) for name, g in grads.items()}
    elif kind == "mask":
        grads = {name: torch.where(random.normal(keys[name], g.shape) > 0, g, 0.0) for name, g in grads.items()}
    updates, opt = TX.update(grads, state["opt"], state["params"])
    params = optim.apply_updates(state["params"], updates)
    if kind == "kept noise":  # a leaf of the result is noise and the leaf before
        params = {name: p + 1e-3 * random.normal(keys[name], p.shape) for name, p in params.items()}
    return {"params": params, "opt": opt, "key": key}, {"loss": value}


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + step))


KINDS = ["noise", "noise and norm", "mask", "kept noise"]


@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp_out": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_stages_have_one_set_of_bits(kind: str, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    first, world = start(), 3 if len(mesh) == 1 else 4
    specs = [fzero.Spec(step=lambda s, x: noised(s, x, kind), zero=zero, mesh=mesh) for zero in range(4)]
    finals = [run(spec, first, batch, world=world, steps=3).final for spec in specs]
    plain, _ = run_reference(specs[0], first, batch, world=world, steps=3)
    for zero, final in enumerate(finals):
        if kind != "noise and norm":  # a norm adds its parts in another order
            assert not differing(finals[0], final), f"stage {zero}"
        for path, value in plain.items():
            torch.testing.assert_close(final[path], value, rtol=1e-5, atol=1e-6)
