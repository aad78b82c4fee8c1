"""Updates have one set of bits at all stages: with noise of their own, on whole leaves, with and without a scale, and
around losses of what a step computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
@pytest.mark.sampled(2)
def test_with_values_that_all_ranks_have(kind: str, mesh: dict[str, int]) -> None:
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


def given_a_loss(state: Any, x: Tensor, kind: str) -> Any:
    """A step whose last loss reads values that are made of the parameters, or of an average of them."""
    value, grads = fzero.value_and_grad(loss)(state["params"], x)
    shown, made = {"loss": value}, state["average"]
    if kind == "perturbed":
        moved = {name: p + 0.1 * grads[name] / grads[name].square().sum() for name, p in state["params"].items()}
        shown["moved"], grads = fzero.value_and_grad(loss)(moved, x)
    elif kind == "some perturbed":
        moved = {name: p * 0.9 if name in ("up", "bias") else p for name, p in state["params"].items()}
        shown["moved"], grads = fzero.value_and_grad(loss)(moved, x)
    elif kind == "in 16 bits":
        low = {name: p if name == "scale" else p.bfloat16() for name, p in state["params"].items()}
        value, grads = fzero.value_and_grad(lambda p, x: loss({n: v.to(x.dtype) for n, v in p.items()}, x))(low, x)
        grads = {name: g.float() for name, g in grads.items()}
    elif kind == "own steps":
        fast = state["params"]
        for _ in range(2):
            own = fzero.value_and_grad(loss, reduce=False)(fast, x)[1]
            fast = {name: p - 0.1 * own[name] for name, p in fast.items()}
        grads = {name: state["params"][name] - mean for name, mean in fzero.pmean(fast).items()}
    updates, opt = TX.update(grads, state["opt"], state["params"])
    params = optim.apply_updates(state["params"], updates)
    if kind == "average":
        made = {name: 0.9 * a + 0.1 * params[name] for name, a in made.items()}
        shown["average"] = fzero.forward(loss)(made, x)
    return {**state, "params": params, "opt": opt, "average": made}, shown


GIVEN = ["perturbed", "some perturbed", "in 16 bits", "own steps", "average"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"mesh": {"dp": 3}}, "two axes": {"mesh": {"dp_out": 2, "dp": 2}}, "bf16": {"precision": "bf16"},
    "two microbatches": {"microbatches": 2, "reduce": "each"}, "offload": {"offload": "optimizer+params"},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.sampled(2)
def test_with_losses_of_computed_parameters(kind: str, option: str) -> None:
    torch.manual_seed(0)
    first = {**start(), "average": {name: torch.randn(shape) for name, shape in SHAPES.items()}}
    world = math.prod(OPTIONS[option].get("mesh", {"dp": 2}).values())
    specs = [fzero.Spec(step=lambda s, x: given_a_loss(s, x, kind), zero=z, **OPTIONS[option]) for z in range(4)]
    finals = [run(spec, first, batch, world=world, steps=2).final for spec in specs]
    assert [differing(finals[0], final) for final in finals[1:]] == [[]] * 3
    plain, _ = run_reference(specs[0], first, batch, world=world, steps=2)
    for path, value in plain.items():
        torch.testing.assert_close(finals[0][path], value, rtol=1e-5, atol=1e-6)


WHOLE: dict[str, Any] = {
    "adafactor": optim.adafactor(1e-2),
    "adafactor, decay": optim.adafactor(1e-2, weight_decay=0.1),
    "muon": optim.muon(1e-2, mask="layers/**/[ab]", others=optim.adamw(1e-2)),
    "lamb": optim.lamb(1e-2),
    "a norm over updates": optim.chain(optim.adafactor(1e-2), optim.clip_by_global_norm(0.5)),
}
CHECKS: dict[str, dict[str, Any]] = {
    "skip": {"nonfinite": "skip"}, "bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16"},
    "fp16, clip, two microbatches": {"precision": "fp16", "clip_norm": 0.5, "microbatches": 2},
}  # fmt: skip


def words(rank: int, step: int) -> Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(7 * rank + step))


def of_words(params: Any, batch: Tensor) -> Tensor:
    x = params["words"][batch]
    for layer in params["layers"]:
        x = x + torch.tanh((x * layer["n"]) @ layer["a"]) @ layer["b"]
    return F.cross_entropy((x @ params["head"]).flatten(0, 1), batch.flatten())


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.sampled(1)
def test_on_whole_leaves(name: str, check: str) -> None:
    torch.manual_seed(0)
    layers = [{"a": torch.randn(6, 10) / 3, "b": torch.randn(10, 6) / 3, "n": torch.ones(6)} for _ in range(3)]
    params = {"words": torch.randn(11, 6) / 3, "layers": layers, "head": torch.randn(6, 11) / 3}
    specs = [fzero.Spec(loss=of_words, optimizer=WHOLE[name], zero=zero, **CHECKS[check]) for zero in range(4)]
    finals = [run(spec, params, words, world=3, steps=3).final for spec in specs]
    assert [differing(finals[0], final) for final in finals[1:]] == [[]] * 3
    assert differing(finals[0], {**finals[0], "params/head": params["head"]}), "it was trained"
