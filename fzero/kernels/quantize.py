"""Block quantisation to int8 and int4, and back.

Formula, for each block of the flattened buffer (the last one may be short), with L = 127 or 7:

    scale = max |x| / L;    code = round(x * (L / max |x|)), halves to even;    x' = code * scale

Symmetric, so 0 stays 0 and -x has the codes of x negated. Eight bits are an int8 each; of four bits two elements share
a byte (uint8, two's complement): element 2i the lower half, 2i + 1 the upper one, 0 past an odd end. A block of zeros
has scale 0, and so has one whose largest magnitude is under 4e-37 (its inverse would be infinite). If an element of a
block is not finite, the block's scale is not finite either, and its codes are 0. All of the block comes back NaN: a
lost element must show.

Codes and scales are those of the references below, bit for bit. |x' - x| <= scale / 2, plus roundings.

Byte floor, B elements a block, float32: 4 read, 1 (int8) or 1/2 (int4) and 4 / B written an element; back the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.kernels._triton import FLOATS, check, exact, jit, largest, narrow, nearest, power_of_two, tl, wide

TILE = 2048  # elements of a program: several blocks, or one larger block
LEVELS = {8: 127.0, 4: 7.0}


# ---- reference -------------------------------------------------------------------------------------------------------


def quantize_reference(x: Tensor, bits: int = 8, block: int = 64) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a flat tensor, in plain torch.

    >>> quantize_reference(torch.tensor([1.0, -0.5, 0.25]), 4)
    (tensor([199,   2], dtype=torch.uint8), tensor([0.1429]))
    """
    wide = torch.nn.functional.pad(x.to(torch.float32), (0, -x.numel() % block)).view(-1, block)
    most = wide.abs().amax(1)
    inverse = torch.full_like(most, LEVELS[bits]) / most  # a Python number over a tensor is rounded twice
    scales = torch.where(inverse == torch.inf, 0.0, most / LEVELS[bits])
    usable = (inverse.isfinite() & most.isfinite())[:, None]
    codes = torch.where(usable, wide * inverse[:, None], 0.0).round().view(-1)[: x.numel()].to(torch.int8)
    if bits == 8:
        return codes, scales
    pairs = torch.nn.functional.pad(codes, (0, x.numel() % 2)).view(-1, 2).to(torch.int32) & 15
    return (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8), scales


def dequantize_reference(codes: Tensor, scales: Tensor, size: int, bits: int = 8, block: int = 64) -> Tensor:
    """float32 of (codes, scales), in plain torch.

    >>> dequantize_reference(torch.tensor([199, 2], dtype=torch.uint8), torch.tensor([0.125]), 3, 4)
    tensor([ 0.8750, -0.5000,  0.2500])
    """
    if bits == 4:
        halves = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:size]
        codes = (halves.to(torch.int8) ^ 8) - 8
    return codes.to(torch.float32) * scales.repeat_interleave(block)[:size]


# ---- kernels ---------------------------------------------------------------------------------------------------------


@jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    codes, scales, x, size, num_codes, num_scales,
    LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes codes and scales of ROWS blocks."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = wide(tl.load(x + index, index < size, 0.0))
    most = largest(value)
    levels = tl.full((ROWS,), LEVELS, tl.float32)
    inverse = tl.div_rn(levels, most)
    usable = (inverse < float("inf")) & (most < float("inf"))
    code = nearest(tl.where(usable[:, None], value * inverse[:, None], 0.0)).to(tl.int32)
    if BITS == 8:
        tl.store(codes + index, code.to(tl.int8), index < size)
    else:
        low, high = tl.split(tl.reshape(code, (ROWS, BLOCK // 2, 2)))
        pair = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(codes + pair, ((low & 15) | ((high & 15) << 4)).to(tl.uint8), pair < num_codes)
    scale = tl.where(inverse == float("inf"), 0.0, tl.div_rn(most, levels))
    tl.store(scales + row, scale, row < num_scales)


@jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    out, codes, scales, size, num_codes, num_scales, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Writes the elements of ROWS blocks."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scale = tl.load(scales + row, row < num_scales, 0.0)
    if BITS == 8:
        code = tl.load(codes + index, index < size, 0).to(tl.float32)
    else:
        pair = row[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        byte = tl.load(codes + pair, pair < num_codes, 0).to(tl.int32)
        low, high = ((byte & 15) ^ 8) - 8, ((byte >> 4) ^ 8) - 8
        code = tl.reshape(tl.join(low, high), (ROWS, BLOCK)).to(tl.float32)
    tl.store(out + index, narrow(code * scale[:, None], out.dtype.element_ty), index < size)


# ---- launchers -------------------------------------------------------------------------------------------------------


def sizes(size: int, bits: int = 8, block: int = 64) -> tuple[int, int]:
    """How many bytes of codes, and how many fp32 scales, `size` elements take.

    >>> sizes(131, 4)
    (66, 3)
    """
    return size if bits == 8 else -(-size // 2), -(-size // block)


def quantize(codes: Tensor, scales: Tensor, x: Tensor, *, bits: int = 8, block: int = 64) -> None:
    """Writes the `codes` (int8; of 4 bits uint8, two a byte) and the `scales` (float32, one a block) of `x`.

    All are flat and contiguous, `codes` and `scales` of `sizes(x.numel(), bits, block)`; `x` is float32, bfloat16 or
    float16; `block` is a power of two from 16 to 4,096. Raises ValueError and TypeError.
    """
    check("quantize", "x", x, x, FLOATS, x.numel())
    _run(_quantize_kernel, "quantize", (codes, scales, x), x.numel(), bits, block, LEVELS=LEVELS.get(bits))


def dequantize(out: Tensor, codes: Tensor, scales: Tensor, *, bits: int = 8, block: int = 64) -> None:
    """Writes into `out` (float32, bfloat16 or float16) the values of `codes` and `scales`, as `quantize` made them.
    Sizes as there."""
    check("dequantize", "out", out, out, FLOATS, out.numel())
    _run(_dequantize_kernel, "dequantize", (codes, scales, out), out.numel(), bits, block)


def _run(
    kernel: object, where: str, tensors: tuple[Tensor, ...], size: int, bits: int, block: int, **more: object
) -> None:
    """Checks the tensors, and launches a kernel on all blocks. Raises ValueError and TypeError."""
    codes, scales, buffer = tensors
    if bits not in LEVELS:
        raise ValueError(f"{where}: bits is {bits}, but it must be 8 or 4")
    power_of_two(where, block, 16, 4096)
    num_codes, num_scales = sizes(size, bits, block)
    check(where, "codes", codes, buffer, (torch.int8 if bits == 8 else torch.uint8,), num_codes)
    check(where, "scales", scales, buffer, (torch.float32,), num_scales)
    if size == 0:
        return
    rows = max(1, TILE // block)
    args = (codes, scales, buffer) if kernel is _quantize_kernel else (buffer, codes, scales)
    exact(
        kernel,
        -(-num_scales // rows),
        buffer.device,
        *args,
        size,
        num_codes,
        num_scales,
        BITS=bits,
        BLOCK=block,
        ROWS=rows,
        **more,
    )
