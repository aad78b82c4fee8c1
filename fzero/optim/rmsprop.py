"""RMSprop, as `torch.optim.RMSprop` computes it (Tieleman and Hinton 2012; centred: Graves 2013).

    g  <- g + weight_decay * p
    nu <- alpha * nu + (1 - alpha) * g^2
    mu <- alpha * mu + (1 - alpha) * g            if centered
    d   = g / (sqrt(nu - mu^2) + eps)             if centered,  g / (sqrt(nu) + eps)  otherwise
    b  <- momentum * b + d                        if momentum
    p  <- p - learning_rate * b                   if momentum,  p - learning_rate * d  otherwise

All of it is pointwise arithmetic: it stays flat under every stage. State: one tensor per parameter, one more if
centred, and one more with momentum.
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


class RmspropState(NamedTuple):
    """`count`: updates made so far, scalar int64. `nu`, `mu`, `momentum`: pytrees like params; `mu` is None unless
    centred, `momentum` None without momentum.

    >>> rmsprop(0.1).init({"w": torch.ones(2)})
    RmspropState(count=tensor(0), nu={'w': tensor([0., 0.])}, mu=None, momentum=None)
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    nu: PyTree
    mu: PyTree | None
    momentum: PyTree | None


@named
def rmsprop(
    learning_rate: float | Tensor | Schedule,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> GradientTransformation:
    """RMSprop; `weight_decay` is an L2 term.

    learning_rate: a number or a schedule. weight_decay: a number; it and the rate may be scalar tensors that the step
    computes. alpha, eps, momentum, centered: as in `torch.optim.RMSprop`.

    Raises `SpecError` for a value out
    of range or of the wrong type, and `TreeError` for params that are not floating-point tensors or gradients unlike
    them.

    >>> tx, params = rmsprop(0.1, alpha=0.75), {"w": torch.tensor([1.0])}
    >>> tx.update({"w": torch.tensor([2.0])}, tx.init(params), params)[0]
    {'w': tensor([-0.2000])}
    """
    schedule = as_schedule("rmsprop", learning_rate)
    alpha = _check.number("rmsprop: alpha", alpha, high=1.0)
    eps = _check.number("rmsprop: eps", eps, above=True)
    decay = _check.hyper("rmsprop: weight_decay", weight_decay)
    momentum = _check.number("rmsprop: momentum", momentum, high=1.0)
    _check.flag("rmsprop: centered", centered)

    def init(params: PyTree) -> RmspropState:
        _check.trainable("rmsprop", params)
        nu, mu, held = (tree.map(torch.zeros_like, params) if kept else None for kept in (True, centered, momentum))
        return RmspropState(_check.zero_count(params), nu, mu, held)

    def update(grads: PyTree, state: RmspropState, params: PyTree) -> tuple[PyTree, RmspropState]:
        _, old, structure = tree.flatten(params)
        grad = _check.alike("rmsprop", "grads", grads, params)
        grad = [plus_scaled(g, p, decay) for g, p in zip(grad, old, strict=True)]
        nu = _check.alike("rmsprop", "nu", state.nu, params)
        nu = [torch.addcmul(v * alpha, g, g, value=1 - alpha) for v, g in zip(nu, grad, strict=True)]
        mu, held, spread = None, None, nu
        if centered:
            mu = _check.alike("rmsprop", "mu", state.mu, params)
            mu = [torch.lerp(m, g, 1 - alpha) for m, g in zip(mu, grad, strict=True)]
            spread = [torch.addcmul(v, m, m, value=-1) for v, m in zip(nu, mu, strict=True)]
        direction = [g / (v.sqrt() + eps) for g, v in zip(grad, spread, strict=True)]
        if momentum:
            held = _check.alike("rmsprop", "momentum", state.momentum, params)
            held = direction = [torch.add(d, b, alpha=momentum) for d, b in zip(direction, held, strict=True)]
        descent = -schedule(state.count)
        updates = [(d * descent).to(d.dtype) for d in direction]  # a 0-d leaf would become float64
        new = (None if leaves is None else tree.unflatten(structure, leaves) for leaves in (nu, mu, held))
        return tree.unflatten(structure, updates), RmspropState(state.count + 1, *new)

    return GradientTransformation(init, update)
