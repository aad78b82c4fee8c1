"""piece_workspace: bytes that kernels hold which copy, sort and pick elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from fzero.codegen.workspace_parts import (
    TRANSPOSED,
    Formula,
    copies,
    counted,
    is_transposed,
    of,
    operand_bytes,
    result_bytes,
    values,
)
from fzero.ir import fx_nodes, fx_values

aten = torch.ops.aten


def _selection(node: fx.Node) -> int:
    """A copy of the operand and its indices, which are permuted."""
    value = fx_nodes.operand(node).meta["val"]
    return value.numel() * (value.element_size() + 8)


def _block(node: fx.Node) -> int:
    """The block of a copy of a transposed matrix into a contiguous one."""
    (result, *_) = fx_values.tensors(node.meta["val"])
    sources = [v for v in values(node, range(len(node.args))) if is_transposed(v) and v.dtype is result.dtype]
    return TRANSPOSED * result.element_size() if sources and result.is_contiguous() else 0


def _sort(node: fx.Node) -> int:
    """The numbers of the elements along the dim."""
    value = fx_nodes.operand(node).meta["val"]
    stable = "stable" in str(node.target)
    given = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 and not stable else -1)
    return 8 * value.shape[given] if value.dim() and isinstance(given, int) else 8


# by op, the places of the operands of which its kernel needs contiguous copies
COPIES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        str.split(
            "_adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d max_pool3d_with_indices _log_softmax _softmax "
            "log_sigmoid_forward narrow_copy reflection_pad1d reflection_pad3d replication_pad1d replication_pad3d "
            "median.dim nanmedian.dim aminmax max min pixel_shuffle pixel_unshuffle channel_shuffle "
            "reflection_pad1d_backward reflection_pad3d_backward replication_pad1d_backward "
            "replication_pad3d_backward"
        ),
        (0,),
    ),
    **dict.fromkeys(
        str.split(
            "_log_softmax_backward_data _softmax_backward_data max_unpool2d max_unpool3d multi_margin_loss "
            "multilabel_margin_loss_forward"
        ),
        (0, 1),
    ),
    "bucketize.Tensor": (0, 1),
    "embedding_dense_backward": (0, 1),
    "fractional_max_pool2d": (0, 3),
    "index_select": (0, 2),
    "masked_scatter": (2,),
    "multi_margin_loss_backward": (1, 2),
    "multilabel_margin_loss_backward": (1, 2, 5),
    "native_layer_norm": (0, 2, 3),
    "segment_reduce": (0, 1, 2, 3, 4),
    "_segment_reduce_backward": (0, 1, 2, 3, 4, 5),
    "nll_loss_forward": (0, 1, 2),
}

FORMULAS: dict[str, Formula] = {
    **{key: formula for name, places in COPIES.items() for key, formula in of(name, copies(*places)).items()},
    **of("clone _to_copy copy copy_ masked_fill.Scalar", _block),
    **of("index_add scatter.src scatter.value scatter_add", _block),
    "aten.t_copy.default": lambda node: TRANSPOSED * fx_values.tensors(node.meta["val"])[0].element_size(),
    "aten.unfold_backward.default": lambda node: 2 * result_bytes(node),
    "aten.masked_scatter_backward.default": lambda node: operand_bytes(node) + 10 * values(node, (1,))[0].numel(),
    **of("searchsorted.Tensor searchsorted.Scalar", copies(0, 1, 2, 3, 4)),
    "aten.resize_as.default": operand_bytes,
    **of("sort.default sort.stable", _sort),
    "aten.roll.default": lambda node: operand_bytes(node) * (len(cast(Sequence[int], node.args[1])) > 1),  # dim by dim
    "aten.index_reduce.default": lambda node: 3 * operand_bytes(node),
    "aten.scatter_reduce.two": lambda node: (operand_bytes(node) + counted(1)(node)) * (node.args[4] == "mean"),
    "aten._chunk_cat.default": result_bytes,
    "aten.kthvalue.default": _selection,
}
