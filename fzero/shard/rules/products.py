"""products: ops that multiply two operands and sum over what they share, written as einsum.

mm:    ik,kj->ij          k sharded: both operands are parts, the result is Partial
addmm: x + ik,kj->ij      x is added once, so it must be Partial where k is sharded
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.shard.factors import FREE, SUM, WHOLE, Call, Dim, Factors, Maker, broadcast
from fzero.shard.rules.rule import Rule, Rules

aten = torch.ops.aten

# op -> its operands and result by letters, and the arguments that are linear; `self` of addmm is broadcast and added
PRODUCTS: dict[Any, tuple[str, tuple[str, ...]]] = {
    aten.mm.default: ("self:ik mat2:kj -> ij", ("self", "mat2")),
    aten.addmm.default: ("mat1:ik mat2:kj -> ij", ("self mat1", "self mat2")),
    aten.bmm.default: ("self:bik mat2:bkj -> bij", ("self", "mat2")),
    aten.baddbmm.default: ("batch1:bik batch2:bkj -> bij", ("self batch1", "self batch2")),
    aten.mv.default: ("self:ik vec:k -> i", ("self", "vec")),
    aten.addmv.default: ("mat:ik vec:k -> i", ("self mat", "self vec")),
    aten.dot.default: ("self:k tensor:k ->", ("self", "tensor")),
    aten.ger.default: ("self:i vec2:j -> ij", ("self", "vec2")),
}


def product(text: str) -> Callable[[Call], Factors]:
    """The rule of a product written as `name:letters ... -> letters`. Letters that the result lacks are summed over."""
    left, _, result = (part.strip() for part in text.partition("->"))
    operands = dict(word.split(":") for word in left.split())

    def factors(call: Call) -> Factors:
        m = Maker(call)
        of: dict[str, Dim] = {}
        for name, letters in operands.items():
            for letter, size in zip(letters, call.shape(name), strict=True):
                if letter not in of:
                    of[letter] = m.dim(size, FREE if letter in result else SUM)
        dims = {name: tuple(of[letter] for letter in letters) for name, letters in operands.items()}
        out = tuple(of[letter] for letter in result)
        if "self" not in operands:
            dims["self"] = broadcast(call.shape("self"), out)
        return m.factors(dict(dims), out, addends=() if "self" in operands else ("self",))

    return factors


def grouped(call: Call) -> Factors:
    """A product for each group of rows, or of summed-over indices, that `offs` ends: those and the groups are whole.

    The dims that each operand has say where the groups lie: mk,ekn->mn, or mk,kn->emn with groups of k.
    """
    m = Maker(call)
    a, b = call.shape("self"), call.shape("mat2")
    both = len(a) == len(b) == 3
    num = next((shape[0] for shape in (a, b, call.result) if len(shape) == 3), 1)
    group = m.dim(num, FREE if both else WHOLE)
    rows = m.dim(a[-2], WHOLE if len(a) == 2 and len(b) == 3 else FREE)
    inner = m.dim(a[-1], WHOLE if len(a) == len(b) == 2 else SUM)
    cols = m.dim(b[-1], WHOLE if len(a) == 3 and len(b) == 2 else FREE)
    left = (group, rows, inner) if len(a) == 3 else (rows, inner)
    right = (group, inner, cols) if len(b) == 3 else (inner, cols)
    out = (group, rows, cols) if len(call.result) == 3 else (rows, cols)
    return m.factors({"self": left, "mat2": right}, out, addends=("bias",))


def by_experts(call: Call) -> Factors:
    """Rows sorted by expert, each times its expert's weight: mk,ekn->mn."""
    m = Maker(call)
    (rows, inner), (experts, _, cols) = call.shape("input"), call.shape("weight")
    row, expert, k, n = m.dim(rows, WHOLE), m.dim(experts, WHOLE), m.dim(inner, SUM), m.dim(cols)
    return m.factors({"input": (row, k), "weight": (expert, k, n)}, (row, n))


def by_experts_back(call: Call) -> Factors:
    """The gradients: mn,ekn->mk and mk,mn->ekn."""
    m = Maker(call)
    (rows, inner), (experts, _, cols) = call.shape("input"), call.shape("weight")
    row, expert, k, n = m.dim(rows, WHOLE), m.dim(experts, WHOLE), m.dim(inner), m.dim(cols, SUM)
    x, weight = (row, k), (expert, k, n)
    return m.factors({"input": x, "weight": weight, "grad_output": (row, n)}, x, weight)


_OF_TRANSFORMERS: Rules = {
    "transformers.grouped_mm_fallback.default": Rule(by_experts, ("input", "weight")),
    "transformers.grouped_mm_fallback_backward.default": Rule(by_experts_back, ("grad_output",)),
}
RULES: Rules = {op: Rule(product(text), linear) for op, (text, linear) in PRODUCTS.items()} | {
    **_OF_TRANSFORMERS,
    aten._grouped_mm.default: Rule(grouped, ("self", "mat2")),
}
