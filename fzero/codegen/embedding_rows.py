"""embedding_rows: the gradient of an embedding on the CPU, some rows at a time.

aten's own kernel returns a new tensor of the table's size, nearly all zeros. On a part of the rows it returns one that
stays in the cache. Rows do not meet, and of each the same is added in the same order: so the bits are the same. Tiles
of columns would touch each page of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import kernel_of
from fzero.ir import fx_nodes

aten = torch.ops.aten
BYTES = 1 << 20  # of the rows that are made at once, in memory that malloc keeps
A_NUMBER = 8  # what places are compared with


def at_once(shape: torch.Size, itemsize: int) -> int:
    """How many rows of a table of this shape (rows, columns) are made at once."""
    return min(max(1, BYTES // max(shape[1] * itemsize, 1)), shape[0])


def rows(
    into: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, num_rows: int, padding: int, *_: Any, first: int = 0
) -> Iterator[Callable[[], Any]]:
    """The calls that write the gradient's rows from `first` on into `into`. The other arguments are those of the op,
    without `scale_grad_by_freq`."""
    if into.numel():
        yield partial(_made, into, grad, index, padding, first)


def heap_bytes(node: fx.Node) -> int:
    """The most bytes that the calls of a node ask the allocator for, beside copies of its operands."""
    made, index = node.meta["val"], fx_nodes.operand(node, 1).meta["val"]
    part = (at_once(made.shape, made.element_size()) + 1) * made.shape[1] * made.element_size()
    places = index.numel() * index.element_size()
    return places + max(2 * index.numel() + A_NUMBER, part)


def _made(into: torch.Tensor, grad: torch.Tensor, index: torch.Tensor, padding: int, first: int) -> None:
    grad, index = grad.contiguous(), index.contiguous()
    kernel = kernel_of(aten.embedding_dense_backward.default)
    for part in into.split(at_once(into.shape, into.element_size())):
        more = len(part)  # one row behind them, of which nothing is read: where all others would be added
        part.copy_(kernel(grad, _places(index, first, more, padding), more + 1, more, False)[:-1])
        first += more


def _places(index: torch.Tensor, first: int, num: int, padding: int) -> torch.Tensor:
    """Where each index lies in the rows from `first` on, if it is one of these `num`, else `num`."""
    places = index - first
    others = places < 0
    others |= places >= num
    if padding >= 0:
        others |= index == padding
    return places.masked_fill_(others, num)
