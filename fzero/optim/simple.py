"""Small transformations to put in a chain. All are pointwise arithmetic, so they stay flat, and can be differentiated.

>>> from fzero.optim import chain, sgd
>>> tx = chain(clip_by_value(1.0), add_decayed_weights(0.1), sgd(0.5))
>>> tx.update([torch.tensor([3.0])], tx.init([torch.ones(1)]), [torch.ones(1)])[0]
[tensor([-0.5500])]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.optim import _check
from fzero.optim._named import named
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import FED, GradientTransformation, Mask, PyTree, plus_scaled, selected


@named
def clip_by_value(limit: float | Tensor) -> GradientTransformation:
    """Limits every element to `[-limit, limit]`. dtypes are kept, and a NaN stays a NaN. limit: above 0.

    >>> clip_by_value(1.0).update([torch.tensor([-3.0, 0.5])], (), None)[0]
    [tensor([-1.0000,  0.5000])]
    """
    fix = "to clip nothing, leave clip_by_value out of the chain"
    limit = _check.hyper("clip_by_value: limit", limit, above=True, fix=fix)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        low: Any = -limit  # one scalar for all leaves, or their work would not be one op on a mesh
        high: Any = limit
        return tree.map(lambda g: torch.clamp(g, min=low, max=high).to(g.dtype), grads), state

    return GradientTransformation(lambda params: (), update)


@named
def add_decayed_weights(weight_decay: float | Tensor, mask: Mask | None = None) -> GradientTransformation:
    """`g + weight_decay * p` for the leaves that `mask` selects (all by default), in any form that `masked` takes.

    weight_decay: a number or a scalar tensor. mask: as in `masked`; None: all leaves.
    Before an optimizer it is an L2 term; after the direction is made and before the learning rate, decoupled decay.
    Raises `SpecError` for a number below 0 and for a rule that matches nothing, `TreeError` for gradients unlike
    params.

    >>> add_decayed_weights(0.1).update([torch.tensor([1.0])], (), [torch.tensor([2.0])])[0]
    [tensor([1.2000])]
    """
    decay = _check.hyper("add_decayed_weights: weight_decay", weight_decay)

    def init(params: PyTree) -> PyTree:
        selected("add_decayed_weights", mask, params)
        return ()

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        leaves = _check.alike("add_decayed_weights", "grads", grads, params, dtypes=False)
        _, old, structure = tree.flatten(params)
        chosen = selected("add_decayed_weights", mask, params)
        values = [plus_scaled(g, p, decay) if c else g for g, p, c in zip(leaves, old, chosen, strict=True)]
        return tree.unflatten(structure, values), state

    return GradientTransformation(init, update, feedback=FED)


class ScheduleState(NamedTuple):
    """`count`: updates made so far, scalar int64.

    >>> scale_by_schedule(lambda count: -0.1 / (count + 1)).init([])
    ScheduleState(count=tensor(0))
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name


def scale_by_schedule(schedule: Schedule) -> GradientTransformation:
    """Multiplies every leaf by `schedule(count)`, which may be negative; dtypes are kept.

    schedule: from the count, a scalar int64, to a scalar.

    Raises `SpecError` when the schedule returns anything but a scalar tensor.

    >>> tx = scale_by_schedule(lambda count: -0.5 ** count)
    >>> updates, opt_state = tx.update([torch.ones(1)], tx.init([torch.ones(1)]), None)
    >>> tx.update(updates, opt_state, None)[0]
    [tensor([0.5000])]
    """
    rate = as_schedule("scale_by_schedule", schedule, "schedule")

    def update(grads: PyTree, state: ScheduleState, params: PyTree) -> tuple[PyTree, ScheduleState]:
        factor = rate(state.count)
        return tree.map(lambda g: (g * factor).to(g.dtype), grads), ScheduleState(state.count + 1)

    return GradientTransformation(lambda params: ScheduleState(_check.zero_count(params)), update, feedback=FED)


class TraceState(NamedTuple):
    """`trace`: a pytree like params.

    >>> trace(0.9).init([torch.ones(1)])
    TraceState(trace=[tensor([0.])])
    """

    trace: PyTree


def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Momentum without a learning rate: `t <- g + decay * t`, and `t`, or `g + decay * t` for `nesterov`.

    decay: in [0, 1). nesterov: a bool.

    >>> tx = trace(0.5)
    >>> _, opt_state = tx.update([torch.ones(1)], tx.init([torch.ones(1)]), None)
    >>> tx.update([torch.ones(1)], opt_state, None)[0]
    [tensor([1.5000])]
    """
    decay = _check.number("trace: decay", decay, high=1.0)

    def update(grads: PyTree, state: TraceState, params: PyTree) -> tuple[PyTree, TraceState]:
        _check.alike("trace", "grads", grads, state.trace)
        held = tree.map(lambda g, t: torch.add(g, t, alpha=decay), grads, state.trace)
        ahead = tree.map(lambda g, t: torch.add(g, t, alpha=decay), grads, held) if nesterov else held
        return ahead, TraceState(held)

    return GradientTransformation(lambda params: TraceState(tree.map(torch.zeros_like, params)), update, feedback=FED)
