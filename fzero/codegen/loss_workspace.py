"""loss_workspace: bytes that kernels of losses, reductions and attention hold."""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from fzero.codegen.workspace_parts import (
    TRANSPOSED,
    Formula,
    copies,
    copy_bytes,
    counted,
    of,
    operand_bytes,
    result_bytes,
    together,
    values,
)
from fzero.ir import fx_nodes, fx_values

aten = torch.ops.aten


def _reduced(count: int) -> Formula:
    """A loss's terms, where it returns their sum or mean."""
    return lambda node: count * operand_bytes(node) if result_bytes(node) < operand_bytes(node) else 0


def _bce_with_logits(node: fx.Node) -> int:
    """The terms and their product with the target, a copy of logits in another order, and the weights of classes."""
    logits, weights = values(node, (0,))[0], values(node, (3,))
    size = torch.broadcast_shapes(*(x.shape for x in values(node, (0, 1)))).numel() * logits.element_size()
    result = fx_values.tensors(node.meta["val"])[0]
    times = 1 + (result.numel() < logits.numel()) + (not logits.is_contiguous())
    return times * size + sum(x.nbytes for x in weights) + 16


def _cross_entropy_in_chunks(node: fx.Node) -> int:
    """The logits of a chunk of rows, its gradient, numbers of each row, and copies of both operands."""
    source, weight = values(node, (0, 1))
    rows = cast(int, node.args[8] if "no_reduction" not in str(node.target) else node.args[6])
    size = max(source.element_size(), 4) + source.element_size() % 4
    numbers = 16 * source.shape[0]
    return rows * (weight.shape[0] + source.shape[1] + 16) * size + numbers + copies(0, 1)(node)


def _attention(node: fx.Node) -> int:
    """A tile of scores, of row statistics and of the result for each thread."""
    query, key = fx_nodes.operand(node, 0).meta["val"], fx_nodes.operand(node, 1).meta["val"]
    rows = _query_rows(query.shape[-2])
    size = max(4, query.element_size())
    return size * rows * (min(key.shape[-2], 512) + 2 + query.shape[-1]) * torch.get_num_threads()


def _attention_backward(node: fx.Node) -> int:
    """Two tiles of scores and row statistics for each thread, and a copy of the incoming gradient."""
    query, key = fx_nodes.operand(node, 1).meta["val"], fx_nodes.operand(node, 2).meta["val"]
    rows = _query_rows(query.shape[-2])
    size = max(4, query.element_size())
    copied = operand_bytes(node, 1) if query.shape[1] > 1 else 0  # the gradient, whose heads lie in another order
    return copied + size * rows * (2 * min(key.shape[-2], 512) + 1) * torch.get_num_threads()


def _query_rows(length: int) -> int:
    """The rows of a tile of queries, as ATen's kernel chooses them."""
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32)


def _cast_input(node: fx.Node) -> int:
    """A sum or mean in another dtype than its input's."""
    source, result = fx_nodes.operand(node).meta["val"], fx_values.tensors(node.meta["val"])[0]
    return source.numel() * result.element_size() if source.dtype != result.dtype else 0


FORMULAS: dict[str, Formula] = {
    # made by torch when they are first called, and not in all versions; and one that `fzero.capture` defines
    "torch_nn._linear_cross_entropy_batch_chunked.default": _cross_entropy_in_chunks,
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default": _cross_entropy_in_chunks,
    "fzero.ctc_loss.default": result_bytes,  # the results of torch's op, whose table has the longest target's length
    "aten._safe_softmax.default": together(copies(0), lambda node: values(node, (0,))[0].numel()),  # a mask
    "aten.binary_cross_entropy_with_logits.default": _bce_with_logits,
    "aten.soft_margin_loss.default": _reduced(1),
    "aten.soft_margin_loss_backward.default": lambda node: 2 * result_bytes(node),
    "aten.logsumexp.default": lambda node: operand_bytes(node) + 2 * result_bytes(node),
    "aten.mse_loss.default": _reduced(2),
    "aten.dist.default": operand_bytes,
    "aten.isinf.default": lambda node: (
        operand_bytes(node) * fx_nodes.operand(node).meta["val"].is_floating_point()
    ),  # magnitudes
    "aten.mvlgamma": lambda node: (cast(int, node.args[1]) + 1) * result_bytes(node),
    "aten.histogram.bins_tensor": result_bytes,
    **of("all.dims any.dims", counted(1)),
    "aten.count_nonzero.dim_IntList": counted(9),
    "aten.linalg_vector_norm.default": _cast_input,
    "aten._ctc_loss_backward.Tensor": lambda node: operand_bytes(node, 6),  # paths that end, beside those that begin
    "aten.binary_cross_entropy.default": _reduced(1),
    "aten.huber_loss.default": _reduced(1),
    "aten.smooth_l1_loss.default": _reduced(2),
    "aten.cumsum.default": _cast_input,
    "aten.sum.default": _cast_input,
    "aten.sum.dim_IntList": _cast_input,
    "aten.sum.IntList_out": _cast_input,
    "aten.mean.default": _cast_input,
    "aten.mean.dim": _cast_input,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten.binary_cross_entropy_backward.default": lambda node: (  # the block of a copy of the result
        TRANSPOSED * values(node, (0,))[0].element_size() * any(copy_bytes(v) for v in values(node, range(4)))
    ),
}
