"""linalg: products, factors and solutions of small, well-conditioned matrices."""

from __future__ import annotations

from lab.fuzz.operands import Draw
from lab.fuzz.ops.rows import Row


def _square(g: Draw) -> str:
    """A well-conditioned square matrix, or a few."""
    n = g.int(1, 4)
    x = g.fitted(g.some((n, n), (2, n, n)))
    return f"({x} * 0.3 + 2.0 * torch.eye({n}))"


def _positive(g: Draw) -> str:
    n = g.int(1, 3)
    x = g.fitted((n, n))
    return f"({x} @ {x}.mT * 0.2 + torch.eye({n}))"


def _tall(g: Draw) -> str:
    """A matrix of full rank with distinct singular values."""
    n = g.int(1, 3)
    return f"(fit({g.single()}, ({n + 1}, {n})) * 0.2 + torch.eye({n + 1}, {n}) * torch.arange(1.0, {n + 1}))"


def _matmul(g: Draw) -> str:
    x = g.single(1)
    n = g.size(-1, x)
    return f"{x} @ {g.fitted(g.some((n, g.int(1, 4)), (n,), (2, n, 3)))}"


LINALG: dict[str, Row] = {
    "matmul": _matmul,
    "mm": lambda g: f"torch.mm({(x := g.single(2, 2))}, {g.fitted((g.size(1, x), 3))})",
    "bmm": lambda g: f"torch.bmm({(x := g.single(3, 3))}, {g.fitted((g.size(0, x), g.size(2, x), 2))})",
    "mv": lambda g: f"torch.mv({(x := g.single(2, 2))}, {g.fitted((g.size(1, x),))})",
    "dot": lambda g: f"torch.dot({(x := g.single(1, 1))}, {g.like(x)})",
    "outer": lambda g: f"torch.outer({g.single(1, 1)}, {g.single(1, 1)})",
    "addmm": lambda g: (
        f"torch.addmm({g.fitted((3,))}, {(x := g.single(2, 2))}, {g.fitted((g.size(1, x), 3))}, beta=0.5, alpha=2)"
    ),
    "baddbmm": lambda g: (
        f"torch.baddbmm({g.fitted((1, 1, 2))}, {(x := g.single(3, 3))}, {g.fitted((g.size(0, x), g.size(2, x), 2))})"
    ),
    "addmv": lambda g: f"torch.addmv({g.fitted((g.size(0, x := g.single(2, 2)),))}, {x}, {g.fitted((g.size(1, x),))})",
    "addr": lambda g: f"torch.addr({g.fitted((2, 3))}, {g.fitted((2,))}, {g.fitted((3,))})",
    "linear": lambda g: f"F.linear({(x := g.single(1))}, {g.fitted((3, g.size(-1, x)))}, {g.fitted((3,))})",
    "bilinear": lambda g: (
        f"F.bilinear({(x := g.single(2, 2))}, {g.fitted((g.size(0, x), 2))}, {g.fitted((3, g.size(1, x), 2))})"
    ),
    "einsum": lambda g: (
        f'torch.einsum("{g.some("ij,jk->ik", "ij,kj->ik", "ij,jk->k", "ij,jk->ijk", "ij,jk->")}", '
        f'{(x := g.single(2, 2))}, fit({x}, ({g.size(1, x)}, {g.size(1, x)})))'
    ),
    "einsum_batch": lambda g: (
        f'torch.einsum("{g.some("...i,ij->...j", "...i,...i->...")}", {(x := g.single(2))}, fit({x}, ({g.size(-1, x)}'
        f', {g.size(-1, x)})))'
    ),
    "tensordot": lambda g: f"torch.tensordot({(x := g.single(2))}, {x}, dims=([{(d := g.dim(x))}], [{d}]))",
    "inner": lambda g: f"torch.inner({(x := g.single(1, 2))}, {g.like(x)})",
    # torch saves views of both that it does not know as views: written over, they give it a wrong gradient in silence
    "kron": lambda g: f"torch.kron({g.single(1, 2)}.clone(), {g.fitted((2, 2))}.clone())",
    "cross": lambda g: f"torch.linalg.cross({g.fitted((2, 3))}, {g.fitted((2, 3))})",
    "cdist": lambda g: f"torch.cdist({g.fitted((2, 3))}, {g.fitted((4, 3))} + 3.0)",
    "inv": lambda g: f"torch.linalg.inv({_square(g)})",
    "det": lambda g: f"torch.linalg.det({_square(g)})",
    "slogdet": lambda g: f"torch.linalg.slogdet({_square(g)})",
    "solve": lambda g: f"torch.linalg.solve({(a := _square(g))}, {a}.sin())",
    "solve_triangular": lambda g: (
        f"torch.linalg.solve_triangular({(a := _positive(g))}.tril(), {a}.cos(), upper=False)"
    ),
    "cholesky": lambda g: f"torch.linalg.cholesky({_positive(g)})",
    "cholesky_solve": lambda g: f"torch.cholesky_solve({(a := _positive(g))}.sin(), torch.linalg.cholesky({a}))",
    "qr": lambda g: f"torch.linalg.qr({_tall(g)})",
    "svdvals": lambda g: f"torch.linalg.svdvals({_tall(g)})",
    "eigvalsh": lambda g: f"torch.linalg.eigvalsh({_positive(g)} * torch.arange(1.0, {g.int(2, 3)}).sum())",
    "pinv": lambda g: f"torch.linalg.pinv({_tall(g)})",
    "lstsq_free": lambda g: f"torch.linalg.lu_factor({_square(g)})[0]",
    "matrix_exp": lambda g: f"torch.linalg.matrix_exp({_square(g)} * 0.3)",
    "matrix_power": lambda g: f"torch.linalg.matrix_power({_square(g)}, {g.some(2, 3, -1)})",
    "chain_matmul": lambda g: f"torch.linalg.multi_dot([{g.fitted((2, 3))}, {g.fitted((3, 2))}, {g.fitted((2, 4))}])",
    "cov": lambda g: f"torch.cov({g.fitted((2, 5))})",
    "corrcoef": lambda g: f"torch.corrcoef({g.fitted((2, 5))} + wave({g.fitted((2, 5))}))",
    "householder": lambda g: f"torch.linalg.householder_product({g.fitted((3, 2))}, {g.fitted((2,))} * 0.3)",
}  # fmt: skip
