"""The loss over a vocabulary and its gradient, which may lie where the logits lay.

With m the largest number of a row, lse the logarithm of its sum of exp(x - m), y its target, and n the rows that count:

    loss = sum(lse - (x[y] - m)) / n          dx = (exp(x - m - lse) - (column == y)) grad / n

or without n, for a sum. A row whose target is `ignored` counts nothing. A row with a target that is no column gets NaN,
and so does the loss; torch's kernel would end the process. Rows may be wider than the vocabulary (`fzero.codegen.pad`):
their last columns are not read, and get zeros.

The first kernel walks over the logits once, with the largest so far and the sum under it for each lane. The second adds
up a number of each row. The third is elementwise: it may write over what it reads. No atomics, a fixed order.

Reference: torch.nn.functional.cross_entropy in fp32. Source: Milakov and Gimelshein, Online normalizer calculation for
softmax (2018). Byte floor, of an element of the logits: three of its own, read twice and written once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.kernels._triton import jit, launch, rounded, tl, wide

AT_ONCE = 2048  # columns of a row that the first kernel takes
WRITTEN = 4096  # that the third one does


# ---- kernels ---------------------------------------------------------------------------------------------------------


@jit
def _log_sum_kernel(  # type: ignore[no-untyped-def]
    most, lse, each, logits, target, width, columns, ignored, COLUMNS: tl.constexpr
):
    """Of a row: its largest number, the log of the sum of exponentials beside it, and its share of the loss."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * width
    top = tl.full([COLUMNS], -3.4028234663852886e38, tl.float32)  # the least number: -inf has no difference
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.where(column < columns, wide(tl.load(base + column, mask=column < width, other=0)), float("-inf"))
        higher = tl.maximum(top, x)
        total = total * tl.exp2((top - higher) * 1.4426950408889634) + tl.exp2((x - higher) * 1.4426950408889634)
        top = higher
    highest = tl.max(top, 0)
    found = tl.log(tl.sum(total * tl.exp2((top - highest) * 1.4426950408889634), 0))
    hit = tl.load(target + row)
    there = (hit >= 0) & (hit < columns)
    counts = hit != ignored
    found = tl.where(counts & (there == 0), float("nan"), found)
    picked = wide(tl.load(base + tl.where(there, hit, 0)))
    tl.store(most + row, highest)
    tl.store(lse + row, found)
    tl.store(each + row, tl.where(counts, found - (picked - highest), 0.0))


@jit
def _total_kernel(  # type: ignore[no-untyped-def]
    loss, scale, each, target, grad, rows, ignored, MEAN: tl.constexpr, SEED: tl.constexpr, ROWS: tl.constexpr
):
    """Adds up the rows: the loss, and what each row's gradient is multiplied by."""
    total = tl.zeros([ROWS], tl.float32)
    count = tl.zeros([ROWS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        total += tl.load(each + row, mask=row < rows, other=0)
        counts = tl.load(target + row, mask=row < rows, other=ignored) != ignored
        count += tl.where(counts & (row < rows), 1.0, 0.0)
    of = tl.sum(count, 0) if MEAN else 1.0
    tl.store(loss, tl.sum(total, 0) / of)
    seed = tl.load(grad) if SEED else 1.0
    tl.store(scale, seed / of)


@jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    out, logits, most, lse, target, scale, width, columns, ignored, COLUMNS: tl.constexpr
):
    """dx of a row."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * width
    highest = tl.load(most + row)
    low = tl.load(lse + row)
    hit = tl.load(target + row)
    by = tl.load(scale)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = wide(tl.load(logits + at + column, mask=column < width, other=0))
        made = (tl.exp2((x - highest - low) * 1.4426950408889634) - tl.where(column == hit, 1.0, 0.0)) * by
        made = tl.where((column < columns) & (hit != ignored), made, 0.0)
        tl.store(out + at + column, rounded(made, out.dtype.element_ty), mask=column < width)


# ---- launcher --------------------------------------------------------------------------------------------------------


def softmax_loss(
    logits: Tensor, target: Tensor, grad: Tensor | None, loss: Tensor, out: Tensor, *, columns: int, mean: bool,
    ignored: int,
) -> None:  # fmt: skip
    """logits, out: (rows, width), contiguous, of one dtype of fp32, bf16, fp16; out may be logits. target: `rows`
    int64. grad, loss: one fp32 number, grad 1 where it is None. columns: of the vocabulary, at most `width`."""
    rows, width = logits.numel() // out.shape[-1], out.shape[-1]
    most, lse, each = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    scale = torch.empty((), dtype=torch.float32, device=logits.device)
    launch(
        _log_sum_kernel, rows, logits.device, most, lse, each, logits, target, width, columns, ignored,
        COLUMNS=AT_ONCE, num_warps=8,
    )  # fmt: skip
    launch(
        _total_kernel, 1, logits.device, loss, scale, each, target, scale if grad is None else grad, rows, ignored,
        MEAN=mean, SEED=grad is not None, ROWS=1024, num_warps=8,
    )  # fmt: skip
    launch(
        _gradient_kernel, rows, logits.device, out, logits, most, lse, target, scale, width, columns, ignored,
        COLUMNS=WRITTEN, num_warps=16,
    )  # fmt: skip
