"""The numbers of one optimizer step, computed on the device, so that nothing synchronises.

Formula, for step t (counted from 1) and learning rate a, in float64, once a step for all leaves of equal betas:

    rate = a / (1 - beta1^t)        root = sqrt(1 - beta2^t)

A kernel of an update reads the two, and makes of them, of a, and of its weight decay w, clip and scale (1 by default)

    a w        1 - a w        1 / root        clip / scale

in float64, each then rounded to float32. In float32 1 - 0.999^t would be 5e-5 wrong for small t.

The power is made by squaring: products alone, so its bits are equal everywhere. A library's `pow` may differ in
float64's last places. With it, about one step in a million has a number one unit in the last place of float32 away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.kernels._triton import exact, jit, tl


@jit
def _power(base: tl.constexpr, n):  # type: ignore[no-untyped-def]
    """base ** n in float64, for n >= 0."""
    square = tl.full((), base, tl.float64)
    result = tl.full((), 1.0, tl.float64)
    while n > 0:
        result = tl.where(n % 2 == 1, result * square, result)
        square = square * square
        n = n // 2
    return result


@jit
def _corrections_kernel(rate, root, count, lr, BETA1: tl.constexpr, BETA2: tl.constexpr):  # type: ignore[no-untyped-def]
    t = tl.load(count).to(tl.int64)
    one = tl.full((), 1.0, tl.float64)
    tl.store(rate, tl.load(lr).to(tl.float64) / (one - _power(BETA1, t)))
    tl.store(root, tl.sqrt(one - _power(BETA2, t)))


@jit
def number(scalar):  # type: ignore[no-untyped-def]
    """A 0-d number, rounded to float32, in a kernel."""
    return tl.load(scalar).to(tl.float64).to(tl.float32)


@jit
def inverse(scalar):  # type: ignore[no-untyped-def]
    """One over a 0-d number."""
    return (tl.full((), 1.0, tl.float64) / tl.load(scalar).to(tl.float64)).to(tl.float32)


@jit
def shrink(lr, DECAY: tl.constexpr):  # type: ignore[no-untyped-def]
    """a w, in float64."""
    return tl.load(lr).to(tl.float64) * tl.full((), DECAY, tl.float64)


@jit
def factor(scale, clip):  # type: ignore[no-untyped-def]
    """clip / scale; None is 1."""
    value = tl.full((), 1.0, tl.float64)
    if clip is not None:
        value = tl.load(clip).to(tl.float64)
    if scale is not None:
        value = value / tl.load(scale).to(tl.float64)
    return value.to(tl.float32)


def bias_corrections(count: Tensor, lr: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """(rate, root), 0-d float64 on `count`'s device. `count` is 0-d int64, `lr` 0-d, of any floating dtype."""
    rate, root = (torch.empty((), dtype=torch.float64, device=count.device) for _ in range(2))
    args = rate, root, scalar("count", count, count.device), scalar("lr", lr, count.device)
    exact(_corrections_kernel, 1, count.device, *args, BETA1=beta1, BETA2=beta2, num_warps=1)
    return rate, root


def scalar(name: str, value: Tensor | float, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A number that a kernel reads, 0-d on `device`. Raises ValueError for another shape, TypeError for a dtype that
    is not `dtype`."""
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=torch.float64, device=device)
    if value.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but it must be 0-d")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name} is {value.dtype}, but it must be {dtype}")
    return value.to(device)
