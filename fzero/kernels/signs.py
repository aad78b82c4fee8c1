"""Signs with error feedback: a buffer in one bit an element, and the error of these bits, in one pass. (1-bit Adam:
Tang et al. 2021; the compensation: Seide et al. 2014.)

Formula, for each block of the flattened buffer (the last one may be short), with the loss of earlier passes as `error`:

    value = x + error;   scale = mean |value|;   x' = scale if value >= 0 else -scale;   error <- value - x'

so errors do not add up: they are sent later. Element 8i + j is bit j of byte i, 1 for +: 0 and -0 are +, so that every
element has a sign; bits past the end are 0. The scale is the one that loses least (in squares) for these signs. If an
element of a block is not finite, the block's scale is not finite either. The block and its errors come back so, and
must be reset.

The sum of a block is one tree whose order the compiler chooses. So a scale may differ in its last places between the
interpreter and a GPU. Signs are exact, and errors are, bit for bit, those of the scale that was written.

Byte floor, B elements a block, float32: 4 + 4 read, 4 + 1/8 + 4 / B written an element; unpacking 1/8 + 4 / B read and
4 written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.kernels._triton import FLOATS, check, exact, jit, narrow, power_of_two, tl, wide

TILE = 2048  # elements of a program: several blocks, or one larger block


# ---- reference -------------------------------------------------------------------------------------------------------


def pack_reference(x: Tensor, error: Tensor | None = None, block: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    """(signs, scales, new error) of a flat tensor, in plain torch.

    >>> pack_reference(torch.tensor([1.0, -3.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]))
    (tensor([5], dtype=torch.uint8), tensor([1.]), tensor([ 0., -1., -1.]))
    """
    value = x.to(torch.float32) if error is None else x.to(torch.float32) + error
    size = value.numel()
    rows = torch.nn.functional.pad(value, (0, -size % block)).view(-1, block)
    counts = (size - torch.arange(len(rows), device=x.device) * block).clamp(max=block)
    scales = rows.abs().sum(1) / counts
    bits = torch.nn.functional.pad((value >= 0).to(torch.int32), (0, -size % 8)).view(-1, 8)
    signs = (bits << torch.arange(8, device=x.device)).sum(1).to(torch.uint8)
    return signs, scales, value - unpack_reference(signs, scales, size, block)


def unpack_reference(signs: Tensor, scales: Tensor, size: int, block: int = 1024) -> Tensor:
    """float32 of (signs, scales), in plain torch.

    >>> unpack_reference(torch.tensor([5], dtype=torch.uint8), torch.tensor([0.5]), 3)
    tensor([ 0.5000, -0.5000,  0.5000])
    """
    bits = signs[:, None] >> torch.arange(8, dtype=torch.uint8, device=signs.device) & 1
    each = scales.repeat_interleave(block)[:size]
    return torch.where(bits.view(-1)[:size] == 1, each, -each)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@jit
def _pack_kernel(  # type: ignore[no-untyped-def]
    signs, scales, new_error, x, error, size, num_signs, num_scales, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Writes signs, scales and new errors of ROWS blocks."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = index < size
    value = wide(tl.load(x + index, inside, 0.0))
    if error is not None:
        value = value + tl.load(error + index, inside, 0.0)
    count = tl.minimum(size - row * BLOCK, BLOCK)
    scale = tl.div_rn(tl.sum(tl.abs(value), 1), tl.maximum(count, 1).to(tl.float32))
    plus = value >= 0
    bits = tl.reshape(tl.where(plus & inside, 1, 0), (ROWS, BLOCK // 8, 8))
    packed = tl.sum(bits << tl.arange(0, 8)[None, None, :], 2)
    byte = row[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    tl.store(signs + byte, packed.to(tl.uint8), byte < num_signs)
    tl.store(scales + row, scale, row < num_scales)
    if new_error is not None:
        tl.store(new_error + index, value - tl.where(plus, scale[:, None], -scale[:, None]), inside)


@jit
def _unpack_kernel(out, signs, scales, size, num_signs, num_scales, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = row[:, None] * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    packed = tl.load(signs + byte, byte < num_signs, 0).to(tl.int32)
    scale = tl.load(scales + row, row < num_scales, 0.0)[:, None]
    bits = tl.reshape((packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, (ROWS, BLOCK))
    index = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.where(bits == 1, scale, -scale)
    tl.store(out + index, narrow(value, out.dtype.element_ty), index < size)


# ---- launchers -------------------------------------------------------------------------------------------------------


def sizes(size: int, block: int = 1024) -> tuple[int, int]:
    """How many bytes of signs, and how many fp32 scales, `size` elements take.

    >>> sizes(1025)
    (129, 2)
    """
    return -(-size // 8), -(-size // block)


def pack(signs: Tensor, scales: Tensor, x: Tensor, error: Tensor | None = None, *, block: int = 1024) -> None:
    """Writes `signs` (uint8) and `scales` (float32), of `sizes(x.numel(), block)`, of `x + error`; and the new error
    over `error` (float32, like `x`), or nowhere if it is None.

    All are flat and contiguous; `x` is float32, bfloat16 or float16; `block` is a power of two from 16 to 4,096. Raises
    ValueError and TypeError.
    """
    _check("pack", signs, scales, "x", x, block)
    if error is not None:
        check("pack", "error", error, x, (torch.float32,), x.numel())
    rows = max(1, TILE // block)
    if x.numel():
        args = (signs, scales, error, x, error, x.numel(), len(signs), len(scales))
        exact(_pack_kernel, -(-len(scales) // rows), x.device, *args, BLOCK=block, ROWS=rows)


def unpack(out: Tensor, signs: Tensor, scales: Tensor, *, block: int = 1024) -> None:
    """Writes into `out` (float32, bfloat16 or float16) plus or minus the scale of each element; sizes as in `pack`."""
    _check("unpack", signs, scales, "out", out, block)
    rows = max(1, TILE // block)
    if out.numel():
        args = (out, signs, scales, out.numel(), len(signs), len(scales))
        exact(_unpack_kernel, -(-len(scales) // rows), out.device, *args, BLOCK=block, ROWS=rows)


def _check(where: str, signs: Tensor, scales: Tensor, name: str, buffer: Tensor, block: int) -> None:
    power_of_two(where, block, 16, 4096)
    num_signs, num_scales = sizes(buffer.numel(), block)
    check(where, name, buffer, buffer, FLOATS, buffer.numel())
    check(where, "signs", signs, buffer, (torch.uint8,), num_signs)
    check(where, "scales", scales, buffer, (torch.float32,), num_scales)
