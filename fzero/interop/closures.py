"""closures: copies of a module whose functions see the copy.

`copy.deepcopy` takes a function as it is, so that a lambda on a module (`self.mlpf = lambda x: m.c_fc(x)`), a hook or a
default argument goes on seeing the module that was copied, and its weights. `functions` finds those, and `copied` makes
each anew over cells that hold the copy. `leak` looks at a finished copy for any way that still leads to the original:
through a class, a global, a weak reference, or an object that copies itself as itself.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

_ATOMS = (int, float, complex, bool, str, bytes, type(None), type, types.ModuleType, types.CodeType, Tensor)


def own(module: nn.Module) -> dict[int, Any]:
    """A module's parts, parameters and buffers, by identity."""
    return {id(x): x for x in (*module.modules(), *module.parameters(), *module.buffers())}


def functions(module: nn.Module) -> tuple[types.FunctionType, ...]:
    """The functions on a module that see something of it by closure or default."""
    mine = own(module)
    return tuple(
        value
        for value, _ in _walk(module, "", classes=False)
        if isinstance(value, types.FunctionType) and any(id(x) in mine for x, _ in _walk(value, "", classes=False))
    )


def copied(module: nn.Module, bound: Sequence[types.FunctionType], memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy(module, memo)`, the functions `bound` (of `functions`) made anew over what is copied."""
    cells: dict[int, types.CellType] = {}
    for fn in bound:
        closure = tuple(cells.setdefault(id(cell), types.CellType()) for cell in fn.__closure__ or ())
        memo[id(fn)] = functools.update_wrapper(
            types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, closure), fn, updated=()
        )
    result = copy.deepcopy(module, memo)
    for fn in bound:
        new = memo[id(fn)]
        new.__defaults__, new.__kwdefaults__ = copy.deepcopy((fn.__defaults__, fn.__kwdefaults__), memo)
        new.__dict__ = copy.deepcopy(fn.__dict__, memo)
        for cell in fn.__closure__ or ():
            if _filled(cell):
                cells[id(cell)].cell_contents = copy.deepcopy(cell.cell_contents, memo)
    return result


def leak(module: nn.Module, original: dict[int, Any]) -> str:
    """A way from a copied module to something `own` by its original, as text; "" where there is none."""
    return next((path for value, path in _walk(module, "", classes=True) if id(value) in original), "")


def _walk(root: Any, name: str, *, classes: bool) -> Iterator[tuple[Any, str]]:
    """Every object that an object can reach by itself, each once, with a path to it; tensors are not looked into."""
    seen: dict[int, Any] = {}
    stack = [(root, name)]
    while stack:
        value, path = stack.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield value, path
        if not isinstance(value, _ATOMS):
            stack += _parts(value, path)
            if classes and isinstance(value, nn.Module):
                stack += _of_class(type(value), path)


def _parts(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    if isinstance(value, dict):
        yield from ((x, f"{path}[{key!r}]") for key, x in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((x, f"{path}[{i}]") for i, x in enumerate(list(value)))
    elif isinstance(value, types.FunctionType):
        yield from _seen_by(value, path)
    elif isinstance(value, types.MethodType):
        yield from ((value.__self__, path), (value.__func__, path))
    elif isinstance(value, functools.partial):
        yield from ((x, path) for x in (value.func, value.args, value.keywords))
    elif isinstance(value, weakref.ref):
        yield value(), f"{path} (a weak reference)"
    elif isinstance(value, property):
        yield from ((x, path) for x in (value.fget, value.fset))
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__, path
    for key, x in list(_attributes(value)):
        if isinstance(value, nn.Module) and key in ("_parameters", "_buffers", "_modules"):
            yield from ((part, f"{path}.{name}".lstrip(".")) for name, part in x.items())
        else:
            yield x, f"{path}.{key}".lstrip(".")


def _attributes(value: Any) -> Iterable[tuple[str, Any]]:
    held = getattr(value, "__dict__", None)
    yield from held.items() if isinstance(held, dict) else ()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType) and name not in ("__dict__", "__weakref__"):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # not set
                    continue


def _seen_by(fn: types.FunctionType, path: str) -> Iterator[tuple[Any, str]]:
    """What a function sees beside its arguments: cells, defaults, and of globals modules and tensors alone."""
    where = f"{path} ({fn.__code__.co_filename.rsplit('/', 1)[-1]}:{fn.__code__.co_firstlineno})"
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        if _filled(cell):
            yield cell.cell_contents, f"{where} by closure over {name!r}"
    yield from ((x, f"{where} by a default") for x in (fn.__defaults__, fn.__kwdefaults__) if x)
    for name in _names(fn.__code__):
        if isinstance(value := fn.__globals__.get(name), (nn.Module, Tensor)):
            yield value, f"{where} by the global {name!r}"


def _of_class(kind: type, path: str) -> Iterator[tuple[Any, str]]:
    for base in kind.__mro__:
        if not base.__module__.startswith("torch."):
            yield from ((x, f"{path}.{name}".lstrip(".")) for name, x in base.__dict__.items())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
