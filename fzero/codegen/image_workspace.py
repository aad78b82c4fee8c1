"""image_workspace: bytes that kernels of images hold: convolutions, pools, resizing, and their norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from fzero.codegen import convolution_workspace
from fzero.codegen.convolution_workspace import Convolution
from fzero.codegen.workspace_parts import (
    LAST,
    Formula,
    copies,
    copy_bytes,
    of,
    operand_bytes,
    result_bytes,
    together,
    values,
)
from fzero.ir import fx_nodes, fx_values

aten = torch.ops.aten


def _convolution(node: fx.Node) -> int:
    source, weight = (fx_nodes.operand(node, i).meta["val"] for i in (0, 1))
    return convolution_workspace.forward_bytes(Convolution(source, weight, node.meta["val"], *node.args[3:]))  # type: ignore[arg-type]


def _convolution_backward(node: fx.Node) -> int:
    incoming, source, weight = (fx_nodes.operand(node, i).meta["val"] for i in (0, 1, 2))
    *numbers, wants = node.args[4:]
    wants_source, wants_weight, _ = cast(Sequence[bool], wants)
    convolution = Convolution(source, weight, incoming, *numbers)  # type: ignore[arg-type]
    return convolution_workspace.backward_bytes(convolution, incoming, wants_source, wants_weight)


def _resampled(node: fx.Node) -> int:
    """The operand with its new width, and the weights of each place."""
    value, result = fx_nodes.operand(node).meta["val"], fx_values.tensors(node.meta["val"])[0]
    down, across = (max(a, b) for a, b in zip(value.shape[-2:], result.shape[-2:], strict=True))
    between = value.shape[:2].numel() * value.shape[-2] * result.shape[-1]
    return (between + 16 * (down + across)) * value.element_size()


def _upsample(node: fx.Node) -> int:
    """Operand and result with their channels last."""
    return operand_bytes(node) + result_bytes(node)


def _is_last(value: torch.Tensor) -> bool:
    return value.dim() == 4 and value.is_contiguous(memory_format=LAST)


def _pool(node: fx.Node) -> int:
    """A copy of an operand whose channels are neither last nor in order."""
    (value,) = values(node, (0,))
    return 0 if _is_last(value) else copy_bytes(value)


def _pool_backward(node: fx.Node) -> int:
    """Copies in the order of the incoming gradient: of it, of the indices, and the result once more, which is made in
    the source's."""
    orders = [_order(value) for value in values(node, (0, 1))]
    again = node.meta["val"].nbytes if orders[0] is not orders[1] else _copy_in(orders[0], node.meta["val"])
    return _in_order_of(0, (0, 7))(node) + cast(int, again)


def _order(value: torch.Tensor) -> torch.memory_format:
    return LAST if _is_last(value) and not value.is_contiguous() else torch.contiguous_format


def _copy_in(order: torch.memory_format, value: torch.Tensor) -> int:
    return 0 if value.is_contiguous(memory_format=order) else value.nbytes


def _in_order_of(place: int, places: Sequence[int]) -> Formula:
    """Copies of the operands at these places, in the order of the one at `place`: channels last, or contiguous."""

    def rule(node: fx.Node) -> int:
        order = _order(values(node, (place,))[0])
        return sum(_copy_in(order, value) for value in values(node, places))

    return rule


def _group_norm_backward(node: fx.Node) -> int:
    """Two sums for each channel of each sample."""
    rows, channels = node.args[5:7]
    return 2 * rows * channels * fx_nodes.operand(node, 1).meta["val"].element_size()  # type: ignore[operator]


FORMULAS: dict[str, Formula] = {
    "aten.native_group_norm_backward.default": together(_group_norm_backward, _in_order_of(1, (0, 1))),
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.native_batch_norm_backward.default": operand_bytes,
    "aten._upsample_bilinear2d_aa.default": _resampled,
    "aten.upsample_nearest2d.default": _upsample,
    "aten._upsample_nearest_exact2d.default": _upsample,
    "aten.upsample_bilinear2d.default": _upsample,
    **of(
        "_adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d max_pool2d_with_indices reflection_pad2d "
        "replication_pad2d native_group_norm",
        _pool,
    ),
    **of(
        "_adaptive_avg_pool2d_backward avg_pool2d_backward max_pool2d_with_indices_backward "
        "reflection_pad2d_backward replication_pad2d_backward",
        _pool_backward,
    ),
    "aten.col2im.default": operand_bytes,
    "aten.im2col.default": together(operand_bytes, copies(0)),
}
