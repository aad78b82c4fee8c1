"""What NAdam and RAdam have in common: two moments, a weight decay in one of two forms, and steps along a direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero import tree
from fzero.optim import _check
from fzero.optim.adam import shrunk
from fzero.optim.transform import PyTree, plus_scaled


def zeros(params: PyTree) -> tuple[PyTree, PyTree]:
    """The first moments of params."""
    return tree.map(torch.zeros_like, params), tree.map(torch.zeros_like, params)


def moved(
    name: str,
    grads: PyTree,
    state: Any,
    params: PyTree,
    *,
    betas: tuple[float, float],
    decay: float | Tensor,
    decoupled: bool,
    rate: Tensor,
    descent: Tensor,
    direction: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[PyTree, PyTree, PyTree]:
    """The updates and the new moments, each a pytree like params.

    direction: from a leaf's gradient and new moments; `descent`, 0-d, times it is the update. decoupled: whether
    parameters shrink by `rate * decay`, instead of an L2 term in the gradient. name: the optimizer's, in errors.
    """
    _, old, structure = tree.flatten(params)
    grad = _check.alike(name, "grads", grads, params)
    mu, nu = (_check.alike(name, field, getattr(state, field), params) for field in ("mu", "nu"))
    (beta1, beta2), shrink = betas, rate * decay  # one scalar for all leaves, or their work is not one op on a mesh
    updates, new_mu, new_nu = [], [], []
    for p, g, m, v in zip(old, grad, mu, nu, strict=True):
        kept = shrunk(p, shrink) if decoupled else p
        g = g if decoupled else plus_scaled(g, p, decay)
        m = torch.lerp(m, g, 1 - beta1)
        v = torch.addcmul(v * beta2, g, g, value=1 - beta2)
        step = (direction(g, m, v) * descent).to(p.dtype)  # a 0-d leaf would become float64
        updates.append(step + (kept - p) if decoupled else step)
        new_mu.append(m)
        new_nu.append(v)
    return tree.unflatten(structure, updates), tree.unflatten(structure, new_mu), tree.unflatten(structure, new_nu)
