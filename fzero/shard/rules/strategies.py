"""strategies: the placements that an op allows, from the factors of its rule.

For each factor that n divides there is one strategy: every dim that the factor runs over is sharded, other operands
are replicated, and a result that is summed over the factor is `Partial`. Beside these, a `Partial` operand passes
through where the op is linear in it. A replicated operand never becomes a `Partial` one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import OpOverload
from fzero.errors import FzeroError
from fzero.ir import fx_nodes, op_info
from fzero.ir.op_info import OpInfo, of
from fzero.shard.factors import MAX, SUM, WHOLE, Call, Dims, Factors
from fzero.shard.placements import Partial, Placement, Replicated, Shard
from fzero.shard.rules import (
    attention,
    images,
    indexing,
    losses,
    moved,
    norms,
    pieces,
    pointwise,
    products,
    reductions,
    views,
    whole,
)  # fmt: skip
from fzero.shard.rules.rule import Rule, Strategy


def _default(op: OpOverload, row: OpInfo) -> Rule | None:
    return Rule(whole.whole) if whole.is_random(op) else pointwise.elementwise(op) if row.pointwise else None


for kind in (
    pointwise, products, reductions, views, pieces, indexing, norms, attention, images, losses, moved, whole,
):  # fmt: skip
    op_info.fill("placements", kind.RULES)
op_info.default("placements", _default)


MOST = 20_000  # calls whose strategies are kept: those of a layer come again in the next one
_kept: dict[Any, tuple[Rule, tuple[Strategy, ...]]] = {}


class Unknown(FzeroError, LookupError):
    """An op that no rule is known of. `op` is the op."""

    def __init__(self, op: Any) -> None:
        self.op = op
        super().__init__(
            f"{op}: no rule says how its operands may be sharded. Add a row to a table in fzero/shard/rules/"
        )


def rule_of(op: Any) -> Rule:
    """The rule of an op. Raises `Unknown`."""
    rule: Rule | None = of(op).placements
    if rule is None:
        raise Unknown(op)
    return rule


def strategies(node: fx.Node, n: int, groups: Sequence[int] = (1,)) -> tuple[Strategy, ...]:
    """What a `call_function` node allows on n ranks: all replicated first, then by factors, then sums not yet taken.

    groups: the numbers of groups in which a factor may be cut, beside those that follow from its place in a dim. For a
    fused weight of three they are (1, 3).

    Raises `Unknown` for an op without a rule.
    """
    rule = rule_of(node.target)
    key = node.target, n, tuple(groups), _form((node.args, node.kwargs, node.meta["val"]), {})
    known = _kept.get(key)
    if known is None or known[0] is not rule:
        if len(_kept) >= MOST:
            _kept.clear()
        known = _kept[key] = rule, _allowed(rule, Call.of(node), n, groups)
    return known[1]


def _allowed(rule: Rule, call: Call, n: int, groups: Sequence[int]) -> tuple[Strategy, ...]:
    found = [_replicated(call), *_by_factors(rule.factors(call), n, groups), *_linear(rule, call)]
    found += rule.more(call, n) if rule.more is not None else []
    return tuple(dict.fromkeys(found if n > 1 else found[:1]))


def _form(value: Any, numbers: dict[fx.Node, int]) -> Any:
    """What a rule sees of an argument or of a result. numbers: of the nodes that were seen, for one may come twice."""
    if isinstance(value, fx.Node):
        return numbers.setdefault(value, len(numbers)), _form(value.meta["val"], numbers)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(_form(x, numbers) for x in value)
    if isinstance(value, dict):
        return tuple((name, _form(x, numbers)) for name, x in value.items())
    return type(value), value


def localised(node: fx.Node, strategy: Strategy, n: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The args and kwargs of the local call: shapes, sizes and bounds are those of a rank's part."""
    rule = rule_of(node.target)
    if rule.local is None:
        return node.args, node.kwargs
    call = Call.of(node)
    changed = {k: v for k, v in rule.local(call, strategy, n).items() if v != call.named.get(k)}
    schema = fx_nodes.schema(node)
    assert schema is not None
    args, kwargs = list(node.args), dict(node.kwargs)
    for position, argument in enumerate(schema.arguments):
        if argument.name in changed and position < len(args):
            args[position] = changed[argument.name]
        elif argument.name in changed:
            kwargs[argument.name] = changed[argument.name]
    return tuple(args), kwargs


def _replicated(call: Call) -> Strategy:
    return Strategy((Replicated(),) * len(call.operands), (Replicated(),) * len(call.results))


def _by_factors(rule: Factors, n: int, groups: Sequence[int]) -> Iterator[Strategy]:
    """One strategy for each factor that n divides, and each number of groups."""
    for number, factor in enumerate(rule.factors):
        for cut in groups if not factor.local else (1,):
            if factor.kind is not WHOLE and factor.size and factor.size % (cut * n) == 0:
                inputs = tuple(_input(rule, i, number, cut) for i in range(len(rule.inputs)))
                outputs = tuple(_output(rule, i, number, cut) for i in range(len(rule.outputs)))
                yield Strategy(inputs, outputs, factor.local)


def _input(rule: Factors, operand: int, number: int, cut: int) -> Placement:
    shard, factor = _shard(rule, rule.inputs[operand], number, cut), rule.factors[number]
    added = operand in rule.addends and factor.kind in (SUM, MAX)
    return shard or (Partial(factor.kind.value) if added else Replicated())


def _output(rule: Factors, result: int, number: int, cut: int) -> Placement:
    shard, factor = _shard(rule, rule.outputs[result], number, cut), rule.factors[number]
    summed = factor.kind in (SUM, MAX) and (result, number) not in rule.unaffected
    return shard or (Partial(factor.kind.value) if summed else Replicated())


def _shard(rule: Factors, dims: Dims, number: int, cut: int) -> Shard | None:
    """The sharding of a tensor by one factor; None for a tensor without it."""
    for d, dim in enumerate(dims):
        if number in dim:
            if any(rule.factors[f].size == 0 for f in dim):
                return Shard(d, cut)  # an empty piece: every rank's part of it is empty
            outer = math.prod(rule.factors[f].size for f in dim[: dim.index(number)])
            return Shard(d, outer * cut)
    return None


def _linear(rule: Rule, call: Call) -> Iterator[Strategy]:
    """Sums not yet taken of the arguments in which the op is linear; the results are sums too."""
    for together in rule.linear:
        names = together.split()
        if any(call.named[name] is not None and name not in call.names for name in names):
            continue  # a number beside a sum would be added on every rank
        others = [x for name, x in zip(call.names, call.values, strict=True) if name not in names]
        costly = any(x.dtype.is_floating_point for x in others)
        for how in ("sum", "max") if rule.moves else ("sum",):
            inputs = tuple(Partial(how) if name in names else Replicated() for name in call.names)
            yield Strategy(inputs, (Partial(how),) * len(call.results), costly=costly)
