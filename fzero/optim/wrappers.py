"""Transformations around a transformation: hyperparameters in the state, and steps that a bad gradient cannot spoil."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import SpecError, TreeError
from fzero.optim import _check
from fzero.optim._named import remedy
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import GradientTransformation, PyTree, _wide_norm
from fzero.phases import Phases


class InjectState(NamedTuple):
    """The state of `inject_hyperparams`. The transformation makes a new one at each update.

    count: updates made so far, scalar int64. hyper: the hyperparameters by name, scalar float64. They are those of the
    last update, and of the next one unless a schedule sets them; the owner of the state may replace them between steps.
    inner: the transformation's own state.

    >>> from fzero.optim import sgd
    >>> inject_hyperparams(sgd)(learning_rate=0.1).init([]).hyper
    {'learning_rate': tensor(0.1000, dtype=torch.float64)}
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    hyper: dict[str, Tensor]
    inner: PyTree


def inject_hyperparams(
    fn: Callable[..., GradientTransformation], static: Collection[str] = ()
) -> Callable[..., GradientTransformation]:
    """Returns a function that makes `fn(**hyper)` with its numbers and schedules as 0-d tensors in the state.

    fn: such as `fzero.optim.adamw`. static: names of arguments that stay what they are.
    The owner of the state may change numbers between steps. A schedule, a function of one argument, sets its
    hyperparameter at every step. Names in `static`, and arguments that are neither number nor schedule, are given
    to `fn` as they are. If an argument may not be a tensor, `fn` raises: in `adamw`, for instance, `learning_rate` and
    `weight_decay` may be tensors, `betas` and `eps` may not.

    Raises `SpecError` for positional arguments and for a name in `static` that is not given, and the errors of `fn`.
    Raises `TreeError` for a state with other hyperparameters.

    >>> from fzero.optim import sgd
    >>> tx = inject_hyperparams(sgd, static=["momentum"])(learning_rate=0.1, momentum=0.9)
    >>> params = [torch.ones(1)]
    >>> opt_state = tx.init(params)
    >>> opt_state.hyper["learning_rate"] = opt_state.hyper["learning_rate"] * 5
    >>> tx.update(params, opt_state, params)[0]
    [tensor([-0.5000])]
    """
    if not callable(fn) or isinstance(fn, GradientTransformation):
        raise SpecError(
            f"inject_hyperparams: fn is {_check.kind(fn)}, but it must be a function that makes a transformation: "
            "write inject_hyperparams(adamw)(learning_rate=3e-4)"
        )
    static = {static} if isinstance(static, str) else set(static)

    def make(*args: Any, **given: Any) -> GradientTransformation:
        if args:
            raise SpecError("inject_hyperparams: give hyperparameters by name, as in (learning_rate=3e-4)")
        unknown = sorted(static - given.keys())
        if unknown:
            raise SpecError(
                f"inject_hyperparams: static names {unknown[0]!r}, which is not given.{tree.suggest(unknown[0], given)}"
            )
        _check_arguments(fn, given)
        schedules = {n: _traced(n, v) for n, v in given.items() if n not in static and _is_hyper(v)}
        return _injected(fn, schedules, {n: v for n, v in given.items() if n not in schedules})

    return make


def _check_arguments(fn: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises SpecError for arguments that a function does not take, or lacks."""
    signature = inspect.signature(fn)
    try:
        signature.bind(**given)
    except TypeError as error:
        named = list(signature.parameters)
        others = [name for name in given if name not in named]
        known = [f" {name!r}{told}" for name in others if (told := remedy(name, named))]
        hint = "".join(known or [tree.suggest(name, named) for name in others])
        raise SpecError(
            f"inject_hyperparams: {getattr(fn, '__name__', 'fn')} does not take these: {error}. Its arguments are "
            f"{', '.join(named)}.{hint}"
        ) from None


def _is_hyper(value: Any) -> bool:
    if not callable(value):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # a built-in that does not say
        return False
    return sum(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters) == 1


def _traced(name: str, value: Any) -> float | Schedule:
    if not callable(value):
        return float(value)
    return as_schedule("inject_hyperparams", value, name)


def _injected(
    fn: Callable[..., GradientTransformation], hyperparams: Mapping[str, float | Schedule], fixed: Mapping[str, Any]
) -> GradientTransformation:
    """The transformation that `fn` makes anew at each step, from hyperparameters that are in the state."""

    def made(hyper: Mapping[str, Any]) -> GradientTransformation:
        tx = fn(**fixed, **hyper)
        if isinstance(tx, Phases):
            _check.takes_mean("inject_hyperparams", tx)
        return tx

    def init(params: PyTree) -> InjectState:
        count = _check.zero_count(params)
        hyper = {
            name: value(count) if callable(value) else torch.full((), value, dtype=torch.float64, device=count.device)
            for name, value in hyperparams.items()
        }
        return InjectState(count, hyper, made(hyper).init(params))

    def update(grads: PyTree, state: InjectState, params: PyTree) -> tuple[PyTree, InjectState]:
        if state.hyper.keys() != hyperparams.keys():
            raise TreeError(
                f"inject_hyperparams: opt_state has hyperparameters {sorted(state.hyper)}, but this transformation has "
                f"{sorted(hyperparams)}: make it with this transformation's init"
            )
        hyper = {
            name: value(state.count) if callable(value) else state.hyper[name] for name, value in hyperparams.items()
        }
        for name, value in hyper.items():
            if not isinstance(value, Tensor) or value.dim() != 0:
                shown = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else _check.kind(value)
                raise TreeError(
                    f"inject_hyperparams: hyper/{name} in opt_state is {shown}, but it must be a 0-d tensor: write "
                    "torch.tensor(0.1, dtype=torch.float64)"
                )
        updates, inner = made(hyper).update(grads, state.inner, params)
        return updates, InjectState(state.count + 1, hyper, inner)

    return GradientTransformation(init, update)


class IfFiniteState(NamedTuple):
    """The state of `apply_if_finite`. The transformation makes a new one at each update.

    skipped: updates left out so far, scalar int64. inner: the transformation's own state.

    >>> from fzero.optim import scale
    >>> apply_if_finite(scale(1.0)).init([])
    IfFiniteState(skipped=tensor(0), inner=())
    """

    skipped: Tensor
    inner: PyTree


def apply_if_finite(tx: GradientTransformation) -> GradientTransformation:
    """Returns `tx`, except that a step with an infinite or NaN gradient changes nothing.

    tx: the transformation.
    In such a step updates are zero, and `tx`'s state is unchanged. The choice is made on the device, element by
    element, by one flag computed from the global norm. So nothing is read back, and every rank makes the same choice.
    `skipped` counts the steps left out. The choice needs the old state, so moments are not updated in place: while a
    bucket is updated, there are two of each.

    Raises `SpecError` if `tx` is not a transformation, `TreeError` if `tx` changes its state's structure.

    >>> from fzero.optim import sgd
    >>> tx, params = apply_if_finite(sgd(0.1, momentum=0.9)), [torch.ones(2)]
    >>> updates, opt_state = tx.update([torch.tensor([1.0, float("nan")])], tx.init(params), params)
    >>> updates, opt_state.skipped, opt_state.inner.count
    ([tensor([0., 0.])], tensor(1), tensor(0))
    """
    _check.takes_mean("apply_if_finite", tx)
    if not isinstance(tx, GradientTransformation):
        raise SpecError(
            f"apply_if_finite: tx is {getattr(tx, '__name__', _check.kind(tx))}, not a GradientTransformation: call "
            "it, as in apply_if_finite(adamw(3e-4))"
        )

    def init(params: PyTree) -> IfFiniteState:
        return IfFiniteState(_check.zero_count(params), tx.init(params))

    def update(grads: PyTree, state: IfFiniteState, params: PyTree) -> tuple[PyTree, IfFiniteState]:
        finite = torch.isfinite(_wide_norm(grads))
        or_zero = _or_zero(finite)
        # the gradients too: so all of tx comes after the flag, and nothing of it has to be kept until then
        updates, inner = tx.update(tree.map(or_zero, grads), state.inner, params)
        _, old, structure = tree.flatten(state.inner)
        _, new, new_structure = tree.flatten(inner)
        if new_structure != structure:
            raise TreeError(
                "apply_if_finite: the transformation returned a state of another structure than it was given"
            )
        chosen = _chosen(finite, new, old)
        skipped = state.skipped + torch.logical_not(finite).to(torch.int64)
        return tree.map(or_zero, updates), IfFiniteState(skipped, tree.unflatten(structure, chosen))

    return GradientTransformation(init, update)


def _or_zero(flag: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that gives a tensor where `flag` is set, else zeros. It makes one zero for all leaves of a dtype, or
    their work would not be one op on a mesh."""
    zeros: dict[Any, Tensor] = {}

    def chosen(x: Tensor) -> Tensor:
        key = x.dtype, x.device
        if key not in zeros:
            zeros[key] = torch.zeros((), dtype=x.dtype, device=x.device)
        return torch.where(flag, x, zeros[key])

    return chosen


class DelayedState(NamedTuple):
    """The state of `delayed`. The transformation makes a new one at each update.

    steps: updates so far, scalar int64. pending: the gradients of the last step, like params. inner: the
    transformation's own state.

    >>> from fzero.optim import scale
    >>> delayed(scale(1.0)).init([torch.ones(2)])
    DelayedState(steps=tensor(0), pending=[tensor([0., 0.])], inner=())
    """

    steps: Tensor
    pending: PyTree
    inner: PyTree


def delayed(tx: GradientTransformation) -> GradientTransformation:
    """Returns `tx` one step late: each update uses the gradients of the step before (ZeRO-Offload's delayed update).

    tx: the transformation.
    The gradients wait in the state, so a checkpoint has them, and the update depends on nothing of the present batch. A
    program may run it beside the forward and backward. The first update changes nothing: there is no gradient yet. It
    costs a gradient's bytes in the state, in the parameter's dtype, and `tx`'s old state beside the new one while a
    bucket is updated. It trains differently from `tx`: docs/optimizers.md says what changes.

    Raises `SpecError` if `tx` is not a transformation.

    >>> from fzero.optim import sgd
    >>> tx, params = delayed(sgd(0.5)), [torch.ones(1)]
    >>> first, opt_state = tx.update([torch.tensor([2.0])], tx.init(params), params)
    >>> second, opt_state = tx.update([torch.tensor([4.0])], opt_state, params)
    >>> first, second, opt_state.pending
    ([tensor([0.])], [tensor([-1.])], [tensor([4.])])
    """
    _check.takes_mean("delayed", tx)
    if not isinstance(tx, GradientTransformation):
        raise SpecError(
            f"delayed: tx is {getattr(tx, '__name__', _check.kind(tx))}, not a GradientTransformation: call it, as in "
            "delayed(adamw(3e-4))"
        )

    def init(params: PyTree) -> DelayedState:
        return DelayedState(_check.zero_count(params), tree.map(torch.zeros_like, params), tx.init(params))

    def update(grads: PyTree, state: DelayedState, params: PyTree) -> tuple[PyTree, DelayedState]:
        begun = state.steps > 0
        updates, inner = tx.update(state.pending, state.inner, params)
        or_zero = _or_zero(begun)
        _, old, structure = tree.flatten(state.inner)
        inner = tree.unflatten(structure, _chosen(begun, tree.flatten(inner)[1], old))
        pending = tree.map(lambda g, p: g.to(p.dtype), grads, state.pending)
        return tree.map(or_zero, updates), DelayedState(state.steps + 1, pending, inner)

    return GradientTransformation(init, update)


def _chosen(flag: Tensor, new: list[Tensor], old: list[Tensor]) -> list[Tensor]:
    """The new leaves where the flag is set, else the old ones."""
    return [n if n is o else torch.where(flag, n, o) for n, o in zip(new, old, strict=True)]
