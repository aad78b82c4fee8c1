"""Lion: the sign of an interpolated momentum (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

    c  <- beta1 * mu + (1 - beta1) * g
    p  <- p - learning_rate * (sign(c) + weight_decay * p)
    mu <- beta2 * mu + (1 - beta2) * g

Every element moves by the learning rate. So use a third to a tenth of AdamW's learning rate, and as much more weight
decay. There is one moment per parameter. All of it is pointwise arithmetic: it stays flat under every stage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.optim import _check, _moments
from fzero.optim._named import named
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import GradientTransformation, Mask, PyTree, selected


class LionState(NamedTuple):
    """`count`: updates made so far, scalar int64. `mu`: the momentum, a pytree like params, as `moments=` keeps it.

    >>> lion(1e-4).init({"w": torch.ones(2)})
    LionState(count=tensor(0), mu={'w': tensor([0., 0.])})
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    mu: PyTree


@named
def lion(
    learning_rate: float | Tensor | Schedule,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float | Tensor = 0.0,
    mask: Mask | None = None,
    moments: str | None = None,
) -> GradientTransformation:
    """Lion: steps by the sign of a momentum.

    learning_rate: a number or a schedule. betas, weight_decay: numbers. mask: the leaves that decay. moments: None,
    "float32" or "bfloat16", as in `adamw`.

    Raises `SpecError` for a value out of range or of the wrong type, and `TreeError` for params that are not
    floating-point tensors or gradients unlike them.

    >>> tx, params = lion(0.1), {"w": torch.tensor([1.0, -1.0])}
    >>> tx.update({"w": torch.tensor([2.0, -0.03])}, tx.init(params), params)[0]
    {'w': tensor([-0.1000,  0.1000])}
    """
    schedule = as_schedule("lion", learning_rate)
    beta1, beta2 = _check.two_betas("lion", betas)
    decay = _check.hyper("lion: weight_decay", weight_decay)
    kind = _moments.moments("lion", moments)

    def init(params: PyTree) -> LionState:
        _check.trainable("lion", params)
        selected("lion", mask, params)
        return LionState(_check.zero_count(params), tree.map(kind.zeros, params))

    def update(grads: PyTree, state: LionState, params: PyTree) -> tuple[PyTree, LionState]:
        _, old, structure = tree.flatten(params)
        grad = _check.alike("lion", "grads", grads, params, dtypes=kind.dtype is None)
        mu = kind.held("lion", "mu", state.mu, params)
        count, descent = state.count + 1, -schedule(state.count)
        old, grad, mu = (kind.wide(tensors, old) for tensors in (old, grad, mu))
        updates = []
        for p, g, m, chosen in zip(old, grad, mu, selected("lion", mask, params), strict=True):
            direction = torch.sign(torch.add(m * beta1, g, alpha=1 - beta1))
            if chosen and not (isinstance(decay, float) and decay == 0.0):
                direction = direction + p * decay
            updates.append((direction * descent).to(p.dtype))  # a 0-d leaf would become float64
        mu = [torch.add(m * beta2, g, alpha=1 - beta2) for g, m in zip(grad, mu, strict=True)]
        mu = kind.stored(mu, count + _moments.FIRST)
        return tree.unflatten(structure, updates), LionState(count, tree.unflatten(structure, mu))

    return GradientTransformation(init, update)
