"""The checks of the optimizers. Each error gives the value, the kind that was needed, and the smallest fix.

Numbers are checked once, when an optimizer or a schedule is made. Trees are checked at every `init` and `update`. That
reads only paths, shapes and dtypes, so it costs nothing in a captured step.
"""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from numbers import Integral, Real
from typing import Any

import torch

from fzero import tree
from fzero.errors import SpecError, TreeError
from fzero.phases import Phases


def number(
    name: str, value: Any, *, low: float = 0.0, high: float = math.inf, above: bool = False, fix: str = ""
) -> float:
    """`value` as a float in `[low, high)`, or in `(low, high)` when `above`; `fix` ends the message.

    >>> number("adam: eps", 1e-8, above=True)
    1e-08
    >>> number("adam: betas[0]", 1.0, high=1.0)
    Traceback (most recent call last):
    fzero.errors.SpecError: adam: betas[0] is 1.0, but it must be at least 0 and less than 1
    """
    if isinstance(value, torch.Tensor):
        fix = fix or "under inject_hyperparams, name it in static=(...)"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SpecError(f"{name} is {kind(value)}, but it must be a Python number{_tail(fix)}")
    value = float(value)
    if not (value > low or (value == low and not above)) or not value < high:
        bounds = [f"{'greater than' if above else 'at least'} {low:g}"] * (low != -math.inf)
        bounds.append("finite" if high == math.inf else f"less than {high:g}")
        raise SpecError(f"{name} is {value}, but it must be {' and '.join(bounds)}{_tail(fix)}")
    return value


def hyper(name: str, value: Any, **bounds: Any) -> float | torch.Tensor:
    """As `number`, or a floating-point scalar tensor, whose value is not read: a hyperparameter that a step computes.

    >>> hyper("sgd: weight_decay", torch.zeros(2))
    Traceback (most recent call last):
    fzero.errors.SpecError: sgd: weight_decay has shape (2,) and is torch.float32, but a tensor here must be 0-d and \
floating-point
    """
    if not isinstance(value, torch.Tensor):
        return number(name, value, **bounds)
    if value.dim() != 0 or not value.is_floating_point():
        raise SpecError(
            f"{name} has shape {tuple(value.shape)} and is {value.dtype}, but a tensor here must be 0-d and "
            "floating-point"
        )
    return value


def two_betas(where: str, betas: Any) -> tuple[float, float]:
    """Two decay rates, each in [0, 1).

    >>> two_betas("adam", 0.9)
    Traceback (most recent call last):
    fzero.errors.SpecError: adam: betas is 0.9, but it must be two numbers: write betas=(0.9, 0.999)
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise SpecError(f"{where}: betas is {betas!r}, but it must be two numbers: write betas=(0.9, 0.999)")
    first, second = (number(f"{where}: betas[{i}]", beta, high=1.0) for i, beta in enumerate(betas))
    return first, second


def steps(name: str, value: Any, *, low: int = 0, phases: bool = False) -> int:
    """`value` as a whole number of steps, at least `low`. phases: what it is given to makes an optimizer with phases.

    >>> steps("cosine: steps", 1e3)
    Traceback (most recent call last):
    fzero.errors.SpecError: cosine: steps is 1000.0 (float), but it must be a whole number: write int(...)
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        fix = "write int(...)"
        if isinstance(value, torch.Tensor):
            fix = f"under inject_hyperparams, name it in static=({name.rpartition(' ')[2]!r},)"
            fix += ". But an optimizer with phases cannot be wrapped: give learning_rate a schedule" if phases else ""
        shown = "of type Tensor" if isinstance(value, torch.Tensor) else kind(value)
        raise SpecError(f"{name} is {shown}, but it must be a whole number: {fix}")
    if value < low:
        raise SpecError(f"{name} is {value}, but it must be at least {low}")
    return int(value)


def flag(name: str, value: Any) -> None:
    """Raises SpecError unless `value` is True or False.

    >>> flag("sgd: nesterov", 1)
    Traceback (most recent call last):
    fzero.errors.SpecError: sgd: nesterov is 1 (int), but it must be True or False
    """
    if not isinstance(value, bool):
        raise SpecError(f"{name} is {kind(value)}, but it must be True or False")


def trainable(where: str, params: Any) -> None:
    """Raises TreeError unless every leaf is a floating-point tensor, so that it can have a gradient and moments.

    >>> trainable("adamw", {"w": torch.zeros(2), "seen": torch.tensor(3)})
    Traceback (most recent call last):
    fzero.errors.TreeError: adamw: params/seen is torch.int64, but an optimizer updates floating-point tensors: keep \
it out of params, or select the other leaves with fzero.optim.masked
    """
    paths, leaves, _ = tree.flatten(params)
    for path, leaf in zip(paths, leaves, strict=True):
        name = _join("params", path)
        if not isinstance(leaf, torch.Tensor):
            raise TreeError(f"{where}: {name} is {kind(leaf)}, but it must be a tensor: {_as_tensors(leaf)}")
        if not leaf.is_floating_point():
            fix = "keep it out of params, or select the other leaves with fzero.optim.masked"
            if leaf.is_complex():
                fix = "hold torch.view_as_real(x), and take torch.view_as_complex(x) of it in the loss"
            raise TreeError(f"{where}: {name} is {leaf.dtype}, but an optimizer updates floating-point tensors: {fix}")
        if leaf.dtype.itemsize == 1:
            raise TreeError(
                f"{where}: {name} is {leaf.dtype}, but an optimizer computes in 16 bits or more: hold it in bf16 or "
                f"fp32, and take x.to({leaf.dtype}) of it in the loss"
            )


def _as_tensors(leaf: Any) -> str:
    """What makes tensors of a leaf of the parameters that is none."""
    if isinstance(leaf, (bool, int, float, complex)):
        return "write torch.tensor(...)"
    if type(leaf).__name__ == "ndarray":
        return "write torch.from_numpy(x)"
    if is_dataclass(leaf):
        return "write vars(x), a dict of its fields, or make the class a NamedTuple, whose fields are leaves too"
    if isinstance(leaf, (str, bytes)):
        return "leave it out of params, and read it in the loss"
    return "give dicts, lists, tuples or named tuples of tensors"


def alike(where: str, name: str, given_tree: Any, params: Any, *, dtypes: bool | torch.dtype = True) -> list[Any]:
    """The leaves of `given_tree`. Raises TreeError unless it has the structure and shapes of `params`.

    dtypes: True also asks for the dtypes of `params`, False for none, a dtype for this one.

    >>> alike("sgd", "grads", {"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(3)})
    Traceback (most recent call last):
    fzero.errors.TreeError: sgd: grads does not have the structure of params: params/b has no counterpart there. A \
leaf the loss does not use has gradient None: give it zeros, or leave it out with fzero.optim.masked
    """
    _, wanted, structure = tree.flatten(params)
    paths, leaves, given_structure = tree.flatten(given_tree)
    if given_structure != structure:
        raise TreeError(
            f"{where}: {name} does not have the structure of params: " + _difference(name, given_tree, params)
        )
    for path, leaf, param in zip(paths, leaves, wanted, strict=True):
        here, there = _join(name, path), _join("params", path)
        if not isinstance(leaf, torch.Tensor):
            raise TreeError(f"{where}: {here} is {kind(leaf)}, but it must be a tensor like {there}")
        if leaf.shape != param.shape:
            raise TreeError(
                f"{where}: {here} has shape {tuple(leaf.shape)}, but {there} has shape {tuple(param.shape)}"
            )
        if dtypes is True and leaf.dtype != param.dtype:
            raise TreeError(
                f"{where}: {here} is {leaf.dtype}, but {there} is {param.dtype}: write .to({param.dtype}) on it"
            )
        if isinstance(dtypes, torch.dtype) and leaf.dtype != dtypes:
            raise TreeError(
                f"{where}: {here} is {leaf.dtype}, but it is kept in {dtypes}: make opt_state with this optimizer's "
                "init"
            )
    return leaves


def takes_mean(where: str, *transformations: Any) -> None:
    """Raises SpecError for a transformation that takes each rank's own gradients, which only a Spec can give it, and
    for one with phases, which only a Spec can choose from."""
    for tx in transformations:
        if isinstance(tx, Phases):
            raise SpecError(
                f"{where}: an optimizer with phases ({', '.join(tx.each)}) cannot be wrapped, since the step number "
                "decides. Give it to Spec(optimizer=...) as it is; wrap the optimizer of each phase instead"
            )
        if getattr(tx, "takes", "mean") != "mean":
            raise SpecError(
                f"{where}: a transformation that takes local gradients reduces them itself, so what is around it would "
                "see gradients that differ between ranks. Give it to Spec(optimizer=...) as it is"
            )


def zero_count(params: Any) -> torch.Tensor:
    """A step count of 0 (scalar int64) on the device of the first leaf.

    >>> zero_count([torch.ones(2)])
    tensor(0)
    """
    leaves = tree.flatten(params)[1]
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)


def _difference(name: str, other: Any, params: Any) -> str:
    """The first path at which two trees of different structure part."""
    paths, _, structure = tree.flatten(params)
    given_paths, _, given_structure = tree.flatten(other)
    present, given_present = set(paths), set(given_paths)
    for path in paths:
        if path not in given_present:
            unused = (
                " A leaf the loss does not use has gradient None: give it zeros, or leave it out with "
                "fzero.optim.masked"
            )
            return f"{_join('params', path)} has no counterpart there." + (unused if name == "grads" else "")
    for path in given_paths:
        if path not in present:
            return f"{_join(name, path)} has no counterpart in params." + tree.suggest(path, paths)
    for path, entry, given_entry in zip(paths, structure.accessors(), given_structure.accessors(), strict=True):
        if entry != given_entry:
            kinds = [" in ".join(step.type.__name__ for step in reversed(e)) for e in (given_entry, entry)]
            return f"{_join(name, path)} is held by {kinds[0]}, {_join('params', path)} by {kinds[1]}."
    return "they agree in every leaf, but not in their empty containers."


def _join(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name


def kind(value: Any) -> str:
    """A value of the wrong type, as messages show it: numbers and strings in full, the rest by type alone.

    >>> kind(1.5), kind("x"), kind([1])
    ('1.5 (float)', "'x' (str)", 'of type list')
    """
    plain = isinstance(value, (bool, int, float, str)) or value is None
    return f"{value!r} ({type(value).__name__})" if plain else f"of type {type(value).__name__}"


def _tail(fix: str) -> str:
    return f": {fix}" if fix else ""
