"""state_recipe: the recipe of the first state, from the user's parameters or a function that makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fzero import random, tree
from fzero._torch_compat import is_fake
from fzero.capture import ambient
from fzero.capture.graph import PerRank
from fzero.capture.joint import asks_key
from fzero.capture.leaves import check_hooks, check_leaf, check_names
from fzero.capture.provenance import defined_at
from fzero.collector import collector_paused
from fzero.errors import TreeError, leaf_name
from fzero.ir.fx_values import extent_bytes
from fzero.precision import DTYPES, LOW
from fzero.random.keys import is_key
from fzero.spec import Spec
from fzero.state.first_state import Deferred, Recipe
from fzero.state.source import Source, like
from fzero.training import training_of


@collector_paused()
def recipe_for(spec: Spec, params: Any, key: torch.Tensor | None, device: torch.device, ranks: int = 1) -> Recipe:
    """The recipe of a first state on `device`: `fzero.init(params, spec, key=key)` fills the leaves from it.

    ranks: of the data, each of which keeps a share of the leaves that are sliced by rank. params: a pytree of tensors,
    a `Source`, or a function of a key. Raises TreeError if it is none of them, has no leaves, or holds one element as
    two parameters'.
    """
    ambient.check_trace()
    check_key("init", key)
    if key is not None and spec.step is not None and not callable(params):
        raise TreeError("fzero.init(key=...): with step= the state is yours: put the key into it, as {'key': key, ...}")
    wants = key is not None or needs_key(spec)
    start = (random.key(0) if key is None else key).to(device)
    if callable(params) and not isinstance(params, torch.nn.Module):
        _check_function(params)
        return Recipe(lambda k: _whole(spec, _not_empty(params(k)), k if wants else None), [start], device, ranks)
    if isinstance(params, torch.nn.Module):
        raise TreeError(
            "params is a module: take it apart with fzero.interop.from_module(module), which gives (params, "
            "buffers, apply)"
        )
    source = params if isinstance(params, Source) else None
    params = like(source) if source is not None else params
    paths, leaves, treedef = tree.flatten(_not_empty(params))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(getattr(leaf, "value", leaf), torch.Tensor)]

    def whole(*xs: torch.Tensor) -> Any:
        full = list(leaves)
        for i, x in zip(tensors, xs, strict=False):
            full[i] = replace(leaves[i], value=x) if isinstance(leaves[i], PerRank) else x
        return _whole(spec, tree.unflatten(treedef, full), xs[-1] if wants else None)

    check_names("params" if spec.loss is not None else "state", paths)
    if spec.loss is not None:
        _check_apart(paths, leaves)
    inputs = [getattr(leaves[i], "value", leaves[i]).detach() for i in tensors]
    for i, value in zip(tensors, inputs, strict=True):
        check_leaf(leaf_name("params", paths[i]), value)
        check_hooks(leaf_name("params", paths[i]), getattr(leaves[i], "value", leaves[i]))
    inputs = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in inputs]
    recipe = Recipe(whole, [*inputs, start] if wants else inputs, device, ranks)
    if source is not None:
        recipe.inputs[: len(paths)] = [Deferred(source, path) for path in paths]
    return recipe


def _check_function(params: Callable[..., Any]) -> None:
    """Raises TreeError for a function that cannot be called with a key."""
    try:
        signature = inspect.signature(params)
    except (TypeError, ValueError):  # a built-in that does not say
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TreeError(
            f"{defined_at(params)} makes the first state, and is called with a key: {error}. Write it as "
            "`lambda key: ...`, or give the tensors themselves"
        ) from None


def check_key(name: str, key: Any) -> None:
    """Raises TreeError if `key` is no key of `fzero.random`; None passes."""
    if key is not None and not is_key(key):
        raise TreeError(f"fzero.{name}(key={key!r}): needed a key, as fzero.random.key(0)")


def _not_empty(params: Any) -> Any:
    if not tree.flatten(params)[1]:
        raise TreeError("params has no leaves: pass a pytree of tensors, or a function of a key that makes one")
    return params


def _check_apart(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raises TreeError for two parameters that share an element: they would start equal and drift apart. Two views of
    one memory that `requires_grad` says are frozen stay equal."""
    real = [
        (leaf, leaf_name("params", path))
        for path, leaf in zip(paths, leaves, strict=True)
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta and not is_fake(leaf) and leaf.numel()
    ]
    name_of: dict[int, str] = {}
    for leaf, name in real:
        if (other := name_of.setdefault(id(leaf), name)) != name:
            raise TreeError(
                f"{other} and {name} are one tensor: as two leaves they would drift apart. Keep one and use it twice "
                "in the loss, or clone() it"
            )
    plain = [(leaf, name) for leaf, name in real if type(leaf) in (torch.Tensor, torch.nn.Parameter)]
    held = sorted((leaf.data_ptr(), name, leaf) for leaf, name in plain if leaf.layout is torch.strided)
    flagged = any(leaf.requires_grad for leaf, _ in real)
    open_ = list[tuple[int, str, torch.Tensor]]()  # that reach to where the next begins
    for start, name, leaf in held:
        open_ = [one for one in open_ if one[0] + extent_bytes(one[2]) > start]
        for first, other, earlier in open_:
            frozen = flagged and not (earlier.requires_grad or leaf.requires_grad)
            if not frozen and _share(earlier, leaf, start - first):
                raise TreeError(
                    f"{other} and {name} share memory: as two leaves they would drift apart. Keep one and take the "
                    "other from it in the loss (w.t(), w[:n]), or clone() it"
                )
        open_.append((start, name, leaf))


def _share(first: torch.Tensor, later: torch.Tensor, distance: int) -> bool:
    """Whether two tensors whose extents overlap have an element in common. distance: in bytes, of their starts."""
    if first.dtype != later.dtype or distance % first.element_size():
        return True
    at = distance // first.element_size()
    span = max(extent_bytes(first), distance + extent_bytes(later)) // first.element_size()
    taken = torch.zeros(span, dtype=torch.bool, device=first.device)
    taken.as_strided(first.shape, first.stride()).fill_(True)
    return bool(taken.as_strided(later.shape, later.stride(), at).any())


def needs_key(spec: Spec) -> bool:
    """Whether a step needs a key even if the user gave none: the loss has a parameter for it, or rounding is
    stochastic."""
    return spec.loss is not None and (asks_key(spec.loss) or DTYPES.get(spec.numerics.policy.params or "") in LOW)


def _whole(spec: Spec, params: Any, key: torch.Tensor | None) -> Any:
    """The first state. The function that makes params and the training after it draw from different keys."""
    if spec.optimizer is None:
        return params
    return training_of(spec).init(params, None if key is None else random.fold_in(key, -2))
