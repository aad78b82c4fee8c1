"""step_ops: the ops of fzero that a step holds: `region`, `reduce`, `fed_mean`, `coded_mean` and `axis_index`; while it
is captured also `equal`.

`region` stands for one `value_and_grad`, by its index in the trace's regions. `coded_mean` gives the mean of a flat
value, then the new error for each that it was given (`fzero.ir.coded_mean`). `fed_mean` is the reduction of one
gradient that travels in codes: the mean (or sum, for a loss that is a `Mean`), then the new error. All but `region`
have kernels too, for calls outside a step, where the world is one rank. `equal` is its operand, which must be the same
on all ranks: `varying` proves it, and removes the node.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import fx

from fzero.capture.context import current
from fzero.ir.coded_mean import alone

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")
_LIBRARY.define("region(Tensor[] inputs, int index) -> Tensor[]")
_LIBRARY.define("reduce(Tensor x, str op, str axis) -> Tensor")
_LIBRARY.define("coded_mean(Tensor x, Tensor[] errors, int[] sizes, str codec, bool both, str axis) -> Tensor[]")
_LIBRARY.define("fed_mean(Tensor x, Tensor error, str codec, str op, str axis) -> Tensor[]")
_LIBRARY.define("equal(Tensor x) -> Tensor")
_LIBRARY.define("axis_index(str axis, Device device) -> Tensor")
REGION = torch.ops.fzero.region.default
REDUCE = torch.ops.fzero.reduce.default
CODED_MEAN = torch.ops.fzero.coded_mean.default
FED_MEAN = torch.ops.fzero.fed_mean.default
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


@torch.library.register_fake("fzero::coded_mean", lib=_LIBRARY)
def _coded_mean_fake(
    x: torch.Tensor, errors: list[torch.Tensor], sizes: list[int], codec: str, both: bool, axis: str
) -> Any:
    return [torch.empty_like(value) for value in (x, *errors)]


@torch.library.impl("fzero::coded_mean", "CompositeExplicitAutograd", lib=_LIBRARY)
def _coded_mean_alone(
    x: torch.Tensor, errors: list[torch.Tensor], sizes: list[int], codec: str, both: bool, axis: str
) -> Any:
    return alone(x, *errors)


@torch.library.register_fake("fzero::fed_mean", lib=_LIBRARY)
def _fed_mean_fake(x: torch.Tensor, error: torch.Tensor, codec: str, op: str, axis: str) -> Any:
    return [torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(error)]


@torch.library.impl("fzero::fed_mean", "CompositeExplicitAutograd", lib=_LIBRARY)
def _fed_mean_alone(x: torch.Tensor, error: torch.Tensor, codec: str, op: str, axis: str) -> Any:
    return alone(x, error)


@torch.library.register_fake("fzero::equal", lib=_LIBRARY)
def _equal_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("fzero::axis_index", lib=_LIBRARY)
def _axis_index_fake(axis: str, device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@torch.library.impl("fzero::axis_index", "CompositeExplicitAutograd", lib=_LIBRARY)
def _axis_index_alone(axis: str, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


class CodedCall(NamedTuple):
    """The arguments of a node of `coded_mean`."""

    x: fx.Node
    errors: tuple[fx.Node, ...]
    sizes: tuple[int, ...]
    codec: str
    both: bool
    axis: str

    @classmethod
    def of(cls, node: fx.Node) -> CodedCall:
        """Those of a node."""
        x, errors, sizes, codec, both, axis = cast(Any, node.args)
        return cls(x, (*errors,), (*sizes,), codec, both, axis)


class FedCall(NamedTuple):
    """The arguments of a node of `fed_mean`."""

    x: fx.Node
    error: fx.Node
    codec: str
    op: str
    axis: str

    @classmethod
    def of(cls, node: fx.Node) -> FedCall:
        """Those of a node."""
        return cls(*cast(Any, node.args))
