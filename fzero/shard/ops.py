"""ops: the transfers of a local graph, as ops that a graph can hold. They say what moves; a program runs them.

| op | from, to | result |
|---|---|---|
| `all_reduce(x, axis, how)` | `P` to `R` | the sum or maximum over the axis |
| `reduce_scatter(x, axis, n, dim, groups)` | `P` to `S` | the own part of the sum |
| `all_gather(x, axis, n, dim, groups)` | `S` to `R` | all parts |
| `all_to_all(x, axis, n, dim, groups, to_dim, to_groups)` | `S` to another `S` | the own part of another dim |
| `own_part(x, rank, n, dim, groups)` | `R` to `S` | the own part; nothing is sent |
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define("tp_all_reduce(Tensor x, str axis, str how) -> Tensor")
_LIBRARY.define("tp_reduce_scatter(Tensor x, str axis, int n, int dim, int groups) -> Tensor")
_LIBRARY.define("tp_all_gather(Tensor x, str axis, int n, int dim, int groups) -> Tensor")
_LIBRARY.define("tp_all_to_all(Tensor x, str axis, int n, int dim, int groups, int to_dim, int to_groups) -> Tensor")
_LIBRARY.define("tp_own_part(Tensor x, Tensor rank, int n, int dim, int groups) -> Tensor")
ALL_REDUCE = torch.ops.fzero.tp_all_reduce.default
REDUCE_SCATTER = torch.ops.fzero.tp_reduce_scatter.default
ALL_GATHER = torch.ops.fzero.tp_all_gather.default
ALL_TO_ALL = torch.ops.fzero.tp_all_to_all.default
OWN_PART = torch.ops.fzero.tp_own_part.default
TRANSFERS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL)


def _scaled(x: Tensor, times: dict[int, float]) -> Tensor:
    return x.new_empty([int(size * times.get(d, 1)) for d, size in enumerate(x.shape)])


@torch.library.register_fake("fzero::tp_all_reduce", lib=_LIBRARY)
def _all_reduce(x: Tensor, axis: str, how: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("fzero::tp_reduce_scatter", lib=_LIBRARY)
def _reduce_scatter(x: Tensor, axis: str, n: int, dim: int, groups: int) -> Tensor:
    return _scaled(x, {dim: 1 / n})


@torch.library.register_fake("fzero::tp_all_gather", lib=_LIBRARY)
def _all_gather(x: Tensor, axis: str, n: int, dim: int, groups: int) -> Tensor:
    return _scaled(x, {dim: n})


@torch.library.register_fake("fzero::tp_all_to_all", lib=_LIBRARY)
def _all_to_all(x: Tensor, axis: str, n: int, dim: int, groups: int, to_dim: int, to_groups: int) -> Tensor:
    return _scaled(x, {dim: n, to_dim: 1 / n} if dim != to_dim else {})


@torch.library.register_fake("fzero::tp_own_part", lib=_LIBRARY)
def _own_part_fake(x: Tensor, rank: Tensor, n: int, dim: int, groups: int) -> Tensor:
    return _scaled(x, {dim: 1 / n})


@torch.library.impl("fzero::tp_own_part", "CompositeExplicitAutograd", lib=_LIBRARY)
def _own_part(x: Tensor, rank: Tensor, n: int, dim: int, groups: int) -> Tensor:
    parts = x.unflatten(dim, (groups, n, x.shape[dim] // (groups * n)))
    return parts.index_select(dim + 1, rank.reshape(1)).flatten(dim, dim + 2)
