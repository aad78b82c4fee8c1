"""Squared norm and finite check in one pass over a flat buffer.

Formula: total = sum of float64(x)^2, nonfinite = not (total < infinity). The flag costs nothing. The square of a
float32 fits a float64 exactly, and 1e231 of the largest fit their sum. So the sum is finite exactly if every element
is.

Two launches, and no atomics: at most 1,024 programs add the squares of chunks PROGRAMS apart, and one program adds
their sums. The order is fixed by the length alone, so equal buffers have equal bits, on every run and on a GPU of
any size; another order, a dot product's say, may differ in the last places of float64.

Byte floor: one read of the buffer: 4 or 2 an element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.kernels._triton import FLOATS, check, exact, jit, tl, wide

BLOCK = 2048
PROGRAMS = 1024  # a power of two: the second stage is one tile


def sum_squares_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch: (total, nonfinite).

    >>> sum_squares_reference(torch.tensor([3.0, 4.0]))
    (tensor(25., dtype=torch.float64), tensor(False))
    """
    return x.to(torch.float64).square().sum(), ~x.isfinite().all()


@jit
def _partial_kernel(partials, x, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK,), tl.float64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < size:
        index = start + tl.arange(0, BLOCK)
        value = wide(tl.load(x + index, index < size, 0.0)).to(tl.float64)
        total += value * value
        start += tl.num_programs(0) * BLOCK
    tl.store(partials + tl.program_id(0), tl.sum(total, 0))


@jit
def _total_kernel(total, nonfinite, partials, num, PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, PROGRAMS)
    value = tl.sum(tl.load(partials + index, index < num, 0.0), 0)
    tl.store(total, value)
    if nonfinite is not None:
        finite = value < float("inf")
        tl.store(nonfinite, tl.where(finite, 0, 1).to(nonfinite.dtype.element_ty))


def sum_squares(x: Tensor, *, nonfinite: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The sum of squares of `x` (float32, bfloat16 or float16, contiguous): 0-d float64, into `out` if given.

    `nonfinite` (0-d, bool or float32) becomes true (1) if an element is infinite or NaN, else false (0).
    """
    out = torch.empty((), dtype=torch.float64, device=x.device) if out is None else out
    check("sum_squares", "x", x, x, FLOATS, x.numel())
    check("sum_squares", "out", out, x, (torch.float64,), 1)
    if nonfinite is not None:
        check("sum_squares", "nonfinite", nonfinite, x, (torch.bool, torch.float32), 1)
    num = min(PROGRAMS, -(-x.numel() // BLOCK))
    partials = torch.empty(PROGRAMS, dtype=torch.float64, device=x.device)
    if num:
        exact(_partial_kernel, num, x.device, partials, x, x.numel(), BLOCK=BLOCK, num_warps=8)
    exact(_total_kernel, 1, x.device, out, nonfinite, partials, num, PROGRAMS=PROGRAMS)
    return out
