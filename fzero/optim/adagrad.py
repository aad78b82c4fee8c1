"""Adagrad, as `torch.optim.Adagrad` computes it (Duchi, Hazan and Singer 2011).

    g <- g + weight_decay * p
    s <- s + g^2                                   (s starts at `initial`)
    p <- p - learning_rate / (1 + count * lr_decay) * g / (sqrt(s) + eps)

All of it is pointwise arithmetic: it stays flat under every stage. State: one tensor per parameter.
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


class AdagradState(NamedTuple):
    """`count`: updates made so far, scalar int64. `sum`: sums of squared gradients, a pytree like params.

    >>> adagrad(0.1).init({"w": torch.ones(2)})
    AdagradState(count=tensor(0), sum={'w': tensor([0., 0.])})
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    sum: PyTree


@named
def adagrad(
    learning_rate: float | Tensor | Schedule,
    lr_decay: float = 0.0,
    weight_decay: float | Tensor = 0.0,
    initial: float = 0.0,
    eps: float = 1e-10,
) -> GradientTransformation:
    """Adagrad; `weight_decay` is an L2 term. `initial` is the first value of the sums of squares.

    learning_rate: a number or a schedule. lr_decay, initial, eps: as in `torch.optim.Adagrad`. weight_decay: a number;
    it and the rate may be scalar tensors.

    Raises `SpecError` for a
    value out of range or of the wrong type, and `TreeError` for params that are not floating-point tensors or gradients
    unlike them.

    >>> tx, params = adagrad(0.1), {"w": torch.tensor([1.0])}
    >>> updates, opt_state = tx.update({"w": torch.tensor([3.0])}, tx.init(params), params)
    >>> tx.update({"w": torch.tensor([4.0])}, opt_state, params)[0]
    {'w': tensor([-0.0800])}
    """
    schedule = as_schedule("adagrad", learning_rate)
    lr_decay = _check.number("adagrad: lr_decay", lr_decay)
    decay = _check.hyper("adagrad: weight_decay", weight_decay)
    initial = _check.number("adagrad: initial", initial)
    eps = _check.number("adagrad: eps", eps, above=True)

    def init(params: PyTree) -> AdagradState:
        _check.trainable("adagrad", params)
        return AdagradState(_check.zero_count(params), tree.map(lambda p: torch.full_like(p, initial), params))

    def update(grads: PyTree, state: AdagradState, params: PyTree) -> tuple[PyTree, AdagradState]:
        _, old, structure = tree.flatten(params)
        grad = _check.alike("adagrad", "grads", grads, params)
        grad = [plus_scaled(g, p, decay) for g, p in zip(grad, old, strict=True)]
        sums = _check.alike("adagrad", "sum", state.sum, params)
        sums = [torch.addcmul(s, g, g) for s, g in zip(sums, grad, strict=True)]
        descent = -schedule(state.count) / (1 + state.count.to(torch.float64) * lr_decay)
        updates = [(g / (s.sqrt() + eps) * descent).to(g.dtype) for g, s in zip(grad, sums, strict=True)]
        return tree.unflatten(structure, updates), AdagradState(state.count + 1, tree.unflatten(structure, sums))

    return GradientTransformation(init, update)
