"""oracle: the same training in plain PyTorch, in one process; nothing of fzero.

Gradients come from `torch.autograd.grad`, part of the batch by part, data rank by data rank; their mean, the norm, the
clipping and the update are written out. In 16 bits a product may be cast as model ranks cast it: each rank's share of
the sum is rounded before the shares are added (`SumsInShares`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11.0, 2.13.0

from lab.fuzz_meshes import optimizers
from lab.fuzz_meshes.case import Recipe
from lab.fuzz_meshes.model import Model, flat, mapped

ops = torch.ops.aten
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16_params": torch.bfloat16}


@dataclass
class Step:
    """What one step gives: the loss, the norm of the gradient, and by path the parameters and the moments after it."""

    loss: Tensor
    norm: Tensor
    grads: dict[str, Tensor]
    leaves: dict[str, Tensor] = field(default_factory=dict)


def narrow(recipe: Recipe) -> torch.dtype | None:
    """The 16-bit dtype that the loss is computed in; None where it is computed in that of the parameters."""
    name = recipe.precision if isinstance(recipe.precision, str) else recipe.precision.compute
    return NARROW.get(name)


class SumsInShares(TorchDispatchMode):
    """Computes 16-bit products as `shares` model ranks do: each sums its share of the inner dim and rounds."""

    def __init__(self, shares: int) -> None:
        super().__init__()
        self.shares = shares

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (ops.mm.default, ops.bmm.default):
            return self._product(func, *args)
        if func is ops.addmm.default and not kwargs:
            return args[0] + self._product(ops.mm.default, *args[1:])
        return func(*args, **kwargs or {})

    def _product(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        if a.dtype not in NARROW.values() or a.shape[-1] % self.shares:
            return func(a, b)
        first, *others = map(func, a.chunk(self.shares, -1), b.chunk(self.shares, -2))
        return sum(others, start=first)


def train(
    model: Model, recipe: Recipe, data_ranks: Sequence[int], *, wide: bool = False, shares: int = 1
) -> list[Step]:
    """The steps of a run. data_ranks: of each step. wide: everything in float64, from the values that the run begins
    with. shares: of each sum of a 16-bit product."""
    with SumsInShares(shares) if shares > 1 else nullcontext():
        return _steps(model, recipe, data_ranks, wide)


def _steps(model: Model, recipe: Recipe, data_ranks: Sequence[int], wide: bool) -> list[Step]:
    dtype = torch.float64 if wide else recipe.torch_dtype
    params = mapped(model.params(recipe.torch_dtype), lambda x: _held(recipe, x).to(dtype))
    leaves = flat(params)
    trained = {path: x for path, x in leaves.items() if recipe.trains(path)}
    update = optimizers.TABLE[recipe.optimizer].reference()
    steps, updates = [], 0
    for number, ranks in enumerate(data_ranks):
        bad = number == recipe.bad
        batches = [
            model.batch(place, number, recipe.rows * recipe.microbatches, recipe.torch_dtype, bad)
            for place in range(ranks)
        ]
        batches = [{n: x.to(dtype) if x.is_floating_point() else x for n, x in b.items()} for b in batches]
        loss, grads = _gradients(model, recipe, params, trained, batches, wide)
        norm = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()
        step = Step(loss, norm, grads)
        steps.append(step)
        moments: Any = {}
        if not recipe.skips or math.isfinite(float(norm)):
            moments = update(trained, _clipped(recipe, grads, norm), updates)
            updates += 1
        step.leaves = {f"params/{path}": x.clone() for path, x in leaves.items()}
        for name, held in moments.items():
            step.leaves |= {f"opt_state/{name}/{path}": x.clone() for path, x in held.items()}
    return steps


def _held(recipe: Recipe, x: Tensor) -> Tensor:
    return x.bfloat16() if recipe.precision == "bf16_params" else x


def _gradients(
    model: Model, recipe: Recipe, params: Any, trained: dict[str, Tensor], batches: list[dict[str, Tensor]], wide: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss, the gradients by path) over all data ranks and microbatches."""
    totals: list[Tensor] = []
    counts: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    low = None if wide else narrow(recipe)
    scale = 1.0 if low is not torch.float16 or wide else float(recipe.precision.loss_scale.initial)
    for batch in batches:
        for n in range(recipe.microbatches):
            part = {name: x.chunk(recipe.microbatches)[n] for name, x in batch.items()}
            own = {path: x.detach().clone().requires_grad_() for path, x in trained.items()}
            held = _with(params, own)
            if low is not None:
                held = mapped(held, lambda x: x.to(low))
                part = {name: x.to(low) if x.is_floating_point() else x for name, x in part.items()}
            total, count = model.loss(held, part)
            found = torch.autograd.grad(total * scale, list(own.values()), allow_unused=True)
            for path, g in zip(own, found, strict=True):
                value = torch.zeros_like(own[path]) if g is None else g.to(torch.promote_types(g.dtype, torch.float32))
                sums[path] = value / scale if path not in sums else sums[path] + value / scale
            totals.append(total.detach())
            counts.append(torch.ones(()) if count is None else count.detach())
    wider = torch.promote_types(totals[0].dtype, torch.float32)
    divisor = torch.stack([c.to(wider) for c in counts]).sum()
    loss = torch.stack([t.to(wider) for t in totals]).sum() / divisor
    return loss, {path: g / divisor.to(g.dtype) for path, g in sums.items()}


def _with(params: Any, own: dict[str, Tensor], path: str = "") -> Any:
    """The tree with other leaves, by path."""
    if isinstance(params, dict):
        return {name: _with(x, own, f"{path}/{name}" if path else name) for name, x in params.items()}
    if isinstance(params, list):
        return [_with(x, own, f"{path}/{n}") for n, x in enumerate(params)]
    return own.get(path, params)


def _clipped(recipe: Recipe, grads: dict[str, Tensor], norm: Tensor) -> dict[str, Tensor]:
    if "clip_norm" in recipe.clip:
        factor = (recipe.clip["clip_norm"] / (norm + 1e-6)).clamp(max=1.0)
        return {path: (g * factor).to(g.dtype) for path, g in grads.items()}
    if "clip_value" in recipe.clip:
        return {path: g.clamp(-recipe.clip["clip_value"], recipe.clip["clip_value"]) for path, g in grads.items()}
    return grads
