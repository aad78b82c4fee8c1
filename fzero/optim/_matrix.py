"""`fzero::orthogonalize`: the nearest (semi-)orthogonal matrix, roughly, by Newton and Schulz's iteration in bfloat16.

    x <- m / max(|m|, eps)                      (Frobenius norm, so no singular value exceeds 1)
    steps times:  g = x x^T,   x <- a x + (b g + c g g) x

The shorter side of the matrix is on the left. It is one op per matrix, and not pointwise: an element of the result
depends on all of the matrix. So a layout may place the op whole on one rank. There, `fzero::orthogonalize_flat` does
the same for a matrix in its flat place in a bucket; on ranks that hold none of it, it does nothing. Operations and
their order are those of `torch.optim.Muon` (torch 2.13), after Keller Jordan's Muon
(https://kellerjordan.github.io/posts/muon/).

Cost for an (r, c) matrix, r <= c: `steps * (4 r^2 c + 2 r^3)` flops, and `(3 r c + 2 r^2) * 2` bytes beside operand and
result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from fzero._torch_compat import AMX
from fzero.ir import op_info
from fzero.ir.op_info import OpInfo
from fzero.optim._ops import _op

__test__: dict[str, str] = {}  # doctest does not look inside a CustomOpDef: it finds their examples here


@_op("(Tensor m, int steps, float a, float b, float c, float eps) -> Tensor", pointwise=False)
def orthogonalize(m: Tensor, steps: int, a: float, b: float, c: float, eps: float) -> Tensor:
    """`m` (rows, cols), floating, with all its singular values near 1: (rows, cols) bfloat16, contiguous.

    `a`, `b`, `c` are the coefficients of the quintic, `eps` the lower bound of the norm that is divided by. Zeros stay
    zeros, and an empty matrix stays empty. Raises `ValueError` for another number of dimensions and `TypeError` for
    integers.

    >>> orthogonalize(torch.tensor([[3.0, 0.0], [0.0, 0.1]]), 5, 3.4445, -4.775, 2.0315, 1e-7).diag().float().round()
    tensor([1., 1.])
    """
    _check_matrix(m)
    tall = m.shape[0] > m.shape[1]
    x = m.to(torch.bfloat16, copy=True)
    if m.numel() == 0:
        return x.contiguous()
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        quintic = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, quintic, x, beta=a)
    return (x.T if tall else x).contiguous()


@_op(
    "(Tensor m, SymInt[] shape, int steps, float a, float b, float c, float eps) -> Tensor",
    pointwise=False,
)
def orthogonalize_flat(m: Tensor, shape: list[int], steps: int, a: float, b: float, c: float, eps: float) -> Tensor:
    """`orthogonalize` of the (rows, cols) = `shape` matrix whose elements `m` holds in 1-D; as flat as `m`, bfloat16.

    If `m` is empty, the result is empty: a leaf that is held by another rank is empty here. Raises `ValueError` for
    another number of elements, and the errors of `orthogonalize`.

    >>> flat = torch.tensor([3.0, 0.0, 0.0, 0.1])
    >>> orthogonalize_flat(flat, [2, 2], 5, 3.4445, -4.775, 2.0315, 1e-7).float().round()
    tensor([1., 0., 0., 1.])
    >>> orthogonalize_flat(flat[:0], [2, 2], 5, 3.4445, -4.775, 2.0315, 1e-7).shape
    torch.Size([0])
    """
    if m.numel() == 0:
        return m.to(torch.bfloat16, copy=True)
    if m.dim() != 1 or m.numel() != math.prod(shape):
        raise ValueError(
            f"fzero::orthogonalize_flat: m has shape {tuple(m.shape)}, needed ({math.prod(shape)},), the elements of a "
            f"matrix {tuple(shape)}, or none"
        )
    return torch.ops.fzero.orthogonalize(m.view(shape), steps, a, b, c, eps).view(-1)


@orthogonalize_flat.register_fake
def _(m: Tensor, shape: list[int], steps: int, a: float, b: float, c: float, eps: float) -> Tensor:
    return torch.empty_like(m, dtype=torch.bfloat16)


@orthogonalize.register_fake
def _(m: Tensor, steps: int, a: float, b: float, c: float, eps: float) -> Tensor:
    _check_matrix(m)
    return torch.empty(m.shape, dtype=torch.bfloat16, device=m.device)


def _square_bytes(node: fx.Node) -> int:
    """The matrix once more in bfloat16, two squares of its shorter side, and the blocks that oneDNN's matmuls keep."""
    shape = node.args[1] if node.target is _FLAT else node.meta["val"].shape
    rows, cols = sorted(shape)  # type: ignore[arg-type]
    blocks = 2 * rows * max(rows, min(cols, 512)) + 5_124 if AMX else 132_096  # one operand, in tiles
    return 2 * rows * cols + 4 * rows * rows + blocks


_WHOLE, _FLAT = torch.ops.fzero.orthogonalize.default, torch.ops.fzero.orthogonalize_flat.default
op_info.add(_WHOLE, OpInfo(flat_form=_FLAT, workspace=_square_bytes))
op_info.add(_FLAT, OpInfo(whole_form=_WHOLE, workspace=_square_bytes))


def _check_matrix(m: Tensor) -> None:
    if m.dim() != 2:
        raise ValueError(f"fzero::orthogonalize: m has shape {tuple(m.shape)}, but it must have two dimensions")
    if not m.is_floating_point():
        raise TypeError(f"fzero::orthogonalize: m is {m.dtype}, but it must be a floating-point tensor")
