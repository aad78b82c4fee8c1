"""images: convolutions and pools, whose spatial dims are whole.

convolution:  x n(gi), w (go)i, bias (go) -> n(go)     g: the groups; i is summed over, and bias must be a sum then
its backward: dy n(go), x n(gi), w (go)i -> n(gi), (go)i, (go)
"""

from __future__ import annotations

from typing import Any

import torch

from fzero.shard.factors import FREE, SUM, WHOLE, Call, Dim, Dims, Factors, Kind, Maker
from fzero.shard.placements import local_shape
from fzero.shard.rules.rule import Rule, Rules, Strategy

aten = torch.ops.aten


def convolved(call: Call) -> Factors:
    """convolution: rows, groups, channels of the result, and of the operand, which are summed over."""
    m = Maker(call)
    of, _ = _dims(m, call, call.result, FREE)
    return m.factors({k: of[k] for k in ("input", "weight", "bias")}, of["output"], addends=("bias",))


def convolved_back(call: Call) -> Factors:
    """Its backward. The bias's gradient does not depend on the operand, so it is no sum over its channels."""
    m = Maker(call)
    of, inner = _dims(m, call, call.shape("grad_output"), SUM)
    inputs: dict[str, Any] = {"grad_output": of["output"], "input": of["input"], "weight": of["weight"]}
    return m.factors(inputs, of["input"], of["weight"], of["bias"], unaffected=[(2, inner)])


def _dims(m: Maker, call: Call, result: tuple[int, ...], kind: Kind) -> tuple[dict[str, Dims], Dim]:
    """The dims of all tensors of a convolution, and the factor of a group's operand channels."""
    x, weight, groups = call.shape("input"), call.shape("weight"), int(call["groups"])
    n, g = m.dim(x[0], kind), m.dim(groups, kind)
    i, o = m.dim(x[1] // groups, SUM), m.dim(result[1] // groups, kind)
    kernel = m.dims(weight[2:], WHOLE)
    of = {
        "input": (n, g + i, *m.dims(x[2:], WHOLE)),
        "weight": (g + i, o, *kernel) if call["transposed"] else (g + o, i, *kernel),
        "bias": (g + o,),
        "output": (n, g + o, *m.dims(result[2:], WHOLE)),
    }
    return of, i


def _conv_local(call: Call, strategy: Strategy, n: int) -> dict[str, Any]:
    """The groups, and the bias's size, of this rank."""
    at = dict(zip(call.names, strategy.inputs, strict=True))
    weight = local_shape(call.shape("weight"), at["weight"], n)
    back = "grad_output" in at
    out = local_shape(call.shape("grad_output"), at["grad_output"], n) if back else None
    result = out or local_shape(call.result, strategy.outputs[0], n)
    taken = result if call["transposed"] else local_shape(call.shape("input"), at["input"], n)
    changed: dict[str, Any] = {"groups": taken[1] // weight[1]}
    return changed | ({"bias_sizes": [result[1]]} if call.named.get("bias_sizes") else {})


def pooled(call: Call) -> Factors:
    """Pools and resizings: the dims before the last two may be sharded."""
    return _leading(call, call.ndim(call.names[0]) - 2)


def _leading(call: Call, num: int) -> Factors:
    m = Maker(call)
    lead = m.dims(call.values[0].shape[:num])
    inputs = {name: (*lead, *m.dims(x.shape[num:], WHOLE)) for name, x in zip(call.names, call.values, strict=True)}
    return m.factors(dict(inputs), *((*lead, *m.dims(x.shape[num:], WHOLE)) for x in call.results))


def triangular(call: Call) -> Factors:
    """tril, triu: the last two dims are whole."""
    m = Maker(call)
    shape = call.shape("self")
    dims = m.dims(shape, but=range(len(shape) - 2, len(shape)))
    return m.factors({"self": dims}, dims)


def reordered(call: Call) -> Factors:
    """flip, roll: the dims along which elements move are whole."""
    m = Maker(call)
    given, ndim = call["dims"], call.ndim("self")
    dims = m.dims(call.shape("self"), but={d % ndim for d in given} if given else range(ndim))
    return m.factors({"self": dims}, dims)


def _leading_sizes(call: Call, strategy: Strategy, n: int) -> dict[str, Any]:
    """The sizes that an upsampling's backward is given."""
    return {"input_size": list(local_shape(call.result, strategy.outputs[0], n))}


POOLS: tuple[Any, ...] = (
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default,
    aten.upsample_bilinear2d.vec, aten.upsample_nearest2d.vec, aten.upsample_bicubic2d.vec,
)  # fmt: skip
RESIZED_BACK: tuple[Any, ...] = (
    aten.upsample_bilinear2d_backward.default, aten.upsample_nearest2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
)  # fmt: skip

RULES: Rules = {
    aten.convolution.default: Rule(convolved, ("input bias", "weight bias"), local=_conv_local),
    aten.convolution_backward.default: Rule(convolved_back, ("grad_output",), local=_conv_local),
    **{op: Rule(pooled) for op in POOLS},
    **{op: Rule(pooled, ("grad_output",), local=_leading_sizes) for op in RESIZED_BACK},
    aten.tril.default: Rule(triangular, ("self",)),
    aten.triu.default: Rule(triangular, ("self",)),
    aten.flip.default: Rule(reordered, ("self",), moves=True),
    aten.roll.default: Rule(reordered, ("self",), moves=True),
}
