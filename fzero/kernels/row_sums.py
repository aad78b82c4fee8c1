"""Sums over rows in the kernel that makes the values: gradients of biases and norms without a second pass.

A gradient of a bias is the sum of a matrix's rows. Read again, the matrix costs a third of the pass that made it. Here

    gelu_backward_sum             dx = gelu'(x) dy                                         sum dx
    pack_sum                      three (B, H, S, D) in one (B, S, 3, H, D)                sum of each column
    layer_norm_backward_sums      dx = rstd / n (n g - sum g - xhat sum(g xhat)) + r       sum dy xhat, sum dy, sum dx

with g = weight dy, xhat = (x - mean) rstd and r what is added to dx, if anything. What is summed is what was written,
rounded to its dtype. Each program keeps the sums of a block of rows in registers, in fp32, and adds them up at its end;
a second kernel adds the blocks. There are no atomics, and the blocks depend on the shapes alone: the bits repeat on any
device.

Byte floor: an element of what is read and of what is written; of partial sums 4 in 16 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import NORM_ROWS, TALL
from fzero.kernels._triton import exact, jit, launch, rounded, tl, triton, wide

TILES: dict[str, Any] = {"TALL": TALL, "TILE": 32, "COLUMNS": 64}  # rows and columns that a program takes at a time
ON_CHIP = 12 << 10  # bytes of a norm's row that may be fetched two rows ahead: four operands on an H100, A100 or L40S


# ---- device functions ------------------------------------------------------------------------------------------------


@jit
def _gelu_slope(x, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The derivative of gelu at x fp32."""
    if TANH:
        square = x * x
        power = tl.exp2(x * (2.302208198144325 + 0.10294323957902349 * square))  # exp(2 inner)
        half = 0.5 - 1.0 / (power + 1.0)  # tanh(inner) / 2
        return 0.5 + half + x * (0.25 - half * half) * (1.5957691216057308 + 0.2140644488178072 * square)
    else:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


# ---- kernels ---------------------------------------------------------------------------------------------------------


@jit
def _gelu_kernel(  # type: ignore[no-untyped-def]
    out, partial, grad, x, rows, width, TANH: tl.constexpr, TALL: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, COLUMNS)
    block = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    for first in tl.range(0, TALL, TILE, num_stages=3):  # the next rows are on their way
        row = block * TALL + first + tl.arange(0, TILE)
        there = (row < rows)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        slope = _gelu_slope(wide(tl.load(x + at, mask=there, other=0)), TANH)
        made = rounded(wide(tl.load(grad + at, mask=there, other=0)) * slope, out.dtype.element_ty)
        tl.store(out + at, made, mask=there)
        total += tl.where(there, wide(made), 0.0)
    tl.store(partial + block * width + column, tl.sum(total, 0), mask=column < width)


@jit
def _pack_kernel(  # type: ignore[no-untyped-def]
    out, partial, first, second, third, rows, length, width, batch_step, head_step, row_step, dim, TALL: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, COLUMNS)
    which = tl.program_id(0) % 3
    block = tl.program_id(0) // 3 // across
    column = (tl.program_id(0) // 3 % across) * COLUMNS + tl.arange(0, COLUMNS)
    within = (column // dim) * head_step + column % dim
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    for start in range(0, TALL, TILE):
        row = block * TALL + start + tl.arange(0, TILE)
        there = (row < rows)[:, None] & (column < width)[None, :]
        at = ((row // length).to(tl.int64) * batch_step + (row % length) * row_step)[:, None] + within[None, :]
        if which == 0:
            taken = tl.load(first + at, mask=there, other=0)
        elif which == 1:
            taken = tl.load(second + at, mask=there, other=0)
        else:
            taken = tl.load(third + at, mask=there, other=0)
        into = row.to(tl.int64)[:, None] * (3 * width) + which * width + column[None, :]
        tl.store(out + into, taken, mask=there)
        total += tl.where(there, wide(taken), 0.0)
    tl.store(partial + block * (3 * width) + which * width + column, tl.sum(total, 0), mask=column < width)


@jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    out, partial, grad, x, mean, rstd, weight, residual, rows, width, RESIDUAL: tl.constexpr, SUMS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    for_weight = tl.zeros([BLOCK], tl.float32)
    for_bias = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.range(0, ROWS, num_stages=STAGES):
        row = tl.program_id(0) * ROWS + number
        there = inside & (row < rows)
        at = row.to(tl.int64) * width + column
        gradient = wide(tl.load(grad + at, mask=there, other=0))
        spread = tl.load(rstd + row, mask=row < rows, other=0)
        centred = wide(tl.load(x + at, mask=there, other=0)) - tl.load(mean + row, mask=row < rows, other=0)
        normal = tl.where(there, centred * spread, 0.0)
        scaled = gradient * wide(tl.load(weight + column, mask=inside, other=0))  # again: registers are short
        inner = scaled * width - tl.sum(scaled, 0) - normal * tl.sum(scaled * normal, 0)
        made = rounded((spread / width) * inner, out.dtype.element_ty)
        if RESIDUAL:
            made = rounded(wide(tl.load(residual + at, mask=there, other=0)) + wide(made), out.dtype.element_ty)
        tl.store(out + at, made, mask=there)
        for_weight += gradient * normal
        for_bias += gradient
        if SUMS == 3:
            total += tl.where(there, wide(made), 0.0)
    into = partial + tl.program_id(0) * (SUMS * width) + column
    tl.store(into, for_weight, mask=inside)
    tl.store(into + width, for_bias, mask=inside)
    if SUMS == 3:
        tl.store(into + 2 * width, total, mask=inside)


@jit
def _fold_kernel(  # type: ignore[no-untyped-def]
    first, second, third, partial, parts, width, sums, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Adds the rows of `partial` (parts, sums * width) fp32 into `sums` vectors of `width`."""
    across = tl.cdiv(width, COLUMNS)
    which = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        there = (part < parts)[:, None] & (column < width)[None, :]
        total += tl.load(partial + part[:, None] * (sums * width) + which * width + column[None, :], there, other=0)
    found = rounded(tl.sum(total, 0), first.dtype.element_ty)
    if which == 0:
        tl.store(first + column, found, mask=column < width)
    elif which == 1:
        tl.store(second + column, found, mask=column < width)
    else:
        tl.store(third + column, found, mask=column < width)


# ---- launchers -------------------------------------------------------------------------------------------------------


def _fold(partial: Tensor, into: Sequence[Tensor]) -> None:
    columns, width = 32, into[0].numel()
    three = (*into, into[0], into[0])[:3]
    programs = len(into) * triton.cdiv(width, columns)
    exact(
        _fold_kernel, programs, partial.device, *three, partial, partial.shape[0], width, len(into), PARTS=256,
        COLUMNS=columns, num_warps=8,
    )  # fmt: skip


def gelu_backward_sum(grad: Tensor, x: Tensor, out: Tensor, total: Tensor, *, approximate: str) -> None:
    """grad, x, out: (..., width), contiguous, fp32, bf16 or fp16. total: `width` elements of the same dtype."""
    width = total.numel()
    rows = grad.numel() // width
    partial = torch.empty(triton.cdiv(rows, TALL), width, dtype=torch.float32, device=grad.device)
    programs = partial.shape[0] * triton.cdiv(width, TILES["COLUMNS"])
    launch(
        _gelu_kernel, programs, grad.device, out, partial, grad, x, rows, width, TANH=approximate == "tanh",
        **TILES, num_warps=8,  # with 4, ptxas spills
    )  # fmt: skip
    _fold(partial, [total])


def pack_sum(first: Tensor, second: Tensor, third: Tensor, out: Tensor, total: Tensor) -> None:
    """first, second, third: (batch, heads, length, dim), of equal strides, the last 1. out: (batch, length, 3, heads,
    dim), contiguous. total: 3 * heads * dim elements. All of one dtype: fp32, bf16 or fp16."""
    batch, heads, length, dim = first.shape
    width, rows = heads * dim, batch * length
    partial = torch.empty(triton.cdiv(rows, TALL), 3 * width, dtype=torch.float32, device=first.device)
    programs = 3 * partial.shape[0] * triton.cdiv(width, TILES["COLUMNS"])
    exact(
        _pack_kernel, programs, first.device, out, partial, first, second, third, rows, length, width,
        *first.stride()[:3], dim, **TILES,
    )  # fmt: skip
    _fold(partial, [total])


def layer_norm_backward_sums(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor,
    for_weight: Tensor, for_bias: Tensor, total: Tensor | None = None,
) -> None:  # fmt: skip
    """grad, x, residual, out: (..., width), contiguous, of one dtype of fp32, bf16, fp16. mean, rstd: a fp32 number a
    row. weight and the sums: `width` elements of that dtype. width is at most `fzero.kernels.WIDEST`."""
    width = weight.numel()
    rows = grad.numel() // width
    sums = [for_weight, for_bias, *([] if total is None else [total])]
    partial = torch.empty(triton.cdiv(rows, NORM_ROWS), len(sums) * width, dtype=torch.float32, device=grad.device)
    block = triton.next_power_of_2(width)
    by_vectors = not any(t.data_ptr() % 16 for t in (grad, x, residual) if t is not None)
    launch(
        _norm_kernel, partial.shape[0], grad.device, out, partial, grad, x, mean, rstd, weight,
        x if residual is None else residual, rows, width, RESIDUAL=residual is not None, SUMS=len(sums), BLOCK=block,
        ROWS=NORM_ROWS, STAGES=3 if by_vectors and block * grad.element_size() <= ON_CHIP else 1,
        num_warps=max(4, min(16, block // 256)),
    )  # fmt: skip
    _fold(partial, sums)
