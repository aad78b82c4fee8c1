"""matrix_workspace: bytes that kernels of products, of LAPACK and of Fourier transforms hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from fzero.codegen import matmul
from fzero.codegen.workspace_parts import (
    TRANSPOSED,
    Formula,
    copies,
    copy_bytes,
    is_transposed,
    of,
    operand_bytes,
    result_bytes,
    values,
)
from fzero.ir import fx_nodes, fx_values

aten = torch.ops.aten


def _gemm(node: fx.Node) -> int:
    """Copies of matrices whose rows and columns both lie apart; of a batch one matrix at a time."""
    matrices = [v for v in values(node, range(len(node.args)))[-2:] if v.dim() >= 2]
    return sum(math.prod(v.shape[-2:]) * v.element_size() for v in matrices if v.is_conj() or not _for_blas(v))


def _for_blas(matrix: torch.Tensor) -> bool:
    (rows, cols), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    return (right == 1 and down >= cols) or (down == 1 and right >= rows)


def _lapack(place: int) -> Formula:
    """LAPACK's copy of an operand, column by column, and the block of a copy of the result."""

    def rule(node: fx.Node) -> int:
        result = fx_values.tensors(node.meta["val"])[0]
        return operand_bytes(node, place) + is_transposed(result) * TRANSPOSED * result.element_size()

    return rule


def _per_matrix(count: int) -> Formula:
    """LAPACK's work for one matrix of a batch."""

    def rule(node: fx.Node) -> int:
        value = fx_nodes.operand(node).meta["val"]
        return count * value.shape[-1] * value.shape[-2] * value.element_size()

    return rule


def _determinant(node: fx.Node) -> int:
    """Of factors and pivots: a copy of the pivots, a mask of them, the diagonals, and some numbers of each matrix."""
    pivots = fx_values.tensors(node.meta["val"])[-1]
    diagonals = pivots.numel() * fx_nodes.operand(node).meta["val"].element_size()
    matrices = pivots.numel() // max(pivots.shape[-1], 1)
    return pivots.nbytes + pivots.numel() + diagonals + 4 * pivots.shape[-1] + 32 * matrices


def _householder(node: fx.Node) -> int:
    """LAPACK's work for a block of some columns, and the block of a copy of the matrix."""
    value = fx_nodes.operand(node).meta["val"]
    return (40 * max(value.shape[-2:]) + TRANSPOSED) * value.element_size()


def _triangle(node: fx.Node) -> int:
    """A copy of matrices that do not follow one another."""
    value = fx_nodes.operand(node).meta["val"]
    steps = [math.prod(value.shape[d + 1 :]) for d in range(value.dim() - 2)]
    apart = any(value.shape[d] > 1 and value.stride(d) != step for d, step in enumerate(steps))
    return copy_bytes(value) if apart else 0


def _fft(node: fx.Node) -> int:
    """A copy of an operand whose other dims are not one stretch of equal steps. Real results of several dims also need
    the complex values before the last one."""
    source, dims = fx_nodes.operand(node).meta["val"], cast(Sequence[int], node.args[1])
    if node.target is not aten._fft_c2r.default or len(dims) == 1:
        return _fft_copy(source, dims)
    like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    between = aten._fft_c2c.default(like, dims[:-1], 0, False)
    nbytes = source.numel() * source.element_size()
    return nbytes + max(_fft_copy(source, dims[:-1]) - result_bytes(node), _fft_copy(between, dims[-1:]))


def _fft_copy(value: torch.Tensor, dims: Sequence[int]) -> int:
    others = sorted((d for d in range(value.dim()) if d not in dims), key=value.stride, reverse=True)
    steps = [(value.shape[d], value.stride(d)) for d in others if value.shape[d] > 1]
    joined = all(outer == size * inner for (_, outer), (size, inner) in itertools.pairwise(steps))
    return 0 if joined else value.numel() * value.element_size()


def _cdist(first: int) -> Formula:
    """Copies of both points, the first at place `first`; two columns more where a product gives the distances."""

    def rule(node: fx.Node) -> int:
        points = values(node, (first, first + 1))
        batch = torch.broadcast_shapes(*(x.shape[:-2] for x in points))
        wide = [x.expand(*batch, *x.shape[-2:]) for x in points]
        p, how = (*node.args[first + 2 :], None)[:2]
        product = not first and p == 2 and (how == 1 or (not how and max(x.shape[-2] for x in points) > 25))
        columns = sum((x.shape[-1] + 2) * x.shape[:-1].numel() * x.element_size() for x in wide) if product else 0
        return columns + sum(map(copy_bytes, wide)) + copies(0)(node) * first

    return rule


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
    return product + result_bytes(node) + sum(x.nbytes for x in values) // max(sizes.get(cast(int, unrolled), 1), 1)


def _onednn_matmul(node: fx.Node) -> int:
    """Blocks of both operands in oneDNN's order. With an addend, a transposed left operand is copied too."""
    left, right = (4 * fx_nodes.operand(node, place).meta["val"].numel() for place in (-2, -1))
    copied = left if len(node.args) > 2 and not fx_nodes.operand(node, -2).meta["val"].is_contiguous() else 0
    return copied + min(left + right + 1024, 545_792) * torch.get_num_threads()


def _widened_matmul(node: fx.Node) -> int:
    """The operands and the result in fp32, and what oneDNN needs for these."""
    wide = [*(fx_nodes.operand(node, i).meta["val"] for i in range(len(node.args))), node.meta["val"]]
    return 4 * sum(value.numel() for value in wide) + _onednn_matmul(node)


FORMULAS: dict[str, Formula] = {
    # of all overloads: `write_in_place` makes `mm.out` of `mm`
    **{f"aten.{name}": _gemm for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv")},
    **of("_fft_r2c _fft_c2c _fft_c2r", _fft),
    **of("_linalg_det _linalg_slogdet", _determinant),
    **of("median nanmedian ormqr linalg_lu_solve", _lapack(0)),
    **of("linalg_qr geqrf linalg_householder_product linalg_ldl_factor_ex", _householder),
    "aten.linalg_ldl_solve.default": _lapack(2),
    "aten.linalg_lu.default": lambda node: operand_bytes(node) + _householder(node),
    "aten.linalg_eig.default": lambda node: 3 * operand_bytes(node) + 160_000,
    **of("tril triu", _triangle),
    "aten.linalg_solve_triangular.default": lambda node: sum(
        0 if v.mT.is_contiguous() else copy_bytes(v) for v in values(node, (0,))
    ),
    "aten._euclidean_dist.default": lambda node: sum(  # both beside their norms and ones
        v.numel() // max(v.shape[-1], 1) * (v.shape[-1] + 2) * v.element_size() for v in values(node, (0, 1))
    ),
    "aten.linalg_pinv.atol_rtol_tensor": lambda node: 3 * operand_bytes(node),
    "aten.lu_unpack.default": lambda node: fx_values.tensors(node.meta["val"])[-1].nbytes,
    "aten.cholesky_solve.default": _lapack(1),
    "aten._cdist_forward.default": _cdist(0),
    "aten._cdist_backward.default": _cdist(1),
    "aten.cholesky.default": lambda node: _lapack(0)(node) - operand_bytes(node),
    "aten._trilinear.default": _trilinear,
    **{str(form): _onednn_matmul for form in (*matmul.FORMS.values(), *matmul.OUT_FORMS.values())},
    **{str(form): _widened_matmul for form in (*matmul.WIDENED.values(), *matmul.WIDENED_OUT.values())},
    "aten.linalg_inv_ex.default": lambda node: operand_bytes(node) + _per_matrix(1)(node),
    "aten._linalg_svd.default": lambda node: operand_bytes(node) + _per_matrix(1)(node),
    "aten._linalg_eigh.default": _per_matrix(3),
    "aten.linalg_matrix_exp.default": lambda node: 12 * operand_bytes(node),
}
