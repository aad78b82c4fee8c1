"""ops: the transfers of a local graph, as ops that a graph can hold. They say what moves; a program runs them.

They move equal flat parts of a contiguous tensor, and give the result a shape. Where a dim other than the first is cut
or joined, copies around them bring its parts together.

| op | a rank gives | a rank gets |
|---|---|---|
| `axis_all_reduce(x, axis, n, how)` | an addend | the sum over the axis, or the maximum |
| `axis_reduce_scatter(x, axis, n, shape)` | a part for each rank | the sum of its own part |
| `axis_all_gather(x, axis, n, shape)` | a part | the parts of all ranks |
| `axis_all_to_all(x, axis, n, shape)` | a part for each rank | each rank's part for it |
| `axis_own_part(x, rank, n, dim, groups)` | nothing | its part of a value that every rank has |

`constrain(x, axis, dim, groups)` is no transfer: in the captured graph it says where a value is to lie (dim -1: whole;
axis "": along every axis).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define("axis_all_reduce(Tensor x, str axis, int n, str how) -> Tensor")
_LIBRARY.define("axis_reduce_scatter(Tensor x, str axis, int n, int[] shape) -> Tensor")
_LIBRARY.define("axis_all_gather(Tensor x, str axis, int n, int[] shape) -> Tensor")
_LIBRARY.define("axis_all_to_all(Tensor x, str axis, int n, int[] shape) -> Tensor")
_LIBRARY.define("axis_own_part(Tensor x, Tensor rank, int n, int dim, int groups) -> Tensor")
_LIBRARY.define("constrain(Tensor x, str axis, int dim, int groups) -> Tensor")
ALL_REDUCE = torch.ops.fzero.axis_all_reduce.default
REDUCE_SCATTER = torch.ops.fzero.axis_reduce_scatter.default
ALL_GATHER = torch.ops.fzero.axis_all_gather.default
ALL_TO_ALL = torch.ops.fzero.axis_all_to_all.default
OWN_PART = torch.ops.fzero.axis_own_part.default
CONSTRAIN = torch.ops.fzero.constrain.default
TRANSFERS: dict[object, str] = {
    ALL_REDUCE: "all_reduce", REDUCE_SCATTER: "reduce_scatter", ALL_GATHER: "all_gather", ALL_TO_ALL: "all_to_all",
}  # fmt: skip


@torch.library.register_fake("fzero::axis_all_reduce", lib=_LIBRARY)
def _all_reduce(x: Tensor, axis: str, n: int, how: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shaped(x: Tensor, axis: str, n: int, shape: list[int]) -> Tensor:
    return x.new_empty(shape)


for _name in ("axis_reduce_scatter", "axis_all_gather", "axis_all_to_all"):
    torch.library.register_fake(f"fzero::{_name}", _shaped, lib=_LIBRARY)


@torch.library.register_fake("fzero::axis_own_part", lib=_LIBRARY)
def _own_part_fake(x: Tensor, rank: Tensor, n: int, dim: int, groups: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :]))


@torch.library.impl("fzero::axis_own_part", "CompositeExplicitAutograd", lib=_LIBRARY)
def _own_part(x: Tensor, rank: Tensor, n: int, dim: int, groups: int) -> Tensor:
    parts = x.unflatten(dim, (groups, n, x.shape[dim] // (groups * n)))
    return parts.index_select(dim + 1, rank.reshape(1)).flatten(dim, dim + 2)


@torch.library.register_fake("fzero::constrain", lib=_LIBRARY)
def _constrain_fake(x: Tensor, axis: str, dim: int, groups: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.impl("fzero::constrain", "CompositeExplicitAutograd", lib=_LIBRARY)
def _constrain(x: Tensor, axis: str, dim: int, groups: int) -> Tensor:
    return x.clone()


class _Constrained(torch.autograd.Function):
    """`constrain`, of which torch's transforms (`grad`, `jvp`, `vmap`) ask more than an op can be given."""

    @staticmethod
    def forward(x: Tensor, axis: str, dim: int, groups: int) -> Tensor:
        result: Tensor = CONSTRAIN(x, axis, dim, groups)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.place = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return constrained(grad, *ctx.place), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return constrained(tangent, *ctx.place)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, axis: str, dim: int, groups: int) -> tuple[Tensor, int]:
        return constrained(x.movedim(in_dims[0], 0), axis, dim + 1 if dim >= 0 else dim, groups), 0


def constrained(x: Tensor, axis: str, dim: int, groups: int) -> Tensor:
    """`x`, which is to lie along the axis as dim and groups say; so are its gradient and its tangent."""
    result: Tensor = _Constrained.apply(x, axis, dim, groups)
    return result
