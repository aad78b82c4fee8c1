"""Moving averages: of updates (`ema`, as optax's), and of the parameters themselves (`ema_params`).

    ema:         a <- decay * a + (1 - decay) * u              (a starts at 0;  u becomes a / (1 - decay^t), or a)
    ema_params:  a <- decay * a + (1 - decay) * (p + u)        (a starts at p;  u stays as it is)

Both are pointwise: an average lies beside its parameter, in slices where the parameter is in slices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import SpecError
from fzero.optim import _check
from fzero.optim._named import named
from fzero.optim.transform import GradientTransformation, PyTree, apply_updates


class EmaState(NamedTuple):
    """`count`: updates made so far, scalar int64. `average`: a pytree like params.

    >>> ema(0.9).init([torch.ones(1)])
    EmaState(count=tensor(0), average=[tensor([0.])])
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    average: PyTree


@named
def ema(decay: float, debias: bool = True) -> GradientTransformation:
    """Replaces updates by their moving average; `debias` divides it by `1 - decay^t`. dtypes are kept.

    decay: in [0, 1). debias: a bool.

    Raises `SpecError` for a decay outside [0, 1), `TreeError` for updates unlike the state.

    >>> tx = ema(0.9)
    >>> updates, opt_state = tx.update([torch.tensor([2.0])], tx.init([torch.ones(1)]), None)
    >>> updates, opt_state.average
    ([tensor([2.])], [tensor([0.2000])])
    """
    decay = _check.number("ema: decay", decay, high=1.0)
    _check.flag("ema: debias", debias)

    def init(params: PyTree) -> EmaState:
        return EmaState(_check.zero_count(params), tree.map(torch.zeros_like, params))

    def update(grads: PyTree, state: EmaState, params: PyTree) -> tuple[PyTree, EmaState]:
        _check.alike("ema", "updates", grads, state.average)
        count, average = state.count + 1, tree.map(lambda a, g: torch.lerp(a, g, 1 - decay), state.average, grads)
        if not debias:
            return average, EmaState(count, average)
        correction = 1 - decay ** count.to(torch.float64)
        return tree.map(lambda a: (a / correction).to(a.dtype), average), EmaState(count, average)

    return GradientTransformation(init, update)


class EmaParamsState(NamedTuple):
    """`average`: of the parameters, a pytree like params. `inner`: the transformation's own state.

    >>> from fzero.optim import sgd
    >>> ema_params(sgd(0.1), 0.9).init([torch.ones(1)]).average
    [tensor([1.])]
    """

    average: PyTree
    inner: PyTree


@named
def ema_params(tx: GradientTransformation, decay: float) -> GradientTransformation:
    """Returns `tx` with a moving average of the parameters in its state, `opt_state.average`; updates are `tx`'s.

    tx: the transformation. decay: in [0, 1).
    The average has the dtype of the parameters. It is that of `torch.optim.swa_utils.AveragedModel` with
    `get_ema_multi_avg_fn(decay)`, for an average that starts at the first parameters. Put `tx` last: what changes the
    updates afterwards is not in the average.

    Raises `SpecError` for a decay outside [0, 1) and if `tx` is not a transformation.

    >>> from fzero.optim import sgd
    >>> tx, params = ema_params(sgd(1.0), 0.75), [torch.tensor([1.0])]
    >>> updates, opt_state = tx.update([torch.tensor([2.0])], tx.init(params), params)
    >>> updates, opt_state.average
    ([tensor([-2.])], [tensor([0.5000])])
    """
    decay = _check.number("ema_params: decay", decay, high=1.0)
    _check.takes_mean("ema_params", tx)
    if not isinstance(tx, GradientTransformation):
        raise SpecError(
            f"ema_params: tx is {getattr(tx, '__name__', _check.kind(tx))}, not a GradientTransformation: call it, as "
            "in ema_params(adamw(3e-4), 0.999)"
        )

    def init(params: PyTree) -> EmaParamsState:
        _check.trainable("ema_params", params)
        return EmaParamsState(tree.map(torch.clone, params), tx.init(params))

    def update(grads: PyTree, state: EmaParamsState, params: PyTree) -> tuple[PyTree, EmaParamsState]:
        _check.alike("ema_params", "average", state.average, params)
        updates, inner = tx.update(grads, state.inner, params)
        new = apply_updates(params, updates)
        return updates, EmaParamsState(tree.map(lambda a, p: torch.lerp(a, p, 1 - decay), state.average, new), inner)

    return GradientTransformation(init, update)
