"""Stochastic gradient descent with momentum, as `torch.optim.SGD` computes it (without dampening).

    g <- g + weight_decay * p
    b <- momentum * b + g                 (b starts at 0, so the first b is g, as in torch)
    d  = g + momentum * b  if nesterov,  b  otherwise
    update = -learning_rate * d

All of it is plain tensor arithmetic, so a loss may differentiate through it (MAML). State: a count for the schedule,
and one tensor per parameter where there is momentum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import SpecError
from fzero.optim import _check
from fzero.optim._named import named
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import FED, GradientTransformation, PyTree, plus_scaled


class SgdState(NamedTuple):
    """`count`: updates made so far, scalar int64. `momentum`: a pytree like params, or None where momentum is 0.

    >>> sgd(0.1).init({"w": torch.ones(2)})
    SgdState(count=tensor(0), momentum=None)
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    momentum: PyTree | None


@named
def sgd(
    learning_rate: float | Tensor | Schedule,
    momentum: float | Schedule = 0.0,
    nesterov: bool = False,
    weight_decay: float | Tensor = 0.0,
) -> GradientTransformation:
    """SGD with momentum, Nesterov's variant and an L2 term.

    learning_rate, momentum: numbers or schedules. nesterov: a bool. weight_decay: a number; it and the rate may be
    scalar tensors that the step computes.

    Raises `SpecError` for a value out
    of range or of the wrong type and for `nesterov` without momentum, and `TreeError` for params that are not
    floating-point tensors or gradients unlike them.

    >>> tx, params = sgd(0.1, momentum=0.9), {"w": torch.tensor([1.0])}
    >>> updates, opt_state = tx.update({"w": torch.tensor([2.0])}, tx.init(params), params)
    >>> tx.update({"w": torch.tensor([2.0])}, opt_state, params)[0]
    {'w': tensor([-0.3800])}
    """
    schedule = as_schedule("sgd", learning_rate)
    keep: float | Schedule
    if callable(momentum):
        keep = as_schedule("sgd", momentum, "momentum")
    else:
        keep = _check.number("sgd: momentum", momentum, high=1.0)
    weight_decay = _check.hyper("sgd: weight_decay", weight_decay)
    if nesterov and not keep:
        raise SpecError("sgd: nesterov needs momentum, which is 0.0: write momentum=0.9, or leave nesterov out")

    def init(params: PyTree) -> SgdState:
        _check.trainable("sgd", params)
        return SgdState(_check.zero_count(params), tree.map(torch.zeros_like, params) if keep else None)

    def update(grads: PyTree, state: SgdState, params: PyTree) -> tuple[PyTree, SgdState]:
        _, old, structure = tree.flatten(params)
        direction = _check.alike("sgd", "grads", grads, params)
        direction = [plus_scaled(g, p, weight_decay) for g, p in zip(direction, old, strict=True)]
        buffers = None
        if keep:
            held = _check.alike("sgd", "momentum", state.momentum, params)
            factor = keep(state.count) if callable(keep) else keep
            moved = [plus_scaled(g, b, factor) for g, b in zip(direction, held, strict=True)]
            buffers = tree.unflatten(structure, moved)
            if nesterov:
                moved = [plus_scaled(g, b, factor) for g, b in zip(direction, moved, strict=True)]
            direction = moved
        descent = -schedule(state.count)
        updates = [(d * descent).to(d.dtype) for d in direction]  # a 0-d leaf would become float64
        return tree.unflatten(structure, updates), SgdState(state.count + 1, buffers)

    return GradientTransformation(init, update, feedback=FED)
