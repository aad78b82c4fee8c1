"""reductions: ops that sum, compare or scan along dims.

sum(x, 1):  ab -> a     b sharded: Partial       amax: Partial("max")
var(x, 1):  ab -> a     b sharded: Replicated, by a local form
cumsum(x, 1):  ab -> ab   b whole
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.shard.factors import FREE, MAX, SUM, WHOLE, Call, Dims, Factors, Kind, Maker
from fzero.shard.rules.rule import Rule, Rules

aten = torch.ops.aten


def reduced(kind: Kind, local: str = "") -> Callable[[Call], Factors]:
    """The rule of an op that reduces the dims `dim` (all where there are none), with factors of `kind`. local: its form
    over a sharded dim; with `FREE` that gives the whole result."""

    def factors(call: Call) -> Factors:
        m = Maker(call)
        gone = _reduced_dims(call)
        dims = tuple(
            m.dim(size, kind, local) if d in gone else m.dim(size) for d, size in enumerate(call.shape("self"))
        )
        kept: Dims = tuple(() if d in gone else dim for d, dim in enumerate(dims))
        if not call.named.get("keepdim"):
            kept = tuple(dim for d, dim in enumerate(dims) if d not in gone)
        return m.factors({"self": dims}, *[kept] * len(call.results))

    return factors


def _reduced_dims(call: Call) -> set[int]:
    ndim, given = call.ndim("self"), call.named.get("dim")
    if given is None or given == []:
        return set(range(ndim))
    return {d % ndim for d in (given if isinstance(given, (list, tuple)) else [given])} if ndim else set()


def along(*names: str) -> Callable[[Call], Factors]:
    """The rule of an op whose operands `names` and results have the same dims, but for the size of `dim`: whole."""

    def factors(call: Call) -> Factors:
        m = Maker(call)
        at = call.dim(of=names[0])
        dims = m.dims(call.shape(names[0]), but=[at])
        outs = [_resized(m, dims, at, tuple(result.shape)) for result in call.results]
        return m.factors(dict.fromkeys(names, dims), *outs)

    return factors


def _resized(m: Maker, dims: Dims, at: int, shape: tuple[int, ...]) -> Dims:
    """The same dims; dim `at` has a factor of its own, for its size may be another."""
    return tuple(m.dim(size, WHOLE) if d == at else dims[d] for d, size in enumerate(shape))


SUMS = (aten.sum.default, aten.sum.dim_IntList)
MEANS = (aten.mean.default, aten.mean.dim)
MAXIMA = (aten.amax.default, aten.max.default, aten.any.default, aten.any.dim, aten.any.dims)
WITHIN: tuple[Any, ...] = (
    aten.min.default, aten.all.default, aten.all.dim, aten.all.dims, aten.prod.default, aten.prod.dim_int,
)  # fmt: skip
FORMS = {
    aten.amin.default: "amin", aten.var.correction: "var", aten.std.correction: "std",
    aten.var_mean.correction: "var_mean", aten.std_mean.correction: "std_mean", aten.logsumexp.default: "logsumexp",
    aten.linalg_vector_norm.default: "vector_norm", aten.max.dim: "max_dim", aten.min.dim: "min_dim",
    aten.argmax.default: "argmax", aten.argmin.default: "argmin",
}  # fmt: skip
SCANS: tuple[Any, ...] = (
    aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default, aten.topk.default,
    aten.sort.default, aten.sort.stable,
)  # fmt: skip


def by_form(name: str) -> Callable[[Call], Factors]:
    """The rule of an op with a local form; the place of an extremum in all dims needs all of the operand."""

    def factors(call: Call) -> Factors:
        whole = name.startswith("arg") and call.named.get("dim") is None
        return reduced(WHOLE if whole else FREE, "" if whole else name)(call)

    return factors


def squared(call: Call) -> Factors:
    """A sum of squares of all elements."""
    m = Maker(call)
    return m.factors({"x": m.dims(call.shape("x"), SUM)}, ())


RULES: Rules = {
    **{op: Rule(reduced(SUM), ("self",)) for op in SUMS},
    **{op: Rule(reduced(SUM, "mean"), ("self",)) for op in MEANS},
    **{op: Rule(reduced(MAX)) for op in MAXIMA},
    **{op: Rule(reduced(WHOLE)) for op in WITHIN},
    **{op: Rule(by_form(name)) for op, name in FORMS.items()},
    **{op: Rule(along("self")) for op in SCANS},
    aten.cumsum.default: Rule(along("self"), ("self",)),
    "fzero.sum_squares.default": Rule(squared),
}
