"""traits: what is known of an op beyond its schema, asked by verify, passes and codegen alike.

A trait is a row in one of the tables below. aten's rows are written here. The module that defines an op of fzero
registers its rows beside the op (`register`), so that a new op is one row and no other file changes.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
Ratios = tuple[tuple[int, ...], tuple[int, ...]]  # per operand, per result: elements of the leaf for one of its own

# in-place op -> (its pure form, for each result of the pure form the argument that it goes to)
IN_PLACE: dict[Any, tuple[Any, tuple[int, ...]]] = {}

# op on blocks of elements -> its ratios. A block of the results depends on the same block of the operands alone. So
# the op runs on slices, as an elementwise op does
BLOCKWISE: dict[Any, Ratios] = {}

# op that needs all of a leaf -> its flat form, which takes the leaf's elements in 1-D, then the leaf's shape. Of no
# elements the flat form makes none
WHOLE: dict[Any, Any] = {}
FLAT_FORMS: dict[Any, Any] = {}  # the other way round

# pointwise by meaning, though torch does not tag them
_POINTWISE = {
    aten._to_copy.default,
    aten.clone.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    # forms that write into `out=` of ops that torch does tag
    aten.clip.Tensor_out,
    aten.elu.out,
    aten.gelu.out,
    aten.hardshrink.out,
    aten.hardsigmoid.out,
    aten.hardtanh.out,
    aten.leaky_relu.out,
    aten.mish.out,
    aten.softplus.out,
    aten.softshrink.out,
    aten.threshold.out,
    aten.true_divide.out,
    aten.where.self_out,
}


def register(
    op: Any, *, in_place: tuple[Any, tuple[int, ...]] | None = None, blockwise: Ratios | None = None, whole: Any = None
) -> None:
    """Adds an op's rows to `IN_PLACE`, `BLOCKWISE` and `WHOLE`; the arguments are the rows.

    The module that defines the op calls it once, when it is imported.
    """
    if in_place is not None:
        IN_PLACE[op] = in_place
    if blockwise is not None:
        BLOCKWISE[op] = blockwise
    if whole is not None:
        WHOLE[op], FLAT_FORMS[whole] = whole, op


def is_pointwise(op: Any) -> bool:
    """Whether each element of the result depends on the same element of every full-shaped operand alone."""
    return op in _POINTWISE or torch.Tag.pointwise in getattr(op, "tags", ())
