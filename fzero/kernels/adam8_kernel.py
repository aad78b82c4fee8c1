"""AdamW with both moments in 8 bits, one pass: decode, step, encode.

Formula. A moment is 8-bit codes with one fp32 scale s, the largest magnitude, for each 64 elements:

    mu = s * sign(c) * (c / 127)^2     c in -127 .. 127, to nearest
    nu = s * (c / 255)^4               c in 0 .. 255, up or down at random with the mean at nu; never 0 unless nu is

The step between is AdamW's in float32, from moments before they are rounded. The draw is a hash of the element's
parameter, gradient, place in the block and step number: no state. This is the op `fzero::adamw8_`, operation by
operation, each rounded on its own, and its bits where torch's root is IEEE's (on CUDA; MKL's on the CPU is not), with
two exceptions: the powers of beta are made by squaring (`fzero.kernels.hyper`), and in a block whose moment is NaN the
codes are free (the scale is NaN, and so is all of it).

Byte floor an element of a float32 parameter: reads 4 + 4 + 1 + 1, writes 4 + 1 + 1, and 16 / 64 for the scales: 16.25.
The op in PyTorch makes some fifty passes. Five divisions and four roots by IEEE's rules make some 230 instructions an
element on sm_90, so arithmetic may bound it before memory does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.kernels import hyper
from fzero.kernels._triton import FLOATS, check, exact, jit, largest, narrow, nearest, tl, wide
from fzero.kernels.hyper import number, shrink

BLOCK = 64
ROWS = 16  # blocks of a program


# ---- reference -------------------------------------------------------------------------------------------------------


def decode_reference(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 moments of int8 (first) or uint8 (second) codes, flat, and scales, in plain torch.

    >>> decode_reference(torch.tensor([127, -64], dtype=torch.int8), torch.tensor([2.0]))
    tensor([ 2.0000, -0.5079])
    """
    each = scales.repeat_interleave(BLOCK)[: codes.numel()]
    if codes.dtype == torch.int8:
        x = codes.to(torch.float32) / 127
        return x * x.abs() * each
    return (codes.to(torch.float32) / 255) ** 4 * each


# ---- kernel ----------------------------------------------------------------------------------------------------------


@jit
def _parts(values):  # type: ignore[no-untyped-def]
    """(magnitudes over the largest of their row, those largest) of (rows, 64) float32."""
    scale = largest(values)
    divisor = tl.where(scale > 0, scale, 1.0)[:, None]
    part = tl.div_rn(tl.abs(values), tl.broadcast_to(divisor, values.shape))
    part = tl.where(part == part, part, 0.0)
    return tl.minimum(part, 3.4028234663852886e38), scale


@jit
def _fourth(codes):  # type: ignore[no-untyped-def]
    x = codes * 0.00392156862745098  # 1 / 255
    x = x * x
    return x * x


@jit
def _encode_mu(mu):  # type: ignore[no-untyped-def]
    part, scale = _parts(mu)
    code = nearest(tl.minimum(tl.sqrt_rn(part) * 127.0, 127.0))
    return tl.where(mu < 0, -code, code).to(tl.int8), scale


@jit
def _encode_nu(nu, draw):  # type: ignore[no-untyped-def]
    part, scale = _parts(nu)
    low = tl.minimum(tl.floor(tl.sqrt_rn(tl.sqrt_rn(part)) * 255.0), 254.0)
    under = _fourth(low)
    chance = tl.div_rn(part - under, _fourth(low + 1.0) - under)
    uniform = (draw >> 8).to(tl.float32) * 5.960464477539063e-08  # 2**-24
    code = tl.maximum(low + tl.where(uniform < chance, 1.0, 0.0), 1.0)
    return tl.where(nu != 0, code, 0.0).to(tl.int32).to(tl.uint8), scale


@jit
def _draw(p, g, key):  # type: ignore[no-untyped-def]
    h = p.to(tl.uint32, bitcast=True) * 0x7FEB352D
    h = h ^ g.to(tl.uint32, bitcast=True) ^ key
    h = (h ^ (h >> 16)) * 0x7FEB352D
    return (h ^ (h >> 16)) * 0x846CA68B


@jit
def _adam8_kernel(  # type: ignore[no-untyped-def]
    new_param, new_mu, new_mu_scales, new_nu, new_nu_scales, param, grad, mu, mu_scales, nu, nu_scales, count, lr,
    rate, root, size, beta1, rest1, beta2, rest2, eps, DECAY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Does the step for ROWS blocks of BLOCK elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    index = row[:, None] * BLOCK + lane[None, :]
    inside, whole = index < size, row * BLOCK < size
    p = wide(tl.load(param + index, inside, 0.0))
    g = wide(tl.load(grad + index, inside, 0.0))
    x = tl.load(mu + index, inside, 0).to(tl.float32) * 0.007874015748031496  # 1 / 127
    m = x * tl.abs(x) * tl.load(mu_scales + row, whole, 0.0)[:, None]
    v = _fourth(tl.load(nu + index, inside, 0).to(tl.float32)) * tl.load(nu_scales + row, whole, 0.0)[:, None]
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * g) * rest2
    key = lane.to(tl.uint32) * 0x9E3779B1 + tl.load(count).to(tl.uint32) * 0x85EBCA6B
    draw = _draw(p, g, key[None, :])
    size_v = tl.sqrt_rn(v)
    below = tl.div_rn(size_v, tl.zeros_like(size_v) + number(root)) + eps
    p = p * (1 - shrink(lr, DECAY)).to(tl.float32) - tl.div_rn(m, below) * number(rate)
    tl.store(new_param + index, narrow(p, new_param.dtype.element_ty), inside)
    codes, scale = _encode_mu(m)
    tl.store(new_mu + index, codes, inside)
    tl.store(new_mu_scales + row, scale, whole)
    codes, scale = _encode_nu(v, draw)
    tl.store(new_nu + index, codes, inside)
    tl.store(new_nu_scales + row, scale, whole)


# ---- launcher --------------------------------------------------------------------------------------------------------


def adamw8_(
    param: Tensor,
    grad: Tensor,
    mu: Tensor,
    mu_scales: Tensor,
    nu: Tensor,
    nu_scales: Tensor,
    count: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    rate: Tensor | None = None,
    root: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """One step in place on `param`, `mu`, `mu_scales`, `nu` and `nu_scales` (or into `out`).

    `param` and `grad` are contiguous, of one size, float32, bfloat16 or float16; `mu` (int8) and `nu` (uint8) of that
    size; scales float32, one for each 64 elements. `count` (from 1) and `lr` are 0-d. `rate` and `root` are the
    step's `hyper.bias_corrections`; without them they are made here. Raises ValueError and TypeError.
    """
    size, where = param.numel(), "adamw8"
    moments, names = (mu, mu_scales, nu, nu_scales), ("mu", "mu_scales", "nu", "nu_scales")
    new = (param, *moments) if out is None else out
    for kind in ((param, *moments), new):
        check(where, "param", kind[0], param, FLOATS, size)
        for name, t, dtype in zip(
            names, kind[1:], (torch.int8, torch.float32, torch.uint8, torch.float32), strict=True
        ):
            check(where, name, t, param, (dtype,), -(-size // BLOCK) if name.endswith("scales") else size)
    check(where, "grad", grad, param, FLOATS, size)
    if size == 0:
        return
    here = param.device
    count, lr = hyper.scalar("count", count, here), hyper.scalar("lr", lr, here)
    if rate is None or root is None:
        rate, root = hyper.bias_corrections(count, lr, beta1, beta2)
    args = (*new, param, grad, *moments, count, lr, rate, root, size, beta1, 1 - beta1, beta2, 1 - beta2, eps)
    exact(_adam8_kernel, -(-size // (BLOCK * ROWS)), here, *args, DECAY=weight_decay, BLOCK=BLOCK, ROWS=ROWS)


def adamw8(
    param: Tensor, grad: Tensor, mu: Tensor, mu_scales: Tensor, nu: Tensor, nu_scales: Tensor, *hyper: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The new `(param, mu, mu_scales, nu, nu_scales)`, and nothing written over; arguments as `adamw8_`."""
    param_, mu_, nu_ = (torch.empty_like(t) for t in (param, mu, nu))
    new = param_, mu_, torch.empty_like(mu_scales), nu_, torch.empty_like(nu_scales)
    adamw8_(param, grad, mu, mu_scales, nu, nu_scales, *hyper, out=new)
    return new
