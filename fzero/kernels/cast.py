"""Cast and scale: a buffer in another dtype, times a number that is on the device.

Formula: out = round(float32(x) * scale), to nearest, halves to even; NaN stays NaN, and a number that `out`'s dtype
cannot hold becomes infinite. Without a scale, a cast. Equal to `(x.float() * scale).to(out.dtype)` bit for bit (NaNs
aside, whose payload is free).

Byte floor: an element of each dtype: 4 + 2 for float32 to or from 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.kernels._triton import FLOATS, check, exact, jit, narrow, tl, wide

BLOCK = 2048


def cast_reference(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """The same in plain torch.

    >>> cast_reference(torch.tensor([1.0, 3.0]), torch.bfloat16, torch.tensor(0.5))
    tensor([0.5000, 1.5000], dtype=torch.bfloat16)
    """
    wide = x.to(torch.float32)
    return (wide if scale is None else wide * scale.to(torch.float32)).to(dtype)


@jit
def _cast_kernel(out, x, scale, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    value = wide(tl.load(x + index, inside, 0.0))
    if scale is not None:
        value = value * tl.load(scale).to(tl.float32)
    tl.store(out + index, narrow(value, out.dtype.element_ty), inside)


def cast(out: Tensor, x: Tensor, scale: Tensor | None = None) -> None:
    """Writes `x` times `scale` (0-d, floating, or None for 1) into `out`.

    Both are contiguous, of one size, each of float32, bfloat16 or float16. They may be one buffer if the dtypes agree.
    """
    check("cast", "x", x, x, FLOATS, x.numel())
    check("cast", "out", out, x, FLOATS, x.numel())
    if scale is not None:
        check("cast", "scale", scale, x, (*FLOATS, torch.float64), 1)
    if x.numel():
        exact(_cast_kernel, -(-x.numel() // BLOCK), x.device, out, x, scale, x.numel(), BLOCK=BLOCK)
