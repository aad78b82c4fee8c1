"""whole: ops of which no operand may be sharded, as recurrent layers, and random draws.

A rank that holds a part of what is drawn from a key draws these elements of the global value: uniform numbers are found
by their place (`fzero::uniform_part`). Normal ones are not, so every rank draws them all, the same ones. What torch
draws from a hidden state would differ between ranks; capture refuses it.
"""

from __future__ import annotations

from typing import Any

import torch

from fzero.ir import scan_op, strided_ops  # noqa: F401  (defines its ops)
from fzero.recurrent import recurrent_ops as recurrent
from fzero.shard.factors import FREE, Call, Factors, Maker
from fzero.shard.rules.rule import Rule, Rules

aten, own = torch.ops.aten, torch.ops.fzero


def whole(call: Call) -> Factors:
    """No factor may be sharded."""
    return Maker(call).factors({})


def drawn(call: Call) -> Factors:
    """Uniform numbers: each dim may be in parts. Those of several keys are whole."""
    m = Maker(call)
    if call.ndim("key") != 1:
        return m.factors({})
    return m.factors({}, tuple(m.dim(size, FREE, f"uniform:{d}") for d, size in enumerate(call.result)))


def is_random(op: Any) -> bool:
    """Whether torch tags an op as one that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


OPS: tuple[Any, ...] = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.eye.default,
    aten.eye.m, aten.scalar_tensor.default, aten.as_strided.default, aten.diagonal.default,
    aten.diagonal_backward.default, aten.unfold.default, aten.bincount.default, aten.histc.default,
    aten.searchsorted.Tensor, aten.bucketize.Tensor, aten.empty_strided.default, aten.equal.default,
    aten._assert_tensor_metadata.default, aten._assert_async.msg, own.strided.default, own.strided_scatter.default,
    recurrent.FORWARD, recurrent.BACKWARD, scan_op.SCAN,
)  # fmt: skip

DRAWS = ("random_split", "random_fold_in", "random_fold_in_tensor", "normal", "random_bits")
UNIFORM = "fzero.uniform.default"
RULES: Rules = {
    **{op: Rule(whole) for op in OPS},
    **{f"fzero.{name}.default": Rule(whole) for name in (*DRAWS, "axis_index")},
    UNIFORM: Rule(drawn),
}
