"""Adam and AdamW on a flat buffer in one pass: unscale, clip, update, round, copy out.

Formula, with f = clip / scale, step number t and learning rate a (Kingma & Ba 2015; Loshchilov & Hutter 2019):

    g <- f g                                       (adam: g <- g + w p)
    mu <- beta1 mu + (1 - beta1) g
    nu <- beta2 nu + (1 - beta2) g^2
    p <- p - (a w p + a / (1 - beta1^t) * mu / (sqrt(nu) / sqrt(1 - beta2^t) + eps))         (adam: without a w p)

in float32, for any dtypes of the four tensors. Moments and parameter are then rounded to their own dtypes: to nearest,
or in bfloat16 at random with a seed (`fzero.kernels.round`, same bits). The step is made from moments before they
are rounded. Weight decay and step are subtracted at once, so the parameter is rounded once (aten's fused kernel rounds
it twice). Where `skip` is not zero, parameter and moments keep their bits. `copy` is the new parameter in 16 bits.

Every element depends on the same element alone, and each operation rounds on its own: a buffer's bits do not depend on
how it is sliced. They are not aten's, whose roundings differ in number and place; both are within a few units of the
last place of the exact step.

Byte floor an element, fp32 gradient and parameter: 28 with fp32 moments (reads 16, writes 12), 20 with bfloat16 ones; 2
more for a copy. All in bfloat16: 14.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.kernels import hyper
from fzero.kernels._triton import FLOATS, check, exact, jit, narrow, tl, wide
from fzero.kernels.hyper import factor, inverse, number, shrink
from fzero.kernels.round import seed_keys, stochastic

BLOCK = 1024


class Seeds(NamedTuple):
    """0-d int64 seeds of stochastic rounding; None: to nearest."""

    param: Tensor | None = None
    mu: Tensor | None = None
    nu: Tensor | None = None


NEAREST = Seeds()


# ---- reference -------------------------------------------------------------------------------------------------------


def adamw_reference(
    param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, count: int, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, decoupled: bool = True, factor: float = 1.0, dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The new (param, mu, nu), in `dtype`, in plain torch.

    >>> zero = torch.zeros(2)
    >>> adamw_reference(zero, torch.ones(2), zero, zero, 1, 0.1, 0.9, 0.999, 1e-8, 0.0)[:2]
    (tensor([-0.1000, -0.1000]), tensor([0.1000, 0.1000]))
    """
    p, g, m, v = (t.to(dtype) for t in (param, grad, mu, nu))
    g = g * factor
    if not decoupled:
        g = g + weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    step = lr / (1 - beta1**count) * m / (v.sqrt() / (1 - beta2**count) ** 0.5 + eps)
    return p - (lr * weight_decay * p + step if decoupled else step), m, v


# ---- kernel ----------------------------------------------------------------------------------------------------------


@jit
def _rounded(x, seed, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    if seed is not None:
        key1, key2 = seed_keys(tl.load(seed))
        return stochastic(x, key1, key2)
    else:
        return narrow(x, dtype)


@jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    new_param, new_mu, new_nu, copy, param, grad, mu, nu, lr, rate, root, scale, clip, skip, seed_p, seed_m, seed_v,
    size, beta1, rest1, beta2, rest2, eps, decay, DECAY: tl.constexpr, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Does the step for BLOCK elements."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    old_p, old_m = tl.load(param + index, inside, 0.0), tl.load(mu + index, inside, 0.0)
    old_v, g = tl.load(nu + index, inside, 0.0), tl.load(grad + index, inside, 0.0)
    p, g = wide(old_p), wide(g) * factor(scale, clip)
    if not DECOUPLED:
        g = g + decay * p
    m = beta1 * wide(old_m) + rest1 * g
    v = beta2 * wide(old_v) + rest2 * g * g
    step = tl.div_rn(number(rate) * m, tl.sqrt_rn(v) * inverse(root) + eps)
    if DECOUPLED:
        step = shrink(lr, DECAY).to(tl.float32) * p + step
    p = p - step
    p_out = _rounded(p, seed_p, new_param.dtype.element_ty)
    m_out = _rounded(m, seed_m, new_mu.dtype.element_ty)
    v_out = _rounded(v, seed_v, new_nu.dtype.element_ty)
    if skip is not None:
        keep = tl.load(skip) != 0
        p_out, m_out, v_out = tl.where(keep, old_p, p_out), tl.where(keep, old_m, m_out), tl.where(keep, old_v, v_out)
    tl.store(new_param + index, p_out, inside)
    tl.store(new_mu + index, m_out, inside)
    tl.store(new_nu + index, v_out, inside)
    if copy is not None:
        tl.store(copy + index, narrow(wide(p_out), copy.dtype.element_ty), inside)


# ---- launchers -------------------------------------------------------------------------------------------------------


def adamw_(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    count: Tensor,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    rate: Tensor | None = None,
    root: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    skip: Tensor | None = None,
    copy: Tensor | None = None,
    seeds: Seeds = NEAREST,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Does one step in place on `param`, `mu` and `nu` (or into `out`).

    The four tensors are contiguous, of one size, each of float32, bfloat16 or float16; `out` has their dtypes. `count`
    (this step's number, from 1) and `lr` are 0-d (`lr` may be a number). `rate` and `root` are the step's
    `hyper.bias_corrections`; without them they are made here. `scale` divides and `clip` multiplies the gradient. If
    `skip` is not zero, nothing changes. These are 0-d and on the device, so nothing synchronises. `copy` (bfloat16 or
    float16) gets the new parameter. `seeds` round bfloat16 tensors at random. Raises ValueError and TypeError for
    arguments that do not fit.
    """
    new = (param, mu, nu) if out is None else out
    size, where = param.numel(), "adamw"
    for name, t in (("param", param), ("grad", grad), ("mu", mu), ("nu", nu)):
        check(where, name, t, param, FLOATS, size)
    for name, t, old, seed in zip(("param", "mu", "nu"), new, (param, mu, nu), seeds, strict=True):
        check(where, f"out for {name}", t, param, (old.dtype,), size)
        if seed is not None and t.dtype != torch.bfloat16:
            raise TypeError(f"{where}: {name} is {t.dtype} and has a seed: only bfloat16 is rounded at random")
    if copy is not None:
        check(where, "copy", copy, param, (torch.bfloat16, torch.float16), size)
    if skip is not None:
        check(where, "skip", skip, param, (torch.bool, torch.float32, torch.int32), 1)
    if size == 0:
        return
    here = param.device
    lr, scales = (
        hyper.scalar("lr", lr, here),
        [s if s is None else hyper.scalar("scale", s, here) for s in (scale, clip)],
    )
    keys = [seed if seed is None else hyper.scalar("a seed", seed, here, torch.int64) for seed in seeds]
    if rate is None or root is None:
        rate, root = hyper.bias_corrections(hyper.scalar("count", count, here), lr, beta1, beta2)
    args = (*new, copy, param, grad, mu, nu, lr, rate, root, *scales, skip, *keys, size)
    numbers = (beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay)
    options: dict[str, Any] = {"DECAY": weight_decay, "DECOUPLED": decoupled, "BLOCK": BLOCK}
    exact(_adamw_kernel, -(-size // BLOCK), here, *args, *numbers, **options)


def adamw(param: Tensor, grad: Tensor, mu: Tensor, nu: Tensor, *hyper: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The new `(param, mu, nu)`, and nothing written over; arguments as `adamw_`."""
    new = torch.empty_like(param), torch.empty_like(mu), torch.empty_like(nu)
    adamw_(param, grad, mu, nu, *hyper, out=new)
    return new


def fused_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    mus: Sequence[Tensor],
    nus: Sequence[Tensor],
    max_nus: Sequence[Tensor],
    counts: Sequence[Tensor],
    *,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    decoupled: bool = True,
) -> None:
    """`aten._fused_adamw_`'s signature: one launch for each parameter. Raises ValueError for `amsgrad`, `maximize` and
    `grad_scale` (with which aten's kernel writes over the gradients)."""
    if amsgrad or maximize or grad_scale is not None:
        raise ValueError("fused_adamw_: there is no kernel for amsgrad, maximize or grad_scale: use torch's own")
    for p, g, m, v, count in zip(params, grads, mus, nus, counts, strict=True):
        adamw_(p, g, m, v, count, lr, beta1, beta2, eps, weight_decay, decoupled, skip=found_inf)


def fused_adam_(*args: Any, **options: Any) -> None:
    """The same for `aten._fused_adam_`, whose weight decay is part of the gradient."""
    fused_adamw_(*args, **options, decoupled=False)
