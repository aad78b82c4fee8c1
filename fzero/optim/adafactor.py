"""Adafactor: second moments kept as one number per row and one per column, as `torch.optim.Adafactor` computes it.

The step number is t = 1, 2, ..., and b = t^beta2_decay is the weight of the newest gradient. For a leaf of two or more
dimensions (the last two are rows and columns; each mean is over the other one's axis):

    rho <- min(learning_rate, 1 / sqrt(t));   alpha <- max(eps[1], rms(p)) * rho
    row <- (1 - b) row + b mean_columns(g^2);   col <- (1 - b) col + b mean_rows(g^2)
    v   =  row col^T / max(mean(row), eps[0])            (a vector or scalar: nu <- (1 - b) nu + b g^2, v = nu)
    u   =  g / sqrt(max(v, eps[0]^2))
    p   <- p - learning_rate * weight_decay * p - alpha * u / max(1, rms(u) / threshold)

(Shazeer & Stern 2018; the use of eps is torch's, which its documentation explains.) `row` and `col` of an (r, c) leaf
have shapes (r,) and (c,). They, `nu` and the step are in float32 at least, since they cost next to nothing.

On a mesh the factored estimate of a matrix needs all of its gradient, which is gathered under stages 2 and 3. The norm
of a parameter is a sum over slices. Vectors and scalars stay flat, except for two norms. `row` and `col` lie with their
leaf: on its role of a pipeline, and over `tp` as the dims that they have (`fzero.plan.followers`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import SpecError, TreeError
from fzero.optim import _check
from fzero.optim._named import named
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import GradientTransformation, PyTree, _delta, sum_squares


class AdafactorState(NamedTuple):
    """`count`: updates made so far, scalar int64. `row`, `col`: pytrees like params with (..., r) and (..., c) for a
    leaf (..., r, c), and None for vectors and scalars. `nu`: second moments of those, and None for the others.

    >>> adafactor().init([torch.ones(2, 3), torch.ones(1)])
    AdafactorState(count=tensor(0), row=[tensor([0., 0.]), None], col=[tensor([0., 0., 0.]), None], \
nu=[None, tensor([0.])])
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    row: PyTree
    col: PyTree
    nu: PyTree


@named
def adafactor(
    learning_rate: float | Tensor | Schedule = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    threshold: float = 1.0,
    weight_decay: float | Tensor = 0.0,
) -> GradientTransformation:
    """Adafactor; names and defaults are torch's (`threshold` is its `d`).

    learning_rate: bounds the relative step size. beta2_decay, weight_decay, threshold: as in `torch.optim.Adafactor`.
    eps: two numbers; None for the first is the parameter's machine epsilon.

    Updates are
    float32 at least. Raises `SpecError` for a value out of range or of the wrong type, and `TreeError` for params that
    are not floating-point tensors or gradients unlike them.

    >>> tx, params = adafactor(0.1), {"w": torch.ones(2, 2)}
    >>> tx.update({"w": torch.tensor([[1.0, 2.0], [2.0, 4.0]])}, tx.init(params), params)[0]
    {'w': tensor([[-0.1000, -0.1000],
            [-0.1000, -0.1000]])}
    """
    schedule = as_schedule("adafactor", learning_rate)
    beta2_decay = _check.number("adafactor: beta2_decay", beta2_decay, low=-math.inf, above=True)
    if beta2_decay > 0:
        raise SpecError(f"adafactor: beta2_decay is {beta2_decay}, but it must be at most 0, as in torch: write -0.8")
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise SpecError(f"adafactor: eps is {eps!r}, but it must be two: write eps=(None, 1e-3)")
    eps1 = None if eps[0] is None else _check.number("adafactor: eps[0]", eps[0])
    eps2 = _check.number("adafactor: eps[1]", eps[1])
    threshold = _check.number("adafactor: threshold", threshold, low=1.0)
    decay = _check.hyper("adafactor: weight_decay", weight_decay)

    def init(params: PyTree) -> AdafactorState:
        _check.trainable("adafactor", params)
        row, col, nu = (tree.map(lambda p, i=i: _zeros(p)[i], params) for i in range(3))
        return AdafactorState(_check.zero_count(params), row, col, nu)

    def update(grads: PyTree, state: AdafactorState, params: PyTree) -> tuple[PyTree, AdafactorState]:
        paths, old, structure = tree.flatten(params)
        grad = _check.alike("adafactor", "grads", grads, params, dtypes=False)
        count, rate = state.count + 1, schedule(state.count)
        step = count.to(torch.float64)
        newest, rho = step**beta2_decay, torch.minimum(rate, step**-0.5)
        parts = [structure.flatten_up_to(part) for part in (state.row, state.col, state.nu)]
        updates, new_moments, shrink = [], [], rate * decay
        for path, p, g, *held in zip(paths, old, grad, *parts, strict=True):
            _check_held(path, p, held)
            wide = p.to(_work(p))
            floor = torch.finfo(p.dtype).eps if eps1 is None else eps1
            u, moments = _direction(g.to(wide.dtype), held, newest, floor)
            alpha = torch.clamp(_rms(wide), min=eps2) * rho / torch.clamp(_rms(u) / threshold, min=1.0)
            decayed = wide if isinstance(decay, float) and decay == 0.0 else wide - wide * shrink
            updates.append(_delta((decayed - u * alpha).to(wide.dtype), wide))
            new_moments.append(moments)
        row, col, nu = (tree.unflatten(structure, [moments[i] for moments in new_moments]) for i in range(3))
        return tree.unflatten(structure, updates), AdafactorState(count, row, col, nu)

    return GradientTransformation(init, update)


def _work(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _zeros(p: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(row, col, nu) of a parameter, zeros; None for those that its shape does not need."""
    if p.dim() < 2:
        return None, None, torch.zeros_like(p, dtype=_work(p))
    return p.new_zeros(p.shape[:-1], dtype=_work(p)), p.new_zeros((*p.shape[:-2], p.shape[-1]), dtype=_work(p)), None


def _direction(g: Tensor, held: list[Tensor], newest: Tensor, eps: float) -> tuple[Tensor, list[Tensor | None]]:
    """(the gradient over the root of its second moment, the new moments)."""
    weight = newest.to(g.dtype)
    if g.dim() < 2:
        nu = torch.lerp(held[2], g * g, weight)
        return torch.clamp(nu, min=eps * eps).rsqrt() * g, [None, None, nu]
    rows, cols = max(g.shape[-2], 1), max(g.shape[-1], 1)  # an empty leaf has means of nothing: zeros here
    squares = g * g
    row = torch.lerp(held[0], squares.sum(-1) / cols, weight)
    col = torch.lerp(held[1], squares.sum(-2) / rows, weight)
    mean = torch.clamp(row.sum(-1) / rows, min=eps)
    variance = row.unsqueeze(-1) * col.unsqueeze(-2) / mean[..., None, None]
    return torch.clamp(variance, min=eps * eps).rsqrt() * g, [row, col, None]


def _rms(x: Tensor) -> Tensor:
    """The root of the mean square: scalar float64."""
    return torch.sqrt(sum_squares(x) / max(x.numel(), 1))


def _check_held(path: str, p: Tensor, held: list[Tensor | None]) -> None:
    for name, moment, wanted in zip(("row", "col", "nu"), held, _shapes(p), strict=True):
        if (None if moment is None else tuple(moment.shape)) != wanted:
            shown = "None" if moment is None else f"shape {tuple(moment.shape)}"
            raise TreeError(
                f"adafactor: {name}/{path} has {shown}, but params/{path} with shape {tuple(p.shape)} needs {wanted}: "
                "make opt_state with this optimizer's init"
            )


def _shapes(p: Tensor) -> tuple[tuple[int, ...] | None, ...]:
    if p.dim() < 2:
        return None, None, tuple(p.shape)
    return tuple(p.shape[:-1]), (*p.shape[:-2], p.shape[-1]), None
