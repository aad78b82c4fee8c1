"""strided_ops: the ops `fzero.strided` and `fzero.strided_scatter`, to which `fzero.ir.as_strided` rewrites a graph.

Both count from the first element of a contiguous 1-D value, never from the start of its storage. So they give the same
elements wherever the value lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define("strided(Tensor(a) x, int[] size, int[] stride, int start) -> Tensor(a)")
_LIBRARY.define("strided_scatter(Tensor x, Tensor values, int[] size, int[] stride, int start) -> Tensor")

Layout = tuple[Sequence[int], Sequence[int], int]  # sizes, strides, and the first element


def strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> torch.Tensor:
    """A view of a contiguous 1-D tensor: the element at index i is x[start + sum(i * stride)].

    Raises IndexError where `x` does not have all of these elements.

    >>> strided(torch.arange(6), [2, 2], [2, 1], 1).tolist()
    [[1, 2], [3, 4]]
    """
    first, last = span((size, stride, start))
    if x.dim() != 1 or not x.is_contiguous() or first < 0 or last > x.numel():
        raise IndexError(
            f"elements [{first}, {last}) of a tensor of shape {tuple(x.shape)}, strides {x.stride()}: needed 1-D "
            "contiguous memory that has them"
        )
    return x.as_strided(size, stride, x.storage_offset() + start)


def strided_scatter(
    x: torch.Tensor, values: torch.Tensor, size: Sequence[int], stride: Sequence[int], start: int
) -> torch.Tensor:
    """A copy of the contiguous 1-D tensor `x` whose elements `strided(x, size, stride, start)` are `values`.

    >>> strided_scatter(torch.zeros(4), torch.ones(2), [2], [2], 1).tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    result = x.clone()
    strided(result, size, stride, start).copy_(values)
    return result


for _op in (strided, strided_scatter):
    torch.library.register_fake(f"fzero::{_op.__name__}", _op, lib=_LIBRARY)
    torch.library.impl(f"fzero::{_op.__name__}", "CompositeExplicitAutograd", _op, lib=_LIBRARY)


def span(layout: Layout) -> tuple[int, int]:
    """The first element that a layout reaches, and the one after the last; (0, 0) where it has no elements.

    >>> span(([2, 3], [4, 1], 5))
    (5, 12)
    """
    size, stride, start = layout
    if 0 in size:
        return 0, 0
    return start, start + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
