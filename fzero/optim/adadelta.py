"""Adadelta, as `torch.optim.Adadelta` computes it (Zeiler 2012).

    g  <- g + weight_decay * p
    nu <- rho * nu + (1 - rho) * g^2
    d   = sqrt(mean + eps) / sqrt(nu + eps) * g       (mean: of the steps before)
    mean <- rho * mean + (1 - rho) * d^2
    p  <- p - learning_rate * d

All of it is pointwise arithmetic: it stays flat under every stage. State: two tensors per parameter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.optim import _check
from fzero.optim._named import named
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import GradientTransformation, PyTree, plus_scaled


class AdadeltaState(NamedTuple):
    """`count`: updates made so far, scalar int64. `nu`, `mean`: moving averages of squared gradients and of squared
    steps, each a pytree like params.

    >>> adadelta().init({"w": torch.ones(2)})
    AdadeltaState(count=tensor(0), nu={'w': tensor([0., 0.])}, mean={'w': tensor([0., 0.])})
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    nu: PyTree
    mean: PyTree


@named
def adadelta(
    learning_rate: float | Tensor | Schedule = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float | Tensor = 0.0,
) -> GradientTransformation:
    """Adadelta; `weight_decay` is an L2 term. A step has the size of the steps before, so 1 is the usual rate.

    learning_rate: a number or a schedule. rho, eps: as in `torch.optim.Adadelta`. weight_decay: a number; it and the
    rate may be scalar tensors.

    Raises `SpecError` for a
    value out of range or of the wrong type, and `TreeError` for params that are not floating-point tensors or gradients
    unlike them.

    >>> tx, params = adadelta(rho=0.75, eps=1.0), {"w": torch.tensor([1.0])}
    >>> tx.update({"w": torch.tensor([2.0])}, tx.init(params), params)[0]
    {'w': tensor([-1.4142])}
    """
    schedule = as_schedule("adadelta", learning_rate)
    rho = _check.number("adadelta: rho", rho, high=1.0)
    eps = _check.number("adadelta: eps", eps, above=True)
    decay = _check.hyper("adadelta: weight_decay", weight_decay)

    def init(params: PyTree) -> AdadeltaState:
        _check.trainable("adadelta", params)
        zeros = (tree.map(torch.zeros_like, params) for _ in range(2))
        return AdadeltaState(_check.zero_count(params), *zeros)

    def update(grads: PyTree, state: AdadeltaState, params: PyTree) -> tuple[PyTree, AdadeltaState]:
        _, old, structure = tree.flatten(params)
        grad = _check.alike("adadelta", "grads", grads, params)
        nu, mean = (_check.alike("adadelta", name, getattr(state, name), params) for name in ("nu", "mean"))
        grad = [plus_scaled(g, p, decay) for g, p in zip(grad, old, strict=True)]
        nu = [torch.addcmul(v * rho, g, g, value=1 - rho) for v, g in zip(nu, grad, strict=True)]
        steps = [(m + eps).sqrt() / (v + eps).sqrt() * g for m, v, g in zip(mean, nu, grad, strict=True)]
        mean = [torch.addcmul(m * rho, d, d, value=1 - rho) for m, d in zip(mean, steps, strict=True)]
        descent = -schedule(state.count)
        updates = [(d * descent).to(d.dtype) for d in steps]  # a 0-d leaf would become float64
        new = (tree.unflatten(structure, leaves) for leaves in (nu, mean))
        return tree.unflatten(structure, updates), AdadeltaState(state.count + 1, *new)

    return GradientTransformation(init, update)
