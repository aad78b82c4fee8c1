"""hf_adafactor: Adafactor as `transformers.Adafactor` computes it (5.23), which torch's and fzero's own differ from.

With t = 1, 2, ... and b = t^decay_rate, of a leaf with rows and columns (the last two dims; of a vector v = nu):

    s   =  g^2 + eps[0]
    row <- (1 - b) row + b mean_columns(s);   col <- (1 - b) col + b mean_rows(s);   v = row col^T / mean(row)
    u   =  g / sqrt(v);   u <- u / max(1, rms(u) / clip_threshold)
    a   =  rate * (max(eps[1], rms(p)) if scale_parameter else 1)
    p   <- p - a * weight_decay * p - a * u

The rate is the schedule's, or with relative_step min(1e-2, 1 / sqrt(t)), whose 1e-2 is 1e-6 t with warmup_init. The
state is that of `fzero.optim.adafactor`, so it lies on a mesh as that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero import optim, tree
from fzero.optim import AdafactorState, GradientTransformation, Schedule
from fzero.optim.transform import sum_squares


def adafactor(
    schedule: Schedule,
    eps: tuple[float, float] = (1e-30, 1e-3),
    clip_threshold: float = 1.0,
    decay_rate: float = -0.8,
    scale_parameter: bool = True,
    relative_step: bool = True,
    warmup_init: bool = False,
    weight_decay: float = 0.0,
    mask: Callable[[str, Tensor], bool] | None = None,
) -> GradientTransformation:
    """transformers' Adafactor without `beta1`; names and defaults are its. mask: the leaves that are decayed.

    >>> tx, params = adafactor(lambda count: torch.tensor(0.1), relative_step=False), {"w": torch.ones(2, 2)}
    >>> tx.update({"w": torch.ones(2, 2)}, tx.init(params), params)[0]["w"][0]
    tensor([-0.1000, -0.1000])
    """

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        paths, leaves, structure = tree.flatten(params)
        count = state.count + 1
        step = count.to(torch.float64)
        rate = schedule(state.count)
        if relative_step:
            most = step * 1e-6 if warmup_init else torch.full_like(step, 1e-2)
            rate = torch.minimum(most, step**-0.5)
        parts = [structure.flatten_up_to(part) for part in (state.row, state.col, state.nu)]
        updates, moments = [], []
        for path, p, g, *held in zip(paths, leaves, tree.flatten(grads)[1], *parts, strict=True):
            u, new = _direction(g, held, (step**decay_rate).to(g.dtype), eps[0])
            scale = torch.clamp(_rms(p), min=eps[1]) * rate if scale_parameter else rate
            moved = u * (scale / torch.clamp(_rms(u) / clip_threshold, min=1.0))
            decays = weight_decay and (mask is None or mask(path, p))
            updates.append((-moved - p * (scale * weight_decay) if decays else -moved).to(p.dtype))
            moments.append(new)
        row, col, nu = (tree.unflatten(structure, [new[i] for new in moments]) for i in range(3))
        return tree.unflatten(structure, updates), AdafactorState(count, row, col, nu)

    return GradientTransformation(optim.adafactor().init, update)


def _direction(g: Tensor, held: list[Tensor], newest: Tensor, eps: float) -> tuple[Tensor, list[Tensor | None]]:
    """(the gradient over the root of its second moment, the new moments)."""
    squares = g * g + eps
    if g.dim() < 2:
        nu = torch.lerp(held[2], squares, newest)
        return nu.rsqrt() * g, [None, None, nu]
    rows, cols = g.shape[-2:]
    row = torch.lerp(held[0], squares.sum(-1) / cols, newest)
    col = torch.lerp(held[1], squares.sum(-2) / rows, newest)
    mean = row.sum(-1) / rows
    return (row / mean[..., None]).rsqrt().unsqueeze(-1) * col.rsqrt().unsqueeze(-2) * g, [row, col, None]


def _rms(x: Tensor) -> Tensor:
    return torch.sqrt(sum_squares(x) / max(x.numel(), 1))
