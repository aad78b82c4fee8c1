"""whole: ops of which no operand may be sharded.

Random draws are among them: a shard must draw its elements of the global tensor, and the ops draw from their first
element on. So every rank draws all elements, the same ones: those of a key. What torch draws from a hidden state would
differ between ranks; capture refuses it.
"""

from __future__ import annotations

from typing import Any

import torch

from fzero.ir import strided_ops  # noqa: F401  (defines its ops)
from fzero.shard.factors import Call, Factors, Maker
from fzero.shard.rules.rule import Rule, Rules

aten, own = torch.ops.aten, torch.ops.fzero


def whole(call: Call) -> Factors:
    """No factor may be sharded."""
    return Maker(call).factors({})


def is_random(op: Any) -> bool:
    """Whether torch tags an op as one that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


OPS: tuple[Any, ...] = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.eye.default,
    aten.eye.m, aten.scalar_tensor.default, aten.as_strided.default, aten.diagonal.default,
    aten.diagonal_backward.default, aten.unfold.default, aten.bincount.default, aten.histc.default,
    aten.searchsorted.Tensor, aten.bucketize.Tensor, aten.empty_strided.default, aten.equal.default,
    aten._assert_tensor_metadata.default, aten._assert_async.msg, own.strided.default, own.strided_scatter.default,
)  # fmt: skip

RULES: Rules = {op: Rule(whole) for op in OPS}
DRAWS = ("random_split", "random_fold_in", "random_fold_in_tensor", "uniform", "normal", "random_bits")
BY_NAME = {f"fzero.{name}.default": Rule(whole) for name in (*DRAWS, "axis_index")}  # defined above this folder
