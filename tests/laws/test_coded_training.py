"""The recipes of examples/coded_training.py, compared with loops of plain PyTorch on two ranks; phases and bytes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import run
from torch import Tensor

import coded_training as recipes
import fzero
from fzero import optim, tree
from fzero.ir.program import wire_bytes
from fzero.phases import Phases

RANKS, SIZE = 2, 64 * 128 * 2
EPS, B1, B2 = 1e-8, 0.9, 0.99
LR = 1e-2


def params() -> dict[str, Tensor]:
    made: dict[str, Tensor] = recipes.toy_params(fzero.random.key(0))
    return made


def gradient(p: dict[str, Tensor], rank: int, step: int) -> dict[str, Tensor]:
    p = {name: x.detach().clone().requires_grad_() for name, x in p.items()}
    grads = torch.autograd.grad(recipes.toy_loss(p, recipes.toy_batch(rank, step)), [*p.values()])
    return dict(zip(p, grads, strict=True))


def signs(x: Tensor) -> Tensor:
    """By rows of 64: their signs, times the root of their mean square."""
    rows = x.reshape(-1, 64)
    return (torch.where(rows >= 0, 1.0, -1.0) * rows.square().mean(1, keepdim=True).sqrt()).view(x.shape)


class Signs:
    """The mean over ranks by signs both ways, with what they have lost."""

    def __init__(self) -> None:
        self.worker = [{name: torch.zeros_like(p) for name, p in params().items()} for _ in range(RANKS)]
        self.server = {name: torch.zeros_like(p) for name, p in params().items()}

    def mean(self, name: str, values: list[Tensor]) -> Tensor:
        total = torch.zeros_like(values[0])
        for own, value in zip(self.worker, values, strict=True):
            total += signs(value + own[name])
            own[name] = value + own[name] - signs(value + own[name])
        value = total / RANKS + self.server[name]
        self.server[name] = value - signs(value)
        return signs(value)


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in params().items()}


def close(found: dict[str, Tensor], prefix: str, wanted: dict[str, Tensor], atol: float = 2e-6) -> None:
    for name, value in wanted.items():
        assert torch.allclose(found[f"{prefix}/{name}"], value, atol=atol, rtol=1e-5), name


# --- DiLoCo -----------------------------------------------------------------------------------------------------------


def test_diloco_is_local_adamw_and_an_outer_sgd_of_torch() -> None:
    every, steps = 3, 6
    first, step = recipes.diloco(recipes.toy_loss, optim.adamw(LR, (B1, B2)), every)
    done = run(fzero.Spec(step=step, zero=1), first(params()), recipes.toy_batch, world=RANKS, steps=steps).final
    outer = {name: p.clone().requires_grad_() for name, p in params().items()}
    sgd = torch.optim.SGD(outer.values(), lr=0.7, momentum=0.9, nesterov=True)
    ranks = [{name: p.clone().requires_grad_() for name, p in params().items()} for _ in range(RANKS)]
    adams = [torch.optim.AdamW(own.values(), lr=LR, betas=(B1, B2)) for own in ranks]
    for number in range(steps):
        for rank, (own, adam) in enumerate(zip(ranks, adams, strict=True)):
            for name, grad in gradient(own, rank, number).items():
                own[name].grad = grad
            adam.step()
        if number % every == every - 1:
            for name, p in outer.items():
                p.grad = p.detach() - sum(own[name].detach() for own in ranks) / RANKS
            sgd.step()
            with torch.no_grad():
                for own in ranks:
                    for name, p in own.items():
                        p.copy_(outer[name])
    close(done, "params", {name: p.detach() for name, p in outer.items()}, atol=1e-5)


def test_diloco_sends_once_in_so_many_steps() -> None:
    first, step = recipes.diloco(recipes.toy_loss, optim.adamw(LR), 16, codec="int8")
    spec, state = fzero.Spec(step=step, zero=0), first(params())
    assert Counter(step.at(number) for number in range(64)) == {"inner": 60, "outer": 4}
    sent = {}
    for name in ("inner", "outer"):
        program = fzero.lower(spec, state, recipes.toy_batch(0, 0), world_size=RANKS, phase=name).program
        sent[name] = sum(wire_bytes(program, op) for op in program.ops)
    assert sent["inner"] == 4, "the loss"
    assert sent["outer"] == 4 + SIZE // 2 * 68 // 64 + SIZE // 2 * 4


# --- 0/1 Adam ---------------------------------------------------------------------------------------------------------


def kinds(step: Phases[Any], steps: int) -> str:
    return "".join(
        {"full": "F", "coded": "c", "local": ".", "switch": "S", "meeting": "M"}[step.at(n)] for n in range(steps)
    )


def test_the_phases_of_zero_one_adam_double_their_distance() -> None:
    _, step = recipes.zero_one_adam(recipes.toy_loss, optim.constant(LR), 20, doubled_after=4, longest=4)
    assert kinds(step, 48) == "FFFFcFcFcFcFcccFcccF" + "SMMM.M.M.M.M...M...M...M...M"
    fresh = recipes.zero_one_adam(recipes.toy_loss, optim.constant(LR), 20, doubled_after=4, longest=4)[1]
    assert fresh.at(40) == step.at(40), "a resume asks for a late step first"
    assert fresh.at(5000) in ("local", "meeting")


def test_zero_one_adam_is_the_algorithm() -> None:
    freeze, steps, eps = 4, 10, 1e-2  # a variance of three steps is small: with Adam's eps differences would grow
    first, step = recipes.zero_one_adam(
        recipes.toy_loss, optim.constant(LR), freeze, (B1, B2), eps, doubled_after=2, longest=2
    )
    order = kinds(step, steps)
    assert order == "FFcF" + "SM.M.M"
    done = run(fzero.Spec(step=step, zero=1), first(params()), recipes.toy_batch, world=RANKS, steps=steps).final
    p, mu, nu, codes, rates = params(), zeros(), zeros(), Signs(), 0.0
    own, moved = [zeros() for _ in range(RANKS)], [zeros() for _ in range(RANKS)]
    for number, kind in enumerate(order):
        root = {name: v.sqrt() + eps for name, v in nu.items()}
        if kind in "Fc":
            grads = [gradient(p, rank, number) for rank in range(RANKS)]
            for name in p:
                each = [g[name] for g in grads]
                mean = sum(each) / RANKS if kind == "F" else codes.mean(name, each)
                mu[name] = B1 * mu[name] + (1 - B1) * mean
                if kind == "F":
                    nu[name] = B2 * nu[name] + (1 - B2) * mean**2
                p[name] = p[name] - LR * mu[name] / (nu[name].sqrt() + eps)
            own = [{name: m.clone() for name, m in mu.items()} for _ in range(RANKS)]
            continue
        rates += LR
        for rank in range(RANKS):
            g = gradient({name: p[name] - moved[rank][name] / root[name] for name in p}, rank, number)
            for name in p:
                own[rank][name] = B1 * own[rank][name] + (1 - B1) * g[name]
                moved[rank][name] = moved[rank][name] + LR * own[rank][name]
        if kind == "S":
            codes = Signs()
        if kind in "SM":
            for name in p:
                mean = codes.mean(name, [u[name] for u in moved])
                p[name], mu[name] = p[name] - mean / root[name], mean / rates
            own, moved, rates = [{n: m.clone() for n, m in mu.items()} for _ in range(RANKS)], [zeros(), zeros()], 0.0
    close(done, "nu", nu)
    close(done, "params", p, atol=2e-5)


# --- 1-bit LAMB -------------------------------------------------------------------------------------------------------


def test_onebit_lamb_is_the_algorithm() -> None:
    warm, steps = 3, 6
    made = recipes.onebit_lamb(optim.constant(LR), warm, (B1, B2), EPS)
    done = run(
        fzero.Spec(loss=recipes.toy_loss, optimizer=made, zero=1), params(), recipes.toy_batch, world=RANKS, steps=steps
    ).final
    p, mu, nu, codes = params(), zeros(), zeros(), Signs()
    fresh, ratio, factor = zeros(), dict.fromkeys(p, 0.0), dict.fromkeys(p, 1.0)
    for number in range(steps):
        grads = [gradient(p, rank, number) for rank in range(RANKS)]
        for name in p:
            old, each = mu[name], [g[name] for g in grads]
            if number < warm:
                mean = sum(each) / RANKS
                mu[name] = B1 * old + (1 - B1) * mean
                nu[name] = fresh[name] = B2 * nu[name] + (1 - B2) * mean**2
            else:
                mu[name] = codes.mean(name, [B1 * old + (1 - B1) * g for g in each])
                fresh[name] = B2 * fresh[name] + (1 - B2) * ((mu[name] - B1 * old) / (1 - B1)) ** 2
            u = mu[name] / (nu[name].sqrt() + EPS)
            if number < warm:
                now = float(p[name].norm() / u.norm())
                ratio[name] = 0.9 * ratio[name] + 0.1 * now
            else:
                most = float(((nu[name].sqrt() + EPS) / (fresh[name].sqrt() + EPS)).max().clamp(0.5, 4.0))
                factor[name] = min(max(most, 0.9 * factor[name]), 1.1 * factor[name])
                now = ratio[name] / (1 - 0.9**warm) * factor[name]
            p[name] = p[name] - LR * now * u
    close(done, "params", p, atol=2e-5)
    for name, value in factor.items():
        assert math.isclose(float(done[f"opt_state/factor/{name}"]), value, rel_tol=1e-4)


# --- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", recipes.METHODS)
@pytest.mark.sampled(2)
def test_the_example_runs_and_learns(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    losses = recipes.main(["--method", method, "--steps", "40"])
    assert losses[-1] < 0.9 * losses[0]
    printed = capsys.readouterr().out
    assert "bytes that each of 2 ranks sends in a step" in printed


@pytest.mark.parametrize("method", ["diloco", "zero-one"])
@pytest.mark.sampled(1)
def test_every_stage_has_the_same_bits(method: str) -> None:
    start, spec = recipes.toy_spec(method, 12)
    state = start(fzero.random.key(0))
    finals = [
        run(fzero.Spec(step=spec.step, zero=zero), state, recipes.toy_batch, world=RANKS, steps=10).final
        for zero in (0, 3)
    ]
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    assert tree.flatten(state)[0]
