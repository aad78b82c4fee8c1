"""norms: softmax and the normalisations, whose normalised dims are whole.

layer_norm:           x ab, w b -> ab, mean a, rstd a
its backward:         grads ab -> dx ab, dw b, db b     a sharded: dw and db are Partial
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.shard.factors import FREE, SUM, WHOLE, Call, Dims, Factors, Kind, Maker
from fzero.shard.placements import local_shape
from fzero.shard.rules.rule import Rule, Rules, Strategy

aten = torch.ops.aten


def softmax(*names: str, local: str = "") -> Callable[[Call], Factors]:
    """The rule of softmax-like ops on the operands `names`: `dim` is whole, or has a local form."""

    def factors(call: Call) -> Factors:
        m = Maker(call)
        at = call.dim(of=names[0])
        shape = call.shape(names[0])
        dims = tuple(
            (m.dim(size, FREE, local) if local else m.dim(size, WHOLE)) if d == at else m.dim(size)
            for d, size in enumerate(shape)
        )
        return m.factors(dict.fromkeys(names, dims), dims)

    return factors


def _rows_and_cols(m: Maker, call: Call, rows: Kind) -> tuple[Dims, Dims, Dims]:
    """The dims that are not normalised, those that are, and the dims of statistics: of size one where normalised."""
    shape, num = call.shape("input"), len(call["normalized_shape"])
    outer, inner = m.dims(shape[:-num], rows), m.dims(shape[-num:], WHOLE)
    return outer, inner, (*outer, *((),) * num)


def normalised(call: Call) -> Factors:
    """native_layer_norm, _fused_rms_norm: rows may be sharded."""
    m = Maker(call)
    rows, cols, stats = _rows_and_cols(m, call, FREE)
    inputs: dict[str, Any] = {"input": (*rows, *cols), "weight": cols, "bias": cols}
    return m.factors(inputs, (*rows, *cols), *[stats] * (len(call.results) - 1))


def normalised_back(call: Call) -> Factors:
    """Their backwards: the gradients of weight and bias are sums over rows."""
    m = Maker(call)
    rows, cols, stats = _rows_and_cols(m, call, SUM)
    x = (*rows, *cols)
    inputs: dict[str, Any] = {"grad_out": x, "input": x, "mean": stats, "rstd": stats, "weight": cols, "bias": cols}
    return m.factors(inputs, x, *[cols] * (len(call.node.meta["val"]) - 1))


def _grouped(m: Maker, call: Call, rows: Kind) -> tuple[Dims, Dims, Dims]:
    """Of group_norm: the dims of the input, of a weight, and of statistics."""
    shape, num = call.shape("input"), int(call["group"])
    batch, group, inner = m.dim(shape[0], rows), m.dim(num), m.dim(shape[1] // num, WHOLE)
    channel = group + inner
    return (batch, channel, *m.dims(shape[2:], WHOLE)), (channel,), (batch, group)


def group_normalised(call: Call) -> Factors:
    """native_group_norm: rows, and groups of channels."""
    m = Maker(call)
    x, weight, stats = _grouped(m, call, FREE)
    return m.factors({"input": x, "weight": weight, "bias": weight}, x, stats, stats)


def group_normalised_back(call: Call) -> Factors:
    """native_group_norm_backward."""
    m = Maker(call)
    x, weight, stats = _grouped(m, call, SUM)
    inputs: dict[str, Any] = {"grad_out": x, "input": x, "mean": stats, "rstd": stats, "weight": weight}
    return m.factors(inputs, x, weight, weight)


def _group_local(call: Call, strategy: Strategy, n: int) -> dict[str, Any]:
    """Rows, channels and groups of this rank."""
    shape = call.shape("input")
    local = local_shape(shape, strategy.inputs[call.names.index("input")], n)
    return {"N": local[0], "C": local[1], "group": call["group"] * local[1] // shape[1]}


def batch_normalised(call: Call) -> Factors:
    """Batch norm: channels may be sharded, and rows where the statistics are given and not computed."""
    return _batch_norm(call, FREE, "input")


def batch_normalised_back(call: Call) -> Factors:
    """Its backward: the gradients of weight and bias are sums over rows."""
    return _batch_norm(call, SUM, "input", "grad_out", "grad_output")


def _batch_norm(call: Call, rows: Kind, *full: str) -> Factors:
    m = Maker(call)
    computed = call.named.get("training", call.named.get("train", False))
    shape = call.shape("input")
    kind = WHOLE if computed else rows
    batch, channel = m.dim(shape[0], kind), m.dim(shape[1])
    x = (batch, channel, *m.dims(shape[2:], kind))
    dims = {tuple(shape): x, (shape[1],): (channel,)}
    inputs = {name: x if name in full else (channel,) for name in call.names}
    inputs = {k: v for k, v in inputs.items() if call.shape(k) in dims}
    outs = [dims.get(tuple(v.shape)) if isinstance(v, torch.Tensor) else () for v in call.node.meta["val"]]
    return m.factors(dict(inputs), *[m.dims(_shape(call, i), WHOLE) if d is None else d for i, d in enumerate(outs)])


def _shape(call: Call, index: int) -> tuple[int, ...]:
    return tuple(call.node.meta["val"][index].shape)


BATCH_NORMS: tuple[Any, ...] = (
    aten.native_batch_norm.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default,
)  # fmt: skip

RULES: Rules = {
    aten._softmax.default: Rule(softmax("self")),
    aten._safe_softmax.default: Rule(softmax("self")),
    aten._log_softmax.default: Rule(softmax("self", local="log_softmax")),
    aten._softmax_backward_data.default: Rule(softmax("grad_output", "output"), ("grad_output",)),
    aten._log_softmax_backward_data.default: Rule(
        softmax("grad_output", "output", local="log_softmax_backward"), ("grad_output",)
    ),
    aten.native_layer_norm.default: Rule(normalised),
    aten._fused_rms_norm.default: Rule(normalised),
    aten.native_layer_norm_backward.default: Rule(normalised_back, ("grad_out",)),
    aten._fused_rms_norm_backward.default: Rule(normalised_back, ("grad_out",)),
    aten.native_group_norm.default: Rule(group_normalised, local=_group_local),
    aten.native_group_norm_backward.default: Rule(group_normalised_back, ("grad_out",), local=_group_local),
    **{op: Rule(batch_normalised) for op in BATCH_NORMS},
    aten.native_batch_norm_backward.default: Rule(batch_normalised_back, ("grad_out",)),
}
