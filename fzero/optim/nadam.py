"""NAdam, Adam with Nesterov's momentum, as `torch.optim.NAdam` computes it (Dozat 2016).

With step number t = 1, 2, ..., learning rate a and the decays m(t) = beta1 * (1 - 0.96^(t * momentum_decay) / 2):

    g  <- g + weight_decay * p        or, decoupled,  p <- p - a * weight_decay * p
    mu <- beta1 * mu + (1 - beta1) * g
    nu <- beta2 * nu + (1 - beta2) * g^2
    q  <- q * m(t)                                                        (q starts at 1)
    d   = (1 - m(t)) / (1 - q) * g + m(t+1) / (1 - q * m(t+1)) * mu
    p  <- p - a * d / (sqrt(nu / (1 - beta2^t)) + eps)

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


class NadamState(NamedTuple):
    """`count`: updates made so far, scalar int64. `product`: of the momentum decays so far, scalar float64. `mu`, `nu`:
    first and second moments, each a pytree like params.

    >>> nadam(0.1).init([torch.ones(1)])
    NadamState(count=tensor(0), product=tensor(1., dtype=torch.float64), mu=[tensor([0.])], nu=[tensor([0.])])
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    product: Tensor
    mu: PyTree
    nu: PyTree


@named
def nadam(
    learning_rate: float | Tensor | Schedule,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
) -> GradientTransformation:
    """NAdam; `weight_decay` is an L2 term, or AdamW's with `decoupled_weight_decay`.

    learning_rate: a number or a schedule. weight_decay: a number; it and the rate may be scalar tensors.
    betas, eps, momentum_decay, decoupled_weight_decay: as in `torch.optim.NAdam`.

    Raises `SpecError` for a
    value out of range or of the wrong type, and `TreeError` for params that are not floating-point tensors or gradients
    unlike them.

    >>> tx, params = nadam(0.1), {"w": torch.tensor([1.0, -1.0])}
    >>> tx.update({"w": torch.tensor([2.0, -3.0])}, tx.init(params), params)[0]
    {'w': tensor([-0.1056,  0.1056])}
    """
    schedule = as_schedule("nadam", learning_rate)
    beta1, beta2 = _check.two_betas("nadam", betas)
    eps = _check.number("nadam: eps", eps, above=True)
    decay = _check.hyper("nadam: weight_decay", weight_decay)
    slowing = _check.number("nadam: momentum_decay", momentum_decay)
    _check.flag("nadam: decoupled_weight_decay", decoupled_weight_decay)

    def momentum(step: Tensor) -> Tensor:
        return beta1 * (1 - 0.5 * 0.96 ** (step * slowing))

    def init(params: PyTree) -> NadamState:
        _check.trainable("nadam", params)
        count = _check.zero_count(params)
        return NadamState(count, torch.ones((), dtype=torch.float64, device=count.device), *zeros(params))

    def update(grads: PyTree, state: NadamState, params: PyTree) -> tuple[PyTree, NadamState]:
        count, rate = state.count + 1, schedule(state.count)
        t = count.to(torch.float64)
        product, ahead = state.product * momentum(t), momentum(t + 1)
        # scalars for all leaves, or their work would not be one op on a mesh
        by_grad, by_mu = (1 - momentum(t)) / (1 - product), ahead / (1 - product * ahead)
        correction = 1 - beta2**t

        def direction(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return (g * by_grad + m * by_mu) / ((v / correction).sqrt() + eps)

        updates, mu, nu = moved(
            "nadam", grads, state, params, betas=(beta1, beta2), decay=decay, decoupled=decoupled_weight_decay,
            rate=rate, descent=-rate, direction=direction,
        )  # fmt: skip
        return updates, NadamState(count, product, mu, nu)

    return GradientTransformation(init, update)
