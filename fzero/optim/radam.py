"""RAdam, Adam with a rectified variance, as `torch.optim.RAdam` computes it (Liu et al. 2020).

With step number t = 1, 2, ..., learning rate a, and r_inf = 2 / (1 - beta2) - 1:

    g  <- g + weight_decay * p        or, decoupled,  p <- p - a * weight_decay * p
    mu <- beta1 * mu + (1 - beta1) * g
    nu <- beta2 * nu + (1 - beta2) * g^2
    r   = r_inf - 2 t beta2^t / (1 - beta2^t)
    f   = sqrt((r - 4) (r - 2) r_inf / ((r_inf - 4) (r_inf - 2) r))
    p  <- p - a * mu / (1 - beta1^t) * f * sqrt(1 - beta2^t) / (sqrt(nu) + eps)      if r > 5
    p  <- p - a * mu / (1 - beta1^t)                                                 otherwise

All of it is pointwise arithmetic: it stays flat under every stage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.optim import _check
from fzero.optim._named import named
from fzero.optim._two_moments import moved, zeros
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import GradientTransformation, PyTree


class RadamState(NamedTuple):
    """`count`: updates made so far, scalar int64. `mu`, `nu`: first and second moments, each a pytree like params.

    >>> radam(0.1).init([torch.ones(1)])
    RadamState(count=tensor(0), mu=[tensor([0.])], nu=[tensor([0.])])
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    mu: PyTree
    nu: PyTree


@named
def radam(
    learning_rate: float | Tensor | Schedule,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.0,
    decoupled_weight_decay: bool = False,
) -> GradientTransformation:
    """RAdam; `weight_decay` is an L2 term, or AdamW's with `decoupled_weight_decay`.

    learning_rate: a number or a schedule. weight_decay: a number; it and the rate may be scalar tensors.
    betas, eps, decoupled_weight_decay: as in `torch.optim.RAdam`.

    Raises `SpecError` for a
    value out of range or of the wrong type, and `TreeError` for params that are not floating-point tensors or gradients
    unlike them.

    >>> tx, params = radam(0.1), {"w": torch.tensor([1.0, -1.0])}
    >>> tx.update({"w": torch.tensor([2.0, -3.0])}, tx.init(params), params)[0]
    {'w': tensor([-0.2000,  0.3000])}
    """
    schedule = as_schedule("radam", learning_rate)
    beta1, beta2 = _check.two_betas("radam", betas)
    eps = _check.number("radam: eps", eps, above=True)
    decay = _check.hyper("radam: weight_decay", weight_decay)
    _check.flag("radam: decoupled_weight_decay", decoupled_weight_decay)
    most = 2 / (1 - beta2) - 1

    def init(params: PyTree) -> RadamState:
        _check.trainable("radam", params)
        return RadamState(_check.zero_count(params), *zeros(params))

    def update(grads: PyTree, state: RadamState, params: PyTree) -> tuple[PyTree, RadamState]:
        count, rate = state.count + 1, schedule(state.count)
        # scalars for all leaves, or their work would not be one op on a mesh
        t = count.to(torch.float64)
        length = most - 2 * t * beta2**t / (1 - beta2**t)
        square = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
        rectified, factor = length > 5, (square.clamp(min=0) * (1 - beta2**t)).sqrt()

        def direction(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return torch.where(rectified, m * factor / (v.sqrt() + eps), m)

        updates, mu, nu = moved(
            "radam", grads, state, params, betas=(beta1, beta2), decay=decay, decoupled=decoupled_weight_decay,
            rate=rate, descent=-rate / (1 - beta1**t), direction=direction,
        )  # fmt: skip
        return updates, RadamState(count, mu, nu)

    return GradientTransformation(init, update)
