"""pointwise: ops whose every element depends on the same element of each operand, and factories.

add(x, y), y of shape (b,):  x ab, y b -> ab
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fzero.shard.factors import FREE, SUM, WHOLE, Call, Dims, Factors, Maker, broadcast
from fzero.shard.placements import Partial, Placement, Replicated, Shard, local_shape
from fzero.shard.rules.rule import Rule, Rules, Strategy

aten = torch.ops.aten

# op -> the arguments in which it is linear, those of a text together
LINEAR: dict[Any, tuple[str, ...]] = {
    aten.add.Tensor: ("self other",),
    aten.sub.Tensor: ("self other",),
    aten.neg.default: ("self",),
    aten.mul.Tensor: ("self", "other"),
    aten.mul.Scalar: ("self",),
    aten.div.Tensor: ("self",),
    aten.div.Scalar: ("self",),
    aten.where.self: ("self other",),
    aten.addcmul.default: (),
}
MOVES = (aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
SHAPE_ONLY = (
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default, aten.fill.Scalar,
)  # fmt: skip
FACTORIES = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
NEW = tuple(op for op in SHAPE_ONLY if "new_" in str(op))
UNTAGGED: tuple[Any, ...] = (
    aten.floor_divide.default, aten.softplus_backward.default, aten.elu_backward.default,
    aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default, aten.log_sigmoid_backward.default, aten.copy.default,
)  # fmt: skip
_GRADIENTS = ("grad_output", "grad_out", "grad")  # an op named *_backward is linear in it


def elementwise(op: Any) -> Rule:
    """The rule of a pointwise op."""
    names = {a.name for a in op._schema.arguments}
    backward = "backward" in str(op)
    return Rule(broadcasted, linear=tuple(name for name in _GRADIENTS if backward and name in names))


def broadcasted(call: Call) -> Factors:
    """Each dim of the result is a factor; an operand has those in which it is not broadcast."""
    m = Maker(call)
    dims = m.dims(call.result)
    inputs: dict[str, list[Dims]] = {}
    for name, value in zip(call.names, call.values, strict=True):
        inputs.setdefault(name, []).append(broadcast(value.shape, dims))
    return m.factors(dict(inputs), *[dims] * len(call.results))


def each_or_sum(call: Call) -> Factors:
    """A loss of each element. A sum of them is `Partial`; a mean is whole, for a part would divide by its own size."""
    m = Maker(call)
    values = [x.shape for x in call.values]
    kind = (FREE, WHOLE, SUM)[call["reduction"]]
    dims = m.dims(torch.broadcast_shapes(*values), kind)
    inputs = {name: broadcast(shape, dims) for name, shape in zip(call.names, values, strict=True)}
    return m.factors(dict(inputs), dims if kind is FREE or len(call.result) else ())


def made(call: Call) -> Factors:
    """A value that depends on no operand's elements: every dim may be sharded."""
    m = Maker(call)
    return m.factors({}, m.dims(call.result))


def sized(name: str) -> Any:
    """The argument `name` becomes the shape of this rank's part of the result."""

    def local(call: Call, strategy: Strategy, n: int) -> dict[str, Any]:
        return {name: list(local_shape(call.result, strategy.outputs[0], n))}

    return local


def _of_sums(call: Call, n: int) -> Iterable[Strategy]:
    """Only the shape of the operand is read: that of a sum not yet taken is known."""
    for how in ("sum", "max"):
        yield Strategy((Partial(how),), (Replicated(),))


def _unread(call: Call, n: int) -> Iterable[Strategy]:
    """No element of the operand is read, so it may lie anyhow."""
    own = [Replicated(), *_shards(call.shape("self"), n), Partial(), Partial("max")]
    yield from (Strategy((a,), (b,)) for a in own for b in (Replicated(), *_shards(call.result, n)))


def _shards(shape: Sequence[int], n: int) -> list[Placement]:
    return [Shard(d) for d, size in enumerate(shape) if size and size % n == 0]


def _cast(call: Call, n: int) -> Iterable[Strategy]:
    """A cast of floats is linear but for rounding; to a narrower type it is costly."""
    before, after = call.values[0].dtype, call.results[0].dtype
    if before.is_floating_point and after.is_floating_point:
        yield Strategy((Partial(),), (Partial(),), costly=after.itemsize < before.itemsize)


def _zero_filled(call: Call, n: int) -> Iterable[Strategy]:
    """Filling with zero is linear."""
    if call["value"] == 0:
        yield Strategy((Partial(), Replicated()), (Partial(),))


LOSSES: tuple[Any, ...] = (
    aten.mse_loss.default, aten.mse_loss_backward.default, aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default, aten.huber_loss.default, aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default,
)  # fmt: skip

RULES: Rules = {
    **{op: Rule(broadcasted, linear) for op, linear in LINEAR.items()},
    **{op: Rule(broadcasted, ("self",), moves=True) for op in MOVES},
    **{op: Rule(broadcasted, more=_of_sums) for op in SHAPE_ONLY},
    **{op: Rule(made, local=sized("size"), more=_unread) for op in NEW},
    **{op: Rule(made, local=sized("size")) for op in FACTORIES},
    **{op: elementwise(op) for op in UNTAGGED},
    "fzero.reduce.default": Rule(broadcasted),  # over the data axes
    aten._to_copy.default: Rule(broadcasted, more=_cast),
    aten.masked_fill.Scalar: Rule(broadcasted, more=_zero_filled),
    **{op: Rule(each_or_sum) for op in LOSSES},
}
