"""workspace: bytes that a kernel allocates for itself, beyond its operands and results.

The rules are for ATen's CPU kernels: the plan of another machine cannot measure. Each was found by running the op
under the profiler (torch 2.13.0, oneDNN) and comparing the bytes that the allocator saw with the results' bytes. The
ops of common models without a rule were seen to need nothing, or less than a hundredth of their operands.

Three kinds of memory come again and again. A kernel that walks its operand by itself copies an operand that is not
contiguous first (`COPIES`); BLAS copies a matrix whose rows and columns both lie apart (`_gemm`); an op that returns a
sum keeps its terms (`_reduced`). oneDNN's convolutions reorder into blocked layouts. Operands of another dtype are cast
first. Attention keeps a tile per thread. The need of matmuls in 16 bits is not known: oneDNN packs an operand or two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import fx

from fzero import backend
from fzero._torch_compat import AMX
from fzero.codegen import convolution_workspace, matmul
from fzero.codegen.convolution_workspace import Convolution
from fzero.ir import fx_nodes, fx_values
from fzero.optim.adam8 import BUFFER_BYTES, CHUNK
from fzero.optim.transform import PIECE
from fzero.recurrent import recurrent_ops as recurrent

aten = torch.ops.aten
fzero_ops = torch.ops.fzero


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that a node's kernel holds while it runs, on CPU tensors; 0 elsewhere and for ops without a rule."""
    rule = RULES.get(node.target) or BY_NAME.get(str(node.target)) or (_promoted if _pointwise(node.target) else None)
    values = (
        fx_values.tensors(node.meta["val"]) or fx_values.tensors(fx_nodes.operand(node).meta["val"]) if rule else []
    )
    if rule is None or not values or not backend.of(values[0].device).on_host:
        return 0
    return rule(node)


def _bytes(node: fx.Node, index: int = 0) -> int:
    value = fx_nodes.operand(node, index).meta["val"]
    return value.numel() * value.element_size()


def _result_bytes(node: fx.Node) -> int:
    return sum(v.numel() * v.element_size() for v in fx_values.tensors(node.meta["val"]))


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
    source, weight = (fx_nodes.operand(node, i).meta["val"] for i in (0, 1))
    return convolution_workspace.forward_bytes(Convolution(source, weight, node.meta["val"], *node.args[3:]))  # type: ignore[arg-type]


def _convolution_backward(node: fx.Node) -> int:
    incoming, source, weight = (fx_nodes.operand(node, i).meta["val"] for i in (0, 1, 2))
    *numbers, wants = node.args[4:]
    wants_source, wants_weight, _ = cast(Sequence[bool], wants)
    convolution = Convolution(source, weight, incoming, *numbers)  # type: ignore[arg-type]
    return convolution_workspace.backward_bytes(convolution, incoming, wants_source, wants_weight)


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
    return 8 * (min(PIECE, fx_nodes.operand(node).meta["val"].numel()) + 1)


def _stochastic_round(node: fx.Node) -> int:
    """Two int32 numbers for each element of a chunk."""
    return 8 * min(PIECE, fx_nodes.operand(node).meta["val"].numel()) + 20


def _reduced(count: int) -> Callable[[fx.Node], int]:
    """A loss's terms, where it returns their sum or mean."""
    return lambda node: count * _bytes(node) if _result_bytes(node) < _bytes(node) else 0


def _bce_with_logits(node: fx.Node) -> int:
    """The terms and their product with the target, a copy of logits in another order, and the weights of classes."""
    logits, weights = _values(node, (0,))[0], _values(node, (3,))
    size = torch.broadcast_shapes(*(x.shape for x in _values(node, (0, 1)))).numel() * logits.element_size()
    result = fx_values.tensors(node.meta["val"])[0]
    times = 1 + (result.numel() < logits.numel()) + (not logits.is_contiguous())
    return times * size + sum(x.nbytes for x in weights) + 16


LAST = torch.channels_last
TRANSPOSED = 60 * 60  # elements of the block through which ATen copies a transposed matrix


def _copy_bytes(value: torch.Tensor) -> int:
    """Bytes of a contiguous copy of a value, and of what its kernel takes; 0 where it is contiguous."""
    if value.is_contiguous() or not value.numel():
        return 0
    return (value.numel() + _transposed(value) * TRANSPOSED) * value.element_size()


def _transposed(value: torch.Tensor) -> bool:
    return value.dim() == 2 and value.stride(0) == 1 and value.numel() >= TRANSPOSED


def _copies(*places: int) -> Callable[[fx.Node], int]:
    """Contiguous copies of the operands at these places, of those that are tensors."""
    return lambda node: sum(map(_copy_bytes, _values(node, places)))


def _values(node: fx.Node, places: Sequence[int]) -> list[torch.Tensor]:
    operands = [*node.args, *node.kwargs.values()]
    return [x.meta["val"] for i in places if i < len(operands) and isinstance(x := operands[i], fx.Node)]


def _all(*rules: Callable[[fx.Node], int]) -> Callable[[fx.Node], int]:
    return lambda node: sum(rule(node) for rule in rules)


def _gemm(node: fx.Node) -> int:
    """Copies of matrices whose rows and columns both lie apart; of a batch one matrix at a time."""
    matrices = [v for v in _values(node, range(len(node.args)))[-2:] if v.dim() >= 2]
    return sum(math.prod(v.shape[-2:]) * v.element_size() for v in matrices if v.is_conj() or not _for_blas(v))


def _for_blas(matrix: torch.Tensor) -> bool:
    (rows, cols), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    return (right == 1 and down >= cols) or (down == 1 and right >= rows)


def _block(node: fx.Node) -> int:
    """The block of a copy of a transposed matrix into a contiguous one."""
    (result, *_) = fx_values.tensors(node.meta["val"])
    sources = [v for v in _values(node, range(len(node.args))) if _transposed(v) and v.dtype is result.dtype]
    return TRANSPOSED * result.element_size() if sources and result.is_contiguous() else 0


def _lapack(place: int) -> Callable[[fx.Node], int]:
    """LAPACK's copy of an operand, column by column, and the block of a copy of the result."""

    def rule(node: fx.Node) -> int:
        result = fx_values.tensors(node.meta["val"])[0]
        return _bytes(node, place) + _transposed(result) * TRANSPOSED * result.element_size()

    return rule


def _determinant(node: fx.Node) -> int:
    """Of factors and pivots: a copy of the pivots, a mask of them, the diagonals, and some numbers of each matrix."""
    pivots = fx_values.tensors(node.meta["val"])[-1]
    diagonals = pivots.numel() * fx_nodes.operand(node).meta["val"].element_size()
    matrices = pivots.numel() // max(pivots.shape[-1], 1)
    return pivots.nbytes + pivots.numel() + diagonals + 4 * pivots.shape[-1] + 32 * matrices


def _sort(node: fx.Node) -> int:
    """The numbers of the elements along the dim."""
    value = fx_nodes.operand(node).meta["val"]
    stable = "stable" in str(node.target)
    given = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 and not stable else -1)
    return 8 * value.shape[given] if value.dim() and isinstance(given, int) else 8


def _fft(node: fx.Node) -> int:
    """A copy of an operand whose other dims are not one stretch of equal steps. Real results of several dims also need
    the complex values before the last one."""
    source, dims = fx_nodes.operand(node).meta["val"], cast(Sequence[int], node.args[1])
    if node.target is not aten._fft_c2r.default or len(dims) == 1:
        return _fft_copy(source, dims)
    like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    between = aten._fft_c2c.default(like, dims[:-1], 0, False)
    nbytes = source.numel() * source.element_size()
    return nbytes + max(_fft_copy(source, dims[:-1]) - _result_bytes(node), _fft_copy(between, dims[-1:]))


def _fft_copy(value: torch.Tensor, dims: Sequence[int]) -> int:
    others = sorted((d for d in range(value.dim()) if d not in dims), key=value.stride, reverse=True)
    steps = [(value.shape[d], value.stride(d)) for d in others if value.shape[d] > 1]
    joined = all(outer == size * inner for (_, outer), (size, inner) in itertools.pairwise(steps))
    return 0 if joined else value.numel() * value.element_size()


def _group_norm_backward(node: fx.Node) -> int:
    """Two sums for each channel of each sample."""
    rows, channels = node.args[5:7]
    return 2 * rows * channels * fx_nodes.operand(node, 1).meta["val"].element_size()  # type: ignore[operator]


def _triangle(node: fx.Node) -> int:
    """A copy of matrices that do not follow one another."""
    value = fx_nodes.operand(node).meta["val"]
    steps = [math.prod(value.shape[d + 1 :]) for d in range(value.dim() - 2)]
    apart = any(value.shape[d] > 1 and value.stride(d) != step for d, step in enumerate(steps))
    return _copy_bytes(value) if apart else 0


def _householder(node: fx.Node) -> int:
    """LAPACK's work for a block of some columns, and the block of a copy of the matrix."""
    value = fx_nodes.operand(node).meta["val"]
    return (40 * max(value.shape[-2:]) + TRANSPOSED) * value.element_size()


def _cdist(first: int) -> Callable[[fx.Node], int]:
    """Copies of both points, the first at place `first`; two columns more where a product gives the distances."""

    def rule(node: fx.Node) -> int:
        points = _values(node, (first, first + 1))
        batch = torch.broadcast_shapes(*(x.shape[:-2] for x in points))
        wide = [x.expand(*batch, *x.shape[-2:]) for x in points]
        p, how = (*node.args[first + 2 :], None)[:2]
        product = not first and p == 2 and (how == 1 or (not how and max(x.shape[-2] for x in points) > 25))
        columns = sum((x.shape[-1] + 2) * x.shape[:-1].numel() * x.element_size() for x in wide) if product else 0
        return columns + sum(map(_copy_bytes, wide)) + _copies(0)(node) * first

    return rule


def _counted(count: int) -> Callable[[fx.Node], int]:
    """So many bytes for each element of the operand."""
    return lambda node: count * fx_nodes.operand(node).meta["val"].numel()


def _trilinear(node: fx.Node) -> int:
    """The product of the first two operands at one number of the dim that is unrolled, its product with the third, and
    copies of the slices. Operands lack the dims that they are expanded by; those of the third are summed at once."""
    operands, expanded, summed = node.args[:3], cast(Sequence[Sequence[int]], node.args[3:6]), node.args[6]
    unrolled = node.args[7] if len(node.args) > 7 else 1
    values = [cast(fx.Node, x).meta["val"] for x in operands]
    sizes: dict[int, int] = {}
    rank = values[0].dim() + len(expanded[0])
    for value, lacks in list(zip(values, expanded, strict=True))[:2]:
        sizes |= zip([d for d in range(rank) if d not in lacks], value.shape, strict=True)
    at_once = {*expanded[2]} & {*cast(Sequence[int], summed)} | {unrolled}
    product = math.prod(n for d, n in sizes.items() if d not in at_once) * values[0].element_size()
    return product + _result_bytes(node) + sum(x.nbytes for x in values) // max(sizes.get(cast(int, unrolled), 1), 1)


def _resampled(node: fx.Node) -> int:
    """The operand with its new width, and the weights of each place."""
    value, result = fx_nodes.operand(node).meta["val"], fx_values.tensors(node.meta["val"])[0]
    down, across = (max(a, b) for a, b in zip(value.shape[-2:], result.shape[-2:], strict=True))
    between = value.shape[:2].numel() * value.shape[-2] * result.shape[-1]
    return (between + 16 * (down + across)) * value.element_size()


def _cross_entropy_in_chunks(node: fx.Node) -> int:
    """The logits of a chunk of rows, its gradient, numbers of each row, and copies of both operands."""
    source, weight = _values(node, (0, 1))
    rows = cast(int, node.args[8] if "no_reduction" not in str(node.target) else node.args[6])
    size = max(source.element_size(), 4) + source.element_size() % 4
    numbers = 16 * source.shape[0]
    return rows * (weight.shape[0] + source.shape[1] + 16) * size + numbers + _copies(0, 1)(node)


def _upsample(node: fx.Node) -> int:
    """Operand and result with their channels last."""
    return _bytes(node) + _result_bytes(node)


def _is_last(value: torch.Tensor) -> bool:
    return value.dim() == 4 and value.is_contiguous(memory_format=LAST)


def _pool(node: fx.Node) -> int:
    """A copy of an operand whose channels are neither last nor in order."""
    (value,) = _values(node, (0,))
    return 0 if _is_last(value) else _copy_bytes(value)


def _pool_backward(node: fx.Node) -> int:
    """Copies in the order of the incoming gradient: of it, of the indices, and the result once more, which is made in
    the source's."""
    orders = [_order(value) for value in _values(node, (0, 1))]
    again = node.meta["val"].nbytes if orders[0] is not orders[1] else _copy_in(orders[0], node.meta["val"])
    return _in_order_of(0, (0, 7))(node) + cast(int, again)


def _order(value: torch.Tensor) -> torch.memory_format:
    return LAST if _is_last(value) and not value.is_contiguous() else torch.contiguous_format


def _copy_in(order: torch.memory_format, value: torch.Tensor) -> int:
    return 0 if value.is_contiguous(memory_format=order) else value.nbytes


def _in_order_of(place: int, places: Sequence[int]) -> Callable[[fx.Node], int]:
    """Copies of the operands at these places, in the order of the one at `place`: channels last, or contiguous."""

    def rule(node: fx.Node) -> int:
        order = _order(_values(node, (place,))[0])
        return sum(_copy_in(order, value) for value in _values(node, places))

    return rule


def _query_rows(length: int) -> int:
    """The rows of a tile of queries, as ATen's kernel chooses them."""
    return min(length, 256 if length >= 768 else 64 if length >= 192 else 32)


def _adamw8(node: fx.Node) -> int:
    """The buffers of a chunk: some ten."""
    return min(fx_nodes.operand(node).meta["val"].numel(), CHUNK) * BUFFER_BYTES


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


def _recurrent(count: Callable[..., int]) -> Callable[[fx.Node], int]:
    return lambda node: count(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))


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


def _op(name: str) -> object:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


RULES: dict[object, Callable[[fx.Node], int]] = {
    **{_op(name): _copies(*places) for name, places in COPIES.items()},
    **dict.fromkeys(map(_op, ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv")), _gemm),
    **dict.fromkeys(map(_op, ("_fft_r2c", "_fft_c2c", "_fft_c2r")), _fft),
    **dict.fromkeys(map(_op, ("clone", "_to_copy", "copy", "copy_", "masked_fill.Scalar")), _block),
    **dict.fromkeys(map(_op, ("index_add", "scatter.src", "scatter.value", "scatter_add")), _block),
    aten.t_copy.default: lambda node: TRANSPOSED * fx_values.tensors(node.meta["val"])[0].element_size(),
    **dict.fromkeys(map(_op, ("_linalg_det", "_linalg_slogdet")), _determinant),
    **dict.fromkeys(map(_op, ("median", "nanmedian", "ormqr", "linalg_lu_solve")), _lapack(0)),
    **dict.fromkeys(
        map(_op, ("linalg_qr", "geqrf", "linalg_householder_product", "linalg_ldl_factor_ex")), _householder
    ),
    aten.linalg_ldl_solve.default: _lapack(2),
    aten.linalg_lu.default: lambda node: _bytes(node) + _householder(node),
    aten.linalg_eig.default: lambda node: 3 * _bytes(node) + 160_000,
    **dict.fromkeys(map(_op, ("tril", "triu")), _triangle),
    aten.linalg_solve_triangular.default: lambda node: sum(
        0 if v.mT.is_contiguous() else _copy_bytes(v) for v in _values(node, (0,))
    ),
    aten._euclidean_dist.default: lambda node: sum(  # both beside their norms and ones
        v.numel() // max(v.shape[-1], 1) * (v.shape[-1] + 2) * v.element_size() for v in _values(node, (0, 1))
    ),
    aten.linalg_pinv.atol_rtol_tensor: lambda node: 3 * _bytes(node),
    aten.lu_unpack.default: lambda node: fx_values.tensors(node.meta["val"])[-1].nbytes,
    aten.unfold_backward.default: lambda node: 2 * _result_bytes(node),
    aten.masked_scatter_backward.default: lambda node: _bytes(node) + 10 * _values(node, (1,))[0].numel(),
    aten.cholesky_solve.default: _lapack(1),
    aten._cdist_forward.default: _cdist(0),
    aten._cdist_backward.default: _cdist(1),
    **dict.fromkeys(map(_op, ("searchsorted.Tensor", "searchsorted.Scalar")), _copies(0, 1, 2, 3, 4)),
    aten.cholesky.default: lambda node: _lapack(0)(node) - _bytes(node),
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _sort),
    aten._safe_softmax.default: _all(_copies(0), lambda node: _values(node, (0,))[0].numel()),  # a mask
    aten.roll.default: lambda node: _bytes(node) * (len(cast(Sequence[int], node.args[1])) > 1),  # dim by dim
    aten.native_group_norm_backward.default: _all(_group_norm_backward, _in_order_of(1, (0, 1))),
    aten.binary_cross_entropy_with_logits.default: _bce_with_logits,
    aten.soft_margin_loss.default: _reduced(1),
    aten.soft_margin_loss_backward.default: lambda node: 2 * _result_bytes(node),
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_batch_norm_backward.default: _bytes,
    aten.logsumexp.default: lambda node: _bytes(node) + 2 * _result_bytes(node),
    aten.mse_loss.default: _reduced(2),
    aten._trilinear.default: _trilinear,
    _op("_upsample_bilinear2d_aa"): _resampled,
    aten.dist.default: _bytes,
    aten.isinf.default: lambda node: (
        _bytes(node) * fx_nodes.operand(node).meta["val"].is_floating_point()
    ),  # magnitudes
    aten.mvlgamma.default: lambda node: (cast(int, node.args[1]) + 1) * _result_bytes(node),
    aten.index_reduce.default: lambda node: 3 * _bytes(node),
    aten.scatter_reduce.two: lambda node: (_bytes(node) + _counted(1)(node)) * (node.args[4] == "mean"),
    aten._chunk_cat.default: _result_bytes,
    aten.histogram.bins_tensor: _result_bytes,
    **dict.fromkeys(map(_op, ("all.dims", "any.dims")), _counted(1)),
    aten.count_nonzero.dim_IntList: _counted(9),
    aten.linalg_vector_norm.default: _cast_input,
    fzero_ops.sum_squares.default: _sum_squares,
    fzero_ops.stochastic_round.default: _stochastic_round,
    fzero_ops.adamw8.default: _adamw8,
    fzero_ops.adamw8_.default: _adamw8,
    fzero_ops.orthogonalize.default: _orthogonalize,
    fzero_ops.orthogonalize_flat.default: _orthogonalize,
    aten._ctc_loss_backward.Tensor: lambda node: _bytes(node, 6),  # paths that end, beside those that begin
    recurrent.FORWARD: _recurrent(recurrent.scratch_bytes),
    recurrent.BACKWARD: _recurrent(recurrent.backward_scratch_bytes),
    **dict.fromkeys(matmul.FORMS.values(), _onednn_matmul),
    **dict.fromkeys(matmul.OUT_FORMS.values(), _onednn_matmul),
    aten.binary_cross_entropy.default: _reduced(1),
    aten.binary_cross_entropy_backward.default: lambda node: (  # the block of a copy of the result
        TRANSPOSED * _values(node, (0,))[0].element_size() * any(_copy_bytes(v) for v in _values(node, range(4)))
    ),
    aten.huber_loss.default: _reduced(1),
    aten.smooth_l1_loss.default: _reduced(2),
    aten.cumsum.default: _cast_input,
    aten.linalg_inv_ex.default: lambda node: _bytes(node) + _per_matrix(1)(node),
    aten._linalg_svd.default: lambda node: _bytes(node) + _per_matrix(1)(node),
    aten._linalg_eigh.default: _per_matrix(3),
    aten.linalg_matrix_exp.default: lambda node: 12 * _bytes(node),
    aten.kthvalue.default: _selection,
    aten.upsample_nearest2d.default: _upsample,
    aten._upsample_nearest_exact2d.default: _upsample,
    aten.upsample_bilinear2d.default: _upsample,
    **dict.fromkeys(
        map(
            _op,
            str.split(
                "_adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d max_pool2d_with_indices reflection_pad2d "
                "replication_pad2d native_group_norm"
            ),
        ),
        _pool,
    ),
    **dict.fromkeys(
        map(
            _op,
            str.split(
                "_adaptive_avg_pool2d_backward avg_pool2d_backward max_pool2d_with_indices_backward "
                "reflection_pad2d_backward replication_pad2d_backward"
            ),
        ),
        _pool_backward,
    ),
    aten.im2col.default: _all(_bytes, _copies(0)),
    aten.col2im.default: _bytes,
    aten.sum.default: _cast_input,
    aten.sum.dim_IntList: _cast_input,
    aten.mean.default: _cast_input,
    aten.mean.dim: _cast_input,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}

# of ops that torch makes when they are first called, and not in all versions; and of one that `fzero.capture` defines
BY_NAME: dict[str, Callable[[fx.Node], int]] = {
    **dict.fromkeys(
        (
            "torch_nn._linear_cross_entropy_batch_chunked.default",
            "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default",
        ),
        _cross_entropy_in_chunks,
    ),
    "fzero.ctc_loss.default": _result_bytes,  # the results of torch's op, whose table has the longest target's length
}
