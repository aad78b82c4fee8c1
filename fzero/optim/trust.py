"""Trust ratios: LAMB and LARS, whose steps are as long as a leaf's parameters say (You et al. 2017, 2020).

    trust ratio of a leaf:  coefficient * |p| / (|u| + eps),  and 1 where |p| or |u| is 0

    lamb:  u  = mu / (1 - beta1^t) / (sqrt(nu / (1 - beta2^t)) + eps) + weight_decay * p      (moments as Adam's)
           p <- p - learning_rate * ratio * u

    lars:  u  = g + weight_decay * p
           b <- momentum * b + learning_rate * ratio * u                                      (b starts at 0)
           p <- p - b

Formulas and defaults are optax's. |x| is the L2 norm of a whole leaf, summed in float64. On a mesh that is one sum over
a rank's own slice and one all-reduce of the scalars; no leaf is gathered.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import SpecError
from fzero.optim import _check
from fzero.optim._named import named
from fzero.optim.adam import AdamState
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.simple import add_decayed_weights, scale_by_schedule, trace
from fzero.optim.transform import (
    GradientTransformation,
    Mask,
    PyTree,
    chain,
    masked,
    plus_scaled,
    selected,
    sum_squares,
)


def scale_by_trust_ratio(
    coefficient: float = 1.0, eps: float = 0.0, bounds: tuple[float, float] | None = None
) -> GradientTransformation:
    """Multiplies each leaf by `coefficient * |p| / (|g| + eps)`, or by 1 where |p| or |g| is 0; dtypes are kept.

    coefficient, eps: numbers. bounds: the minimum and the maximum ratio. Raises `SpecError` for a value out of range,
    and `TreeError` for gradients unlike params.

    >>> tx = scale_by_trust_ratio()
    >>> tx.update([torch.tensor([3.0, 4.0])], (), [torch.tensor([0.0, 1.0])])[0]
    [tensor([0.6000, 0.8000])]
    """
    coefficient = _check.number("scale_by_trust_ratio: coefficient", coefficient, above=True)
    eps = _check.number("scale_by_trust_ratio: eps", eps)
    low, high = _bounds("scale_by_trust_ratio", bounds)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        leaves = _check.alike("scale_by_trust_ratio", "grads", grads, params, dtypes=False)
        _, old, structure = tree.flatten(params)

        def scaled(g: Tensor, p: Tensor) -> Tensor:
            size, length = sum_squares(p).sqrt(), sum_squares(g).sqrt()
            ratio = coefficient * size / (length + eps)
            ratio = torch.where((size > 0) & (length > 0), ratio.clamp(low, high), torch.ones_like(ratio))
            return (g * ratio).to(g.dtype)  # a 0-d leaf would become float64

        return tree.unflatten(structure, [scaled(g, p) for g, p in zip(leaves, old, strict=True)]), state

    return GradientTransformation(lambda params: (), update)


@named
def lamb(
    learning_rate: float | Tensor | Schedule,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float | Tensor = 0.0,
    mask: Mask | None = None,
    bounds: tuple[float, float] | None = None,
) -> GradientTransformation:
    """LAMB. Moments as Adam's, and a trust ratio for each leaf.

    learning_rate: a number or a schedule. betas, eps: numbers. weight_decay: a number; it and the rate may be scalar
    tensors. mask: the leaves that decay. bounds: the minimum and the maximum trust ratio.

    Raises `SpecError` for a
    value out of range or of the wrong type, and `TreeError` for params that are not floating-point tensors or gradients
    unlike them.

    >>> tx, params = lamb(0.1), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update({"w": torch.tensor([1.0, -1.0])}, tx.init(params), params)[0]
    {'w': tensor([-0.3536,  0.3536])}
    """
    return chain(
        _adam_direction("lamb", betas, eps, weight_decay, mask),
        scale_by_trust_ratio(bounds=bounds),
        _descent("lamb", learning_rate),
    )


@named
def lars(
    learning_rate: float | Tensor | Schedule,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float | Tensor = 0.0,
    mask: Mask | None = None,
    trust_coefficient: float = 1e-3,
    eps: float = 0.0,
) -> GradientTransformation:
    """LARS. Momentum SGD, with a trust ratio for each leaf.

    learning_rate: a number or a schedule. momentum, trust_coefficient, eps: numbers. nesterov: a bool. weight_decay: a
    number; it and the rate may be scalar tensors. mask: the leaves that decay and have a trust ratio; the others take
    plain momentum steps.

    Raises `SpecError` for a
    value out of range or of the wrong type, and `TreeError` for params that are not floating-point tensors or gradients
    unlike them.

    >>> tx, params = lars(1.0, trust_coefficient=0.1), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update({"w": torch.tensor([0.0, 2.0])}, tx.init(params), params)[0]
    {'w': tensor([ 0.0000, -0.5000])}
    """
    ratio = scale_by_trust_ratio(trust_coefficient, eps)
    return chain(
        add_decayed_weights(weight_decay, mask),
        ratio if mask is None else masked(ratio, mask),
        _descent("lars", learning_rate),
        trace(momentum, nesterov),
    )


def _descent(where: str, learning_rate: float | Tensor | Schedule) -> GradientTransformation:
    schedule = as_schedule(where, learning_rate)
    return scale_by_schedule(lambda count: -schedule(count))


def _adam_direction(
    where: str, betas: tuple[float, float], eps: float, weight_decay: float | Tensor, mask: Mask | None
) -> GradientTransformation:
    """Adam's direction, with decoupled weight decay and without a learning rate."""
    beta1, beta2 = _check.two_betas(where, betas)
    eps = _check.number(f"{where}: eps", eps, above=True)
    decay = _check.hyper(f"{where}: weight_decay", weight_decay)

    def init(params: PyTree) -> AdamState:
        _check.trainable(where, params)
        selected(where, mask, params)
        return AdamState(_check.zero_count(params), *(tree.map(torch.zeros_like, params) for _ in range(2)))

    def update(grads: PyTree, state: AdamState, params: PyTree) -> tuple[PyTree, AdamState]:
        _, old, structure = tree.flatten(params)
        grad = _check.alike(where, "grads", grads, params)
        mu, nu = (_check.alike(where, name, getattr(state, name), params) for name in ("mu", "nu"))
        count = state.count + 1
        first, second = (1 - beta ** count.to(torch.float64) for beta in (beta1, beta2))  # one scalar for all leaves
        mu = [torch.lerp(m, g, 1 - beta1) for m, g in zip(mu, grad, strict=True)]
        nu = [torch.addcmul(v * beta2, g, g, value=1 - beta2) for v, g in zip(nu, grad, strict=True)]
        updates = []
        for p, m, v, chosen in zip(old, mu, nu, selected(where, mask, params), strict=True):
            u = (m / first / ((v / second).sqrt() + eps)).to(p.dtype)
            updates.append(plus_scaled(u, p, decay) if chosen else u)
        state = AdamState(count, tree.unflatten(structure, mu), tree.unflatten(structure, nu))
        return tree.unflatten(structure, updates), state

    return GradientTransformation(init, update)


def _bounds(where: str, bounds: tuple[float, float] | None) -> tuple[float, float]:
    if bounds is None:
        return 0.0, math.inf
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise SpecError(f"{where}: bounds is {bounds!r}, but it must be two numbers: write bounds=(0.01, 10.0)")
    low, high = (_check.number(f"{where}: bounds[{i}]", bound) for i, bound in enumerate(bounds))
    if low > high:
        raise SpecError(f"{where}: bounds is {bounds!r}, but the least must come first: write bounds=({high}, {low})")
    return low, high
