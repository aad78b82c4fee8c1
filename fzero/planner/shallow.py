"""shallow: the same step with fewer layers, where the layers are equal.

The numbered children of the parameters (`blocks/0`, `model.layers.0`) are cut to a depth. A loss that loops over them
needs no more. A loss that calls a module is given a shallower one: what it refers to that has a method `shallower`, as
`fzero.interop.from_module` makes it, is replaced in a copy of the loss.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fzero.planner.equal_layers import Layers
from fzero.planner.problem import Problem


def shallow(problem: Problem, layers: Layers, depth: int) -> Problem:
    """The problem of a model with `depth` of its layers. A rule of the spec that names a layer beyond it is refused
    later, where the step is lowered."""
    whole = problem.spec.loss
    if (known := problem.shallower.get(depth)) is None or known[0] is not whole:
        loss = _with_parts(whole, lambda part: part.shallower(layers.stacks, depth))
        known = problem.shallower[depth] = whole, loss, _cut(problem.params_like, "", layers, depth)
    _, loss, params = known
    return replace(problem, spec=replace(problem.spec, loss=loss), params_like=params, layers=depth)


def _cut(node: Any, path: str, layers: Layers, depth: int) -> Any:
    """A pytree of dicts, lists and tuples without the layers beyond a depth."""
    if isinstance(node, Mapping):
        below = {key: f"{path}/{key}" for key in node}
        return {
            key: _cut(node[key], where, layers, depth) for key, where in below.items() if not layers.drops(where, depth)
        }
    if type(node) in (list, tuple):
        kept = [x for n, x in enumerate(node) if not layers.drops(f"{path}/{n}", depth)]
        return type(node)(_cut(x, f"{path}/{n}", layers, depth) for n, x in enumerate(kept))
    return node


def _with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """A function, a tuple or a partial in which each part that has a method `shallower` is changed; itself if none
    has."""
    if hasattr(value, "shallower"):
        return change(value)
    again = functools.partial(_with_parts, change=change)
    if isinstance(value, functools.partial):
        return functools.partial(
            again(value.func), *map(again, value.args), **{k: again(v) for k, v in value.keywords.items()}
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(again, value))
    if isinstance(value, types.FunctionType):
        return _function(value, again)
    return value


def _function(fn: types.FunctionType, again: Callable[[Any], Any]) -> types.FunctionType:
    """A function over changed cells and defaults, and changed globals that its code names."""
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    known = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
    named = {name: value for name, value in known.items() if not isinstance(value, types.FunctionType)}
    new_cells, new_names = list(map(again, cells)), {name: again(value) for name, value in named.items()}
    new_defaults = tuple(map(again, fn.__defaults__ or ()))
    same = [*zip(cells, new_cells, strict=True), *zip(named.values(), new_names.values(), strict=True)]
    if all(old is new for old, new in (*same, *zip(fn.__defaults__ or (), new_defaults, strict=True))):
        return fn
    closure = tuple(map(types.CellType, new_cells)) if fn.__closure__ else None
    made = types.FunctionType(fn.__code__, {**fn.__globals__, **new_names}, fn.__name__, new_defaults or None, closure)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made
