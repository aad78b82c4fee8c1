"""step_ops: the ops of fzero that a step holds: `region`, `reduce` and `axis_index`; while it is captured also `equal`.

`region` stands for one `value_and_grad`, by its index in the trace's regions. `reduce` and `axis_index` have kernels
too, for calls outside a step, where the world is one rank. `equal` is its operand, which must be the same on all ranks:
`varying` proves it, and removes the node.
"""

from __future__ import annotations

import torch

from fzero.capture.context import current

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define("region(Tensor[] inputs, int index) -> Tensor[]")
_LIBRARY.define("reduce(Tensor x, str op, str axis) -> Tensor")
_LIBRARY.define("equal(Tensor x) -> Tensor")
_LIBRARY.define("axis_index(str axis, Device device) -> Tensor")
REGION = torch.ops.fzero.region.default
REDUCE = torch.ops.fzero.reduce.default
EQUAL = torch.ops.fzero.equal.default
AXIS_INDEX = torch.ops.fzero.axis_index.default


@torch.library.register_fake("fzero::region", lib=_LIBRARY)
def _region_fake(inputs: list[torch.Tensor], index: int) -> list[torch.Tensor]:
    return [torch.empty_like(value) for value in current().regions[index].values]


@torch.library.register_fake("fzero::reduce", lib=_LIBRARY)
def _reduce_fake(x: torch.Tensor, op: str, axis: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.impl("fzero::reduce", "CompositeExplicitAutograd", lib=_LIBRARY)
def _reduce_alone(x: torch.Tensor, op: str, axis: str) -> torch.Tensor:
    return x.clone()


@torch.library.register_fake("fzero::equal", lib=_LIBRARY)
def _equal_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("fzero::axis_index", lib=_LIBRARY)
def _axis_index_fake(axis: str, device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@torch.library.impl("fzero::axis_index", "CompositeExplicitAutograd", lib=_LIBRARY)
def _axis_index_alone(axis: str, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)
