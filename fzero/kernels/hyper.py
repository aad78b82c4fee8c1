"""The numbers of one optimizer step, computed on the device, once for all threads, so that nothing synchronises.

Formula, for step t (counted from 1), learning rate a and weight decay w, in float64, each then rounded to float32:

    0: a / (1 - beta1^t)    1: sqrt(1 - beta2^t)    2: 1 / sqrt(1 - beta2^t)    3: 1 - a w    4: a w
    5: clip / scale, each 1 by default

and as integers 6: t, and 8 .. 13: two keys for each of three seeds of stochastic rounding (`fzero.kernels.round`).

In float32 1 - 0.999^t would be 5e-5 wrong for small t. The power is made by squaring: products alone, so its bits are
equal everywhere. A library's `pow` may differ in float64's last places. With it, about one step in a million has a
number one unit in the last place of float32 away.

One program; it reads some ten scalars and writes 64 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.kernels._triton import exact, jit, tl
from fzero.kernels.round import seed_keys

WORDS = 16


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
def _put(out, place, value):  # type: ignore[no-untyped-def]
    tl.store(out + place, value.to(tl.float32).to(tl.int32, bitcast=True))


@jit
def _hyper_kernel(  # type: ignore[no-untyped-def]
    out, count, lr, scale, clip, seed0, seed1, seed2, BETA1: tl.constexpr, BETA2: tl.constexpr, DECAY: tl.constexpr
):
    """Computes and stores all the numbers; one program."""
    t = tl.load(count).to(tl.int64)
    rate = tl.load(lr).to(tl.float64)
    one = tl.full((), 1.0, tl.float64)
    shrink = rate * tl.full((), DECAY, tl.float64)
    factor = one
    if clip is not None:
        factor = tl.load(clip).to(tl.float64)
    if scale is not None:
        factor = factor / tl.load(scale).to(tl.float64)
    _put(out, 0, rate / (one - _power(BETA1, t)))
    correction = tl.sqrt(one - _power(BETA2, t))
    _put(out, 1, correction)
    _put(out, 2, one / correction)
    _put(out, 3, one - shrink)
    _put(out, 4, shrink)
    _put(out, 5, factor)
    tl.store(out + 6, t.to(tl.int32))
    if seed0 is not None:
        _put_keys(out + 8, tl.load(seed0))
    if seed1 is not None:
        _put_keys(out + 10, tl.load(seed1))
    if seed2 is not None:
        _put_keys(out + 12, tl.load(seed2))


@jit
def _put_keys(out, seed):  # type: ignore[no-untyped-def]
    key1, key2 = seed_keys(seed)
    tl.store(out, key1.to(tl.int32, bitcast=True))
    tl.store(out + 1, key2.to(tl.int32, bitcast=True))


@jit
def number(words, place: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of numbers 0 to 5, in a kernel."""
    return tl.load(words + place).to(tl.float32, bitcast=True)


@jit
def keys(words, which: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two keys of seed 0, 1 or 2, in a kernel."""
    first = tl.load(words + 8 + 2 * which).to(tl.uint32, bitcast=True)
    return first, tl.load(words + 9 + 2 * which).to(tl.uint32, bitcast=True)


def hyper(
    device: torch.device,
    count: Tensor,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    *,
    scale: Tensor | None = None,
    clip: Tensor | None = None,
    seeds: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> Tensor:
    """The numbers as (16,) int32 on `device`. All tensors are 0-d, of any integer or floating dtype; seeds int64.

    Raises ValueError and TypeError otherwise.
    """
    if not isinstance(lr, Tensor):
        lr = torch.full((), lr, dtype=torch.float64, device=device)
    scalars: list[Tensor | None] = []
    for name, t in zip(("count", "lr", "scale", "clip", *["seed"] * 3), (count, lr, scale, clip, *seeds), strict=True):
        if t is not None and t.numel() != 1:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, but it must be 0-d")
        if t is not None and name == "seed" and t.dtype != torch.int64:
            raise TypeError(f"a seed is {t.dtype}, but it must be torch.int64")
        scalars.append(None if t is None else t.to(device))
    out = torch.empty(WORDS, dtype=torch.int32, device=device)
    exact(_hyper_kernel, 1, device, out, *scalars, BETA1=beta1, BETA2=beta2, DECAY=weight_decay, num_warps=1)
    return out
