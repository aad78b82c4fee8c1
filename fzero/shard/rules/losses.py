"""losses: the negative log likelihood of classes.

nll_loss:      x nc, target n -> total (), weight ()   n sharded: both are Partial; c sharded: a local form
its backward:  grad (), x nc, target n, weight () -> nc
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fzero.shard.factors import FREE, SUM, WHOLE, Call, Dim, Dims, Factors, Kind, Maker
from fzero.shard.placements import Partial, Placement, Replicated, Shard
from fzero.shard.rules.rule import Rule, Rules, Strategy

aten = torch.ops.aten
_NONE, _MEAN = range(2)  # torch's numbers of a loss's reduction


def lost(call: Call) -> Factors:
    """The forward. A mean over sharded rows needs the weight of all rows: a local form."""
    m = Maker(call)
    mean = call["reduction"] == _MEAN
    x, target, classes, rows = _dims(m, call, SUM, "nll_loss_mean" if mean else "", "nll_loss_forward", SUM)
    each = call["reduction"] == _NONE
    total = [(1, classes), *((1, row) for row in rows if mean or each)]
    weight = {} if each else {"weight": (classes,)}
    return m.factors({"self": x, "target": target, **weight}, target if each else (), (), unaffected=total)


def lost_back(call: Call) -> Factors:
    """The backward: every element of the gradient is of its row and class."""
    m = Maker(call)
    x, target, *_ = _dims(m, call, FREE, "", "nll_loss_backward", FREE)
    each = call["reduction"] == _NONE
    return m.factors({"grad_output": target if each else (), "self": x, "target": target}, x)


def _dims(m: Maker, call: Call, kind: Kind, of_rows: str, form: str, of_classes: Kind) -> tuple[Dims, Dims, Dim, Dims]:
    """The dims of `self` and `target`, the factor of classes (whole where they have weights) and those of rows."""
    shape = call.shape("self")
    plain = call["weight"] is None and len(shape) > 1
    rows = tuple(m.dim(size, kind, of_rows) for d, size in enumerate(shape) if d != 1) if len(shape) > 1 else ()
    classes = m.dim(shape[min(1, len(shape) - 1)], of_classes if plain else WHOLE, form if plain else "")
    return ((*rows[:1], classes, *rows[1:]) if len(shape) > 1 else (classes,)), rows, classes, rows


def _unread_weight(call: Call, n: int) -> Iterable[Strategy]:
    """Only a mean reads the total weight: else it may be a sum not yet taken, beside sharded rows."""
    if call["reduction"] == _MEAN:
        return
    shape = call.shape("self")
    for d in [d for d, size in enumerate(shape) if d != 1 and size >= n and size % n == 0 and len(shape) > 1]:
        rows = Shard(max(d - 1, 0))
        grad = rows if call["reduction"] == _NONE else Replicated()
        placed: dict[str, Placement] = {
            "self": Shard(d),
            "target": rows,
            "total_weight": Partial(),
            "grad_output": grad,
        }
        yield Strategy(tuple(placed.get(name, Replicated()) for name in call.names), (Shard(d),))


RULES: Rules = {
    aten.nll_loss_forward.default: Rule(lost),
    aten.nll_loss2d_forward.default: Rule(lost),
    aten.nll_loss_backward.default: Rule(lost_back, ("grad_output",), more=_unread_weight),
    aten.nll_loss2d_backward.default: Rule(lost_back, ("grad_output",), more=_unread_weight),
}
