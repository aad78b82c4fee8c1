"""fzero trains as plain PyTorch does: autograd and torch.optim in one process, on the global batch, in fp32.

Every model under every stage, several worlds and microbatches. The two add in different orders, so the comparison is
within 1e-5: of the loss at every step, and after twenty steps (eight in `make test`) of all parameters together (Adam
amplifies the rounding of single leaves) or, with SGD, of every leaf. `runtime.reference`, the semantics written down,
is held to the same.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from cases import stage_of
from helpers import relative, run, run_reference
from models import MODELS
from torch import Tensor

import fzero
from fzero import tree

TOLERANCE = 1e-5
STAGES = (0, 1, 2, 3)
MIXED = {"layers/**": 3, "blocks/**": 3, "embedding": 0, "**": 1}


class Optimizer(NamedTuple):
    """fzero's and torch's; `leafwise` where rounding does not grow, so that every leaf is compared."""

    tx: fzero.optim.GradientTransformation
    torch: Callable[[list[Tensor]], torch.optim.Optimizer]
    leafwise: bool
    clip_norm: float | None = None


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)


SGD = fzero.optim.sgd(0.05, momentum=0.9, weight_decay=1e-3)
OPTIMIZERS = {
    "adamw": Optimizer(fzero.optim.adamw(3e-3), adamw, False),
    "sgd": Optimizer(SGD, sgd, True),
    "adamw_clipped": Optimizer(fzero.optim.adamw(3e-3), adamw, False, clip_norm=0.5),
    "sgd_clipped": Optimizer(SGD, sgd, True, clip_norm=0.5),
}
CASES = [(model, name) for model in MODELS for name in ("adamw", "sgd")]
CASES += [("gpt", "adamw_clipped"), ("mlp", "adamw_clipped"), ("conv", "sgd_clipped")]


class Plain(NamedTuple):
    """What plain PyTorch did: losses, parameters by path, and the share of steps whose gradients were clipped."""

    losses: list[float]
    params: dict[str, Tensor]
    clipped: float


@pytest.fixture
def steps(whole: bool) -> int:
    return 20 if whole else 8


@cache
def plain(model: str, optimizer: str, world: int, steps: int) -> Plain:
    init, loss_fn, batch = MODELS[model]
    _, torch_optimizer, _, clip_norm = OPTIMIZERS[optimizer]
    paths, leaves, structure = tree.flatten(init(fzero.random.key(0)))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    stepper = torch_optimizer(leaves)
    losses, clipped = [], 0
    for step in range(steps):
        whole = tree.map(lambda *parts: torch.cat(parts), *(batch(rank, step) for rank in range(world)))
        stepper.zero_grad()
        loss = loss_fn(tree.unflatten(structure, leaves), whole)
        loss.backward()
        if clip_norm is not None:
            clipped += int(torch.nn.utils.clip_grad_norm_(leaves, clip_norm) > clip_norm)
        stepper.step()
        losses.append(loss.item())
    return Plain(losses, {p: leaf.detach() for p, leaf in zip(paths, leaves, strict=True)}, clipped / steps)


def start(model: str) -> Any:
    return MODELS[model].init(fzero.random.key(0))


def spec(model: str, optimizer: str, zero: Any, microbatches: int) -> fzero.Spec:
    return fzero.Spec(
        loss=MODELS[model].loss,
        optimizer=OPTIMIZERS[optimizer].tx,
        clip_norm=OPTIMIZERS[optimizer].clip_norm,
        zero=zero,
        microbatches=microbatches,
        bucket_bytes=8192,  # several buckets even in these models
    )


def check(expected: Plain, losses: list[float], final: dict[str, Tensor], leafwise: bool, what: str) -> None:
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected.losses, strict=True))
    assert worst <= TOLERANCE, f"{what}: the loss differs by {worst:.1e}"
    found = {path: final[f"params/{path}"] for path in expected.params}
    both = [torch.cat([tree_of[path].flatten() for path in expected.params]) for tree_of in (found, expected.params)]
    assert relative(*both) <= TOLERANCE, f"{what}: the parameters differ by {relative(*both):.1e}"
    if leafwise:
        for path, value in expected.params.items():
            assert relative(found[path], value) <= TOLERANCE, f"{what}: {path} by {relative(found[path], value):.1e}"


def grid(model: str, optimizer: str, world: int) -> list[tuple[int, int]]:
    """(zero, microbatches): all of them for the MLP with SGD; else every stage, the microbatches taking turns.

    A world of one shards nothing under any stage.
    """
    if (model, optimizer) == ("mlp", "sgd"):
        return [(zero, k) for zero in STAGES for k in (1, 4)]
    if world == 1:
        return [(0, 1), (3, 4)]
    return [(zero, (1, 4)[(zero + world // 2) % 2]) for zero in STAGES]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("model", "optimizer"), CASES)
@pytest.mark.sampled(1)
def test_programs_train_as_torch_does(model: str, optimizer: str, world: int, steps: int) -> None:
    expected = plain(model, optimizer, world, steps)
    if OPTIMIZERS[optimizer].clip_norm is not None:
        assert expected.clipped > 0.5, "the norm must be above the bound, or clipping is not tested"
    first = dict(zip(*tree.flatten(start(model))[:2], strict=True))
    assert min(relative(expected.params[path], first[path]) for path in first) > 1e-3, "every leaf must have moved"
    for zero, microbatches in grid(model, optimizer, world):
        made = spec(model, optimizer, zero, microbatches)
        result = run(made, start(model), MODELS[model].batch, world=world, steps=steps)
        what = f"zero={zero} microbatches={microbatches}"
        check(expected, result.losses(), result.final, OPTIMIZERS[optimizer].leafwise, what)


@pytest.mark.parametrize("model", ["gpt", "untied"])
@pytest.mark.sampled(1)
def test_path_rules_train_as_torch_does(model: str, steps: int) -> None:
    rules = {r: stage for r, stage in MIXED.items() if r == "**" or any(tree.matches(r, p) for p in paths(model))}
    assert len(rules) > 1
    result = run(spec(model, "sgd", rules, 4), start(model), MODELS[model].batch, world=4, steps=steps)
    assert {stage_of(bucket) for bucket in result.lowered.plan.buckets.values()} == set(rules.values())
    check(plain(model, "sgd", 4, steps), result.losses(), result.final, True, str(rules))


def paths(model: str) -> list[str]:
    return tree.flatten(start(model))[0]


@pytest.mark.parametrize(("world", "microbatches"), [(1, 4), (3, 2)])
@pytest.mark.parametrize(("model", "optimizer"), [("gpt", "adamw_clipped"), ("mlp", "sgd"), ("conv", "sgd_clipped")])
@pytest.mark.sampled(1)
def test_reference_trains_as_torch_does_and_programs_as_reference(
    model: str, optimizer: str, world: int, microbatches: int, steps: int
) -> None:
    batch, leafwise = MODELS[model].batch, OPTIMIZERS[optimizer].leafwise
    made = spec(model, optimizer, 3, microbatches)
    result = run(made, start(model), batch, world=world, steps=steps)
    final, metrics = run_reference(made, start(model), batch, world=world, steps=steps, graph=result.lowered.graph)
    losses = [float(m["loss"]) for m in metrics]
    check(plain(model, optimizer, world, steps), losses, final, leafwise, "reference")
    known = Plain(losses, {path: final[f"params/{path}"] for path in paths(model)}, 0.0)
    check(known, result.losses(), result.final, leafwise, "the program beside the reference")


def test_moments_and_count_are_torchs_too(steps: int) -> None:
    """The optimizer's state, not only its effect: what a checkpoint would hand to torch and back."""
    init, loss_fn, batch = MODELS["mlp"]
    result = run(spec("mlp", "adamw", 3, 1), start("mlp"), batch, world=2, steps=steps)
    _, leaves, structure = tree.flatten(init(fzero.random.key(0)))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    stepper = adamw(leaves)
    for step in range(steps):
        stepper.zero_grad()
        whole = tree.map(lambda *parts: torch.cat(parts), batch(0, step), batch(1, step))
        loss_fn(tree.unflatten(structure, leaves), whole).backward()
        stepper.step()
    assert int(result.final["opt_state/count"]) == steps
    for path, leaf in zip(paths("mlp"), leaves, strict=True):
        for ours, theirs in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            gap = relative(result.final[f"opt_state/{ours}/{path}"], stepper.state[leaf][theirs])
            assert gap <= 1e-4, f"{ours} of {path} differs by {gap:.1e}"
