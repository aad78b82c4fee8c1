"""workspace: bytes that a kernel allocates for itself, beyond its operands and results.

The rules are for ATen's CPU kernels: the plan of another machine cannot measure. Each was found by running the op
under the profiler (torch 2.13.0, oneDNN) and comparing the bytes that the allocator saw with the results' bytes. The
ops of common models without a rule were seen to need nothing, or less than a hundredth of their operands.

oneDNN's convolutions reorder into blocked layouts. Operands of another dtype are cast first. Attention keeps a tile per
thread. Two needs are not known: of matmuls in 16 bits, of which oneDNN packs an operand or two, and of matmuls of
expanded operands, which are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import fx

from fzero._torch_compat import AMX
from fzero.codegen import matmul
from fzero.ir import fx_nodes, fx_values
from fzero.optim.adam8 import BUFFER_BYTES, CHUNK
from fzero.optim.transform import PIECE

aten = torch.ops.aten
fzero_ops = torch.ops.fzero


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that a node's kernel holds while it runs, on CPU tensors; 0 elsewhere and for ops without a rule."""
    rule = RULES.get(node.target) or (_promoted if _pointwise(node.target) else None)
    values = (
        fx_values.tensors(node.meta["val"]) or fx_values.tensors(fx_nodes.operand(node).meta["val"]) if rule else []
    )
    if rule is None or not values or values[0].device.type != "cpu":
        return 0
    return rule(node)


def _bytes(node: fx.Node, index: int = 0) -> int:
    value = fx_nodes.operand(node, index).meta["val"]
    return value.numel() * value.element_size()


def _result_bytes(node: fx.Node) -> int:
    return sum(v.numel() * v.element_size() for v in fx_values.tensors(node.meta["val"]))


BLOCK = 16  # channels in a block of oneDNN's layout (AVX-512)


def _blocked(value: torch.Tensor) -> int:
    """Bytes of a (batch, channels, ...) tensor in oneDNN's layout: channels padded to whole blocks."""
    channels = value.shape[1]
    return value.numel() // max(channels, 1) * (-(-channels // BLOCK) * BLOCK) * value.element_size()


def _pointwise(target: object) -> bool:
    return getattr(target, "namespace", "") == "aten" and torch.Tag.pointwise in getattr(target, "tags", ())


def _promoted(node: fx.Node) -> int:
    """Bytes of a pointwise op's casts: it computes in one dtype, and casts operands of another first.

    A complex magnitude is complex first. Numbers and 0-d tensors cost nothing.
    """
    (result, *_) = fx_values.tensors(node.meta["val"]) or [fx_nodes.operand(node).meta["val"]]
    values = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    if node.target is aten.where.self:
        values = [v for v in values if v.dtype is not torch.bool]
    if not values:
        return 0
    common = functools.reduce(torch.promote_types, (v.dtype for v in values if v.dim()), result.dtype)
    if result.dtype is torch.bool:
        common = functools.reduce(torch.promote_types, (v.dtype for v in values if v.dim()), torch.bool)
    cast = [result] if common.is_complex and not result.dtype.is_complex and result.dtype is not torch.bool else []
    return sum(v.numel() * common.itemsize for v in [*values, *cast] if v.dim() and v.dtype is not common)


def _convolution(node: fx.Node) -> int:
    """Operands and result in oneDNN's layout, then the result once more, in its own. Few channels are not reordered."""
    source, weight, result = *(fx_nodes.operand(node, i).meta["val"] for i in (0, 1)), node.meta["val"]
    operands = (_blocked(source) if source.shape[1] >= BLOCK else 0) + weight.numel() * weight.element_size()
    return max(_blocked(result), operands + _blocked(result) - _result_bytes(node))


def _convolution_backward(node: fx.Node) -> int:
    """The incoming gradient in oneDNN's layout, and the input (of many channels) or its gradient."""
    mask = node.args[10]
    wants_input = bool(mask[0]) if isinstance(mask, (list, tuple)) else True
    incoming, outgoing = (fx_nodes.operand(node, i).meta["val"] for i in (0, 1))
    return _blocked(incoming) + (_blocked(outgoing) if wants_input or outgoing.shape[1] >= BLOCK else 0)


def _cast_input(node: fx.Node) -> int:
    """A sum or mean in another dtype than its input's."""
    source, result = fx_nodes.operand(node).meta["val"], fx_values.tensors(node.meta["val"])[0]
    return source.numel() * result.element_size() if source.dtype != result.dtype else 0


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
    copied = _bytes(node, 1) if query.shape[1] > 1 else 0  # the gradient, whose heads lie in another order
    return copied + size * rows * (2 * min(key.shape[-2], 512) + 1) * torch.get_num_threads()


def _per_matrix(count: int) -> Callable[[fx.Node], int]:
    """LAPACK's work for one matrix of a batch."""

    def rule(node: fx.Node) -> int:
        value = fx_nodes.operand(node).meta["val"]
        return count * value.shape[-1] * value.shape[-2] * value.element_size()

    return rule


def _selection(node: fx.Node) -> int:
    """A copy of the operand and its indices, which are permuted."""
    value = fx_nodes.operand(node).meta["val"]
    return value.numel() * (value.element_size() + 8)


def _sum_squares(node: fx.Node) -> int:
    """A chunk in float64, and its sum. A rank's own part of a range may be less than the chunk that is planned."""
    return 8 * (min(PIECE["cpu"], fx_nodes.operand(node).meta["val"].numel()) + 1)


def _stochastic_round(node: fx.Node) -> int:
    """Two int32 numbers for each element of a chunk."""
    return 8 * min(PIECE["cpu"], fx_nodes.operand(node).meta["val"].numel()) + 20


def _reduced(count: int) -> Callable[[fx.Node], int]:
    """A loss's terms, where it returns their sum or mean."""
    return lambda node: count * _bytes(node) if _result_bytes(node) < _bytes(node) else 0


def _upsample(node: fx.Node) -> int:
    """Operand and result with their channels last."""
    return _bytes(node) + _result_bytes(node)


def _query_rows(length: int) -> int:
    """The rows of a tile of queries, as ATen's kernel chooses them."""
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32)


def _adamw8(node: fx.Node) -> int:
    """The buffers of a chunk: some ten."""
    return min(fx_nodes.operand(node).meta["val"].numel(), CHUNK["cpu"]) * BUFFER_BYTES


def _onednn_matmul(node: fx.Node) -> int:
    """Blocks of both operands in oneDNN's order. With an addend, a transposed left operand is copied too."""
    left = fx_nodes.operand(node, -2).meta["val"]
    copied = _bytes(node, -2) if len(node.args) > 2 and not left.is_contiguous() else 0
    return copied + min(_bytes(node, -1) + _bytes(node, -2) + 1024, 545_792) * torch.get_num_threads()


def _orthogonalize(node: fx.Node) -> int:
    """The matrix once more in bfloat16, two squares of its shorter side, and the blocks that oneDNN's matmuls keep."""
    shape = node.args[1] if node.target is fzero_ops.orthogonalize_flat.default else node.meta["val"].shape
    rows, cols = sorted(shape)  # type: ignore[arg-type]
    blocks = 2 * rows * max(rows, min(cols, 512)) + 5_124 if AMX else 132_096  # one operand, in tiles
    return 2 * rows * cols + 4 * rows * rows + blocks


RULES: dict[object, Callable[[fx.Node], int]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_batch_norm_backward.default: _bytes,
    aten.logsumexp.default: _bytes,
    aten.mse_loss.default: _reduced(2),
    fzero_ops.sum_squares.default: _sum_squares,
    fzero_ops.stochastic_round.default: _stochastic_round,
    fzero_ops.adamw8.default: _adamw8,
    fzero_ops.adamw8_.default: _adamw8,
    fzero_ops.orthogonalize.default: _orthogonalize,
    fzero_ops.orthogonalize_flat.default: _orthogonalize,
    **dict.fromkeys(matmul.FORMS.values(), _onednn_matmul),
    **dict.fromkeys(matmul.OUT_FORMS.values(), _onednn_matmul),
    aten.binary_cross_entropy.default: _reduced(1),
    aten.huber_loss.default: _reduced(1),
    aten.smooth_l1_loss.default: _reduced(2),
    aten.cumsum.default: _cast_input,
    aten.linalg_inv_ex.default: lambda node: _bytes(node) + _per_matrix(1)(node),
    aten.linalg_qr.default: _per_matrix(1),
    aten._linalg_svd.default: lambda node: _bytes(node) + _per_matrix(1)(node),
    aten._linalg_eigh.default: _per_matrix(3),
    aten.linalg_matrix_exp.default: lambda node: 10 * _bytes(node),
    aten.kthvalue.default: _selection,
    aten.upsample_nearest2d.default: _upsample,
    aten.upsample_bilinear2d.default: _upsample,
    aten.im2col.default: _bytes,
    aten.col2im.default: _bytes,
    aten.sum.default: _cast_input,
    aten.sum.dim_IntList: _cast_input,
    aten.mean.default: _cast_input,
    aten.mean.dim: _cast_input,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
