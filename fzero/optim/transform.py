"""Gradient transformations, in optax's shape: pairs of pure functions over pytrees, and their combinators.

    init(params) -> opt_state
    update(grads, opt_state, params) -> (updates, opt_state)
    apply_updates(params, updates) -> params

A transformation holds no state. All state is in `opt_state`, a pytree of tensors. The path of each of its leaves ends
with the path of the parameter that it belongs to. So a placement or a rule for a parameter finds its moments. `None` is
an empty subtree, in parameters and gradients as everywhere.

Every rule here is pointwise, except the norm in `clip_by_global_norm`. No rule reads a value back from the device.
Under `torch.func` transforms, and on tensors that require grad, all of it is plain arithmetic. So a loss may
differentiate through a chain, and `vmap` over it.

>>> tx = chain(clip_by_global_norm(1.0), scale(-0.1))
>>> params = {"w": torch.tensor([1.0, 2.0])}
>>> updates, opt_state = tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init(params), params)
>>> apply_updates(params, updates)
{'w': tensor([0.9400, 1.9200])}
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import SpecError, TreeError
from fzero.optim import _check, _ops
from fzero.optim._round import stochastic_round

PyTree: TypeAlias = Any
Mask: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool] | PyTree


class GradientTransformation(NamedTuple):
    """Two pure functions: `init(params) -> opt_state` and `update(grads, opt_state, params) -> (updates, opt_state)`.

    takes: which gradients `update` gets in a `Spec`: "mean", over all ranks, or "local", this rank's own. From local
    ones it computes updates that are the same on every rank, as with `fzero.coded_mean`. What differs between ranks
    is kept in leaves that `init` marks by `fzero.per_rank`. feedback: whether gradients may bring what earlier codes of
    them have lost (`Precision(reduce="sign")`). "fed": they may, for updates are linear in them. "whole": it gets whole
    gradients, as in a phase before. "refuse": such a precision is refused, for squares would spoil a second moment.

    >>> sign = GradientTransformation(lambda params: (), lambda g, state, p: (tree.map(torch.sign, g), state))
    >>> sign.update([torch.tensor(-3.0)], sign.init([]), [])
    ([tensor(-1.)], ())
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    takes: str = "mean"
    feedback: str = "refuse"


FED, WHOLE, REFUSE = "fed", "whole", "refuse"  # the values of `GradientTransformation.feedback`


def identity() -> GradientTransformation:
    """Returns a transformation whose updates are the gradients.

    >>> identity().update([1], (), [0])
    ([1], ())
    """
    return GradientTransformation(lambda params: (), lambda grads, state, params: (grads, state), feedback=FED)


def scale(factor: float | Tensor) -> GradientTransformation:
    """Returns a transformation that multiplies every leaf; dtypes are kept. factor: a finite number or a scalar tensor.

    >>> scale(-2.0).update([torch.tensor(3.0)], (), None)
    ([tensor(-6.)], ())
    """
    factor = _check.hyper("scale: factor", factor, low=-float("inf"), above=True)
    return GradientTransformation(
        lambda params: (),
        lambda grads, state, params: (tree.map(lambda g: (g * factor).to(g.dtype), grads), state),
        feedback=FED,
    )


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Returns a transformation that applies the given ones one after another; its state is the tuple of their states.

    transformations: in their order.
    An empty chain is the identity. Raises `SpecError` for an argument that is not a transformation, and `TreeError` for
    a state of another length.

    >>> chain(scale(2.0), scale(5.0)).update([torch.tensor(1.0)], ((), ()), None)
    ([tensor(10.)], ((), ()))
    """
    _check.takes_mean("chain", *transformations)
    for i, tx in enumerate(transformations):
        if not isinstance(tx, GradientTransformation):
            shown = getattr(tx, "__name__", type(tx).__name__)
            raise SpecError(
                f"chain: argument {i} is {shown}, not a GradientTransformation: call it, as in "
                "chain(clip_by_global_norm(1.0), adamw(3e-4))"
            )

    def init(params: PyTree) -> PyTree:
        return tuple(tx.init(params) for tx in transformations)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        if len(state) != len(transformations):
            raise TreeError(
                f"chain: opt_state has {len(state)} parts, but the chain has {len(transformations)} transformations: "
                "make it with this chain's init"
            )
        states = []
        for tx, part in zip(transformations, state, strict=True):
            grads, part = tx.update(grads, part, params)
            states.append(part)
        return grads, tuple(states)

    asked = {tx.feedback for tx in transformations}
    feedback = next((value for value in (REFUSE, WHOLE) if value in asked), FED)
    return GradientTransformation(init, update, feedback=feedback)


def global_norm(values: PyTree) -> Tensor:
    """Returns the L2 norm of all leaves together, summed in float64 leaf by leaf in the tree's order: 0-d, float64 if a
    leaf is float64, else float32.

    values: a pytree. Leaves are floating-point tensors of any shape on one device. A tree without leaves has norm 0.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
    tensor(5.)
    """
    wide = any(leaf.dtype is torch.float64 for leaf in tree.flatten(values)[1])
    return _wide_norm(values).to(torch.float64 if wide else torch.float32)


def clip_by_global_norm(max_norm: float | Tensor) -> GradientTransformation:
    """Scales all leaves by `min(1, max_norm / (global_norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does.

    max_norm: greater than 0. dtypes are kept. If the norm is NaN, every leaf becomes NaN.

    >>> clip_by_global_norm(1.0).update([torch.tensor([3.0, 4.0])], (), None)
    ([tensor([0.6000, 0.8000])], ())
    """
    fix = "to clip nothing, leave clip_by_global_norm out of the chain"
    max_norm = _check.hyper("clip_by_global_norm: max_norm", max_norm, above=True, fix=fix)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        coefficient = torch.clamp(max_norm / (global_norm(grads) + 1e-6), max=1.0)
        return tree.map(lambda g: (g * coefficient).to(g.dtype), grads), state

    return GradientTransformation(lambda params: (), update)


def apply_updates(params: PyTree, updates: PyTree, seed: Tensor | None = None) -> PyTree:
    """Returns `params + updates`, leaf by leaf, in each parameter's dtype.

    params, updates: pytrees of one structure. seed: scalar int64, for bfloat16 leaves.
    bfloat16 leaves are rounded to nearest without a `seed`. With a `seed` the sum is computed in float32 and rounded up
    or down at random by `stochastic_round`, so that small updates are not lost. The seed is scalar int64 and differs at
    every step; a count will do. Adam's updates come to `delta(new, p)`: in a captured step `apply_delta(p, delta(new,
    p))` is folded to `new`.

    Raises `TreeError` if `updates` has another structure or a leaf of another shape than `params`, and the errors of
    `stochastic_round`.

    >>> apply_updates({"w": torch.tensor([1.0])}, {"w": torch.tensor([-0.5])})
    {'w': tensor([0.5000])}
    >>> params, small = [torch.ones(4096).bfloat16()], [torch.full((4096,), 0.002)]
    >>> for step in range(100):
    ...     params = apply_updates(params, small, seed=torch.tensor(step))  # to nearest it would stay 1
    >>> bool((params[0].float().mean() - 1.2).abs() < 0.05)
    True
    """
    leaves = _check.alike("apply_updates", "updates", updates, params, dtypes=False)
    _, targets, structure = tree.flatten(params)
    return tree.unflatten(structure, [_moved(p, u, seed) for p, u in zip(targets, leaves, strict=True)])


def _moved(p: Tensor, update: Tensor, seed: Tensor | None) -> Tensor:
    if seed is None or p.dtype != torch.bfloat16:
        return _apply_delta(p, update)
    return stochastic_round(_apply_delta(p.to(torch.float32), update), seed)


def masked(tx: GradientTransformation, mask: Mask) -> GradientTransformation:
    """Returns a transformation that applies `tx` to the selected leaves; other updates pass unchanged.

    tx: a transformation. mask: a path rule or a list of them (`fzero.tree.matches`, on paths within `params`), a pytree
    of bools with the structure of `params`, or a function `(path, leaf) -> bool`. The state is that of `tx`, over
    `params` with `None` for the other leaves. So the other leaves take no memory.

    Raises `SpecError` for what is no transformation, a rule that matches no leaf and a mask of another structure,
    `TreeError` for gradients unlike `params`.

    >>> tx = masked(scale(0.0), "*/bias")
    >>> grads = {"a": {"bias": torch.ones(1), "w": torch.ones(1)}}
    >>> tx.update(grads, tx.init(grads), grads)[0]
    {'a': {'bias': tensor([0.]), 'w': tensor([1.])}}
    """
    _check.takes_mean("masked", tx)
    if not isinstance(tx, GradientTransformation):
        raise SpecError(
            f"masked: tx is {getattr(tx, '__name__', _check.kind(tx))}, not a GradientTransformation: call it, as in "
            "masked(adamw(3e-4), '**/w')"
        )

    def init(params: PyTree) -> PyTree:
        return tx.init(_with_holes(params, selected("masked", mask, params)))

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        leaves = _check.alike("masked", "grads", grads, params, dtypes=False)
        chosen = selected("masked", mask, params)
        held = _with_holes(params, chosen)
        inner, state = tx.update(_with_holes(grads, chosen), state, held)
        results = iter(_check.alike("masked", "updates", inner, held, dtypes=False))
        structure = tree.flatten(params)[2]
        return tree.unflatten(
            structure, [next(results) if c else g for c, g in zip(chosen, leaves, strict=True)]
        ), state

    return GradientTransformation(init, update)


def selected(where: str, mask: Mask | None, params: PyTree) -> list[bool]:
    """Returns a flag for each leaf of `params`, in `tree.flatten`'s order: whether the mask selects it; `None` selects
    all.

    Raises the errors of `masked`.

    >>> selected("masked", ["**/w", "b"], {"a": {"w": 1}, "b": 2, "c": 3})
    [True, True, False]
    """
    paths, leaves, structure = tree.flatten(params)
    if mask is None:
        return [True] * len(leaves)
    if isinstance(mask, str):
        mask = [mask]
    if isinstance(mask, (list, tuple)) and mask and all(isinstance(rule, str) for rule in mask):
        return _by_rules(where, mask, paths)
    if callable(mask):
        _check_takes_path_and_leaf(where, mask)
        flags = [mask(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    else:
        flag_paths, flags, flag_structure = tree.flatten(mask)
        if flag_structure != structure:
            differing = sorted(set(paths) ^ set(flag_paths))
            raise SpecError(
                f"{where}: mask does not have the structure of params"
                + (f": {differing[0]!r} is in one of them only" if differing else "")
                + ". Give one bool for each leaf, or a path rule such as '**/bias'"
            )
    for path, flag in zip(paths, flags, strict=True):
        if not isinstance(flag, bool):
            raise SpecError(f"{where}: mask says {_check.kind(flag)} for {path!r}, but it must say True or False")
    return flags


def _check_takes_path_and_leaf(where: str, mask: Callable[..., Any]) -> None:
    """Raises SpecError for a mask that cannot be called with a path and a leaf, such as optax's of all parameters."""
    try:
        inspect.signature(mask).bind("path", "leaf")
    except TypeError:
        name = getattr(mask, "__name__", _check.kind(mask))
        raise SpecError(
            f"{where}: mask is called with a path and its leaf, and {name}{inspect.signature(mask)} does not take "
            "them. Write mask=lambda path, leaf: leaf.ndim > 1, or path rules such as mask=['**/weight']. (For a "
            "function of all parameters, as in optax, give its result)"
        ) from None
    except ValueError:  # a function without a signature
        return


def _by_rules(where: str, rules: Sequence[str], paths: list[str]) -> list[bool]:
    """For each leaf, whether a path rule selects it. Raises SpecError for a rule that matches nothing."""
    chosen = [False] * len(paths)
    for rule in rules:
        hits = [tree.matches(rule, path) for path in paths]
        if not any(hits):
            known = [*paths, *(f"**/{tree.parts(path)[-1]}" for path in paths if path)]
            shown = ", ".join(repr(path) for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
            raise SpecError(
                f"{where}: the mask {rule!r} matches none of the {len(paths)} leaves of params ({shown})."
                + tree.suggest(rule, known)
            )
        chosen = [c or hit for c, hit in zip(chosen, hits, strict=True)]
    return chosen


def plus_scaled(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """Returns `x + factor * y` in x's dtype; x itself if factor is the number 0.

    >>> plus_scaled(torch.ones(2), torch.ones(2), torch.tensor(0.5))
    tensor([1.5000, 1.5000])
    """
    if isinstance(factor, Tensor):
        return torch.addcmul(x, y, factor).to(x.dtype)  # a 0-d leaf would become the factor's dtype
    return torch.add(x, y, alpha=factor) if factor else x


def _wide_norm(values: PyTree) -> Tensor:
    """The norm in float64, in which squares of float32 do not overflow."""
    sums = [sum_squares(leaf) for leaf in tree.flatten(values)[1]]
    return torch.sqrt(functools.reduce(operator.add, sums)) if sums else torch.zeros((), dtype=torch.float64)


def sum_squares(x: Tensor) -> Tensor:
    """Returns the sum of squares of a leaf: scalar float64, over all ranks that hold a part of it.

    >>> sum_squares(torch.tensor([3.0, 4.0]))
    tensor(25., dtype=torch.float64)
    """
    return x.to(torch.float64).square().sum() if _ops.watched(x) else _ops.sum_squares(x)


def _delta(new: Tensor, old: Tensor) -> Tensor:
    return new - old if _ops.watched(new, old) else _ops.delta(new, old)


def _apply_delta(old: Tensor, delta: Tensor) -> Tensor:
    return (old + delta).to(old.dtype) if _ops.watched(old, delta) else _ops.apply_delta(old, delta)


def _with_holes(values: PyTree, chosen: list[bool]) -> PyTree:
    """The tree with `None` in place of each leaf that is not chosen."""
    _, leaves, structure = tree.flatten(values)
    return tree.unflatten(structure, [leaf if c else None for leaf, c in zip(leaves, chosen, strict=True)])
