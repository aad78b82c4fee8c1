"""closures: copies of a module whose functions refer to the copy.

`copy.deepcopy` does not copy functions. So a lambda on a module (`self.mlpf = lambda x: m.c_fc(x)`), a hook or a
default argument would still refer to the original module and its weights. A weak reference would too. `bound` finds
these, and `copied` makes each of them anew over the copies. Then `leak` searches a finished copy for a way from a
forward to the original: through a class, a global, or an object whose copy is the object itself.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fzero.capture.provenance import short_name

Bound = types.FunctionType | weakref.ref[Any]
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
# what makes, copies or pickles a module, and no call of it runs
_MAKERS = {"__init__", "__new__", "__setstate__", "__getstate__", "__reduce__", "__reduce_ex__", "__deepcopy__"}
_COPYING = threading.RLock()
_ATOMS = (int, float, complex, bool, str, bytes, type(None), type, types.ModuleType, types.CodeType, Tensor)


def own(module: nn.Module) -> dict[int, Any]:
    """A module's parts, parameters and buffers, by identity."""
    return {id(x): x for x in (*module.modules(), *module.parameters(), *module.buffers())}


def bound(module: nn.Module) -> tuple[Bound, ...]:
    """The functions (with a closure or default) and weak references that refer to a part of a module and are not copied
    with it."""
    parts = own(module)

    def sees(value: Any) -> bool:
        if isinstance(value, types.FunctionType):
            return any(id(x) in parts for x, _ in _walk(value, "", classes=False))
        return type(value) is weakref.ref and id(value()) in parts

    return tuple(value for value, _ in _walk(module, "", classes=False) if sees(value))


class _Memo(dict[int, Any]):
    """The memo of `copy.deepcopy`: copies by the identity of the original. The copy of a weak reference is made when it
    is asked for."""

    def __init__(self, memo: dict[int, Any], refs: Iterable[weakref.ref[Any]]) -> None:
        super().__init__(memo)
        self.refs = {id(ref): ref for ref in refs}
        self.strays: dict[int, Any] = {}  # tensors that a part's own way of copying made, by id: they were replaced

    def get(self, key: int, default: Any = None) -> Any:
        if key not in self and (ref := self.refs.get(key)) is not None:
            self[key] = weakref.ref(copy.deepcopy(ref(), self))
        return super().get(key, default)


def copied(
    module: nn.Module, bound: Sequence[Bound], memo: dict[int, Any]
) -> tuple[nn.Module, tuple[Bound, ...], _Memo]:
    """(`copy.deepcopy(module, memo)`, the `bound` functions and references made anew over the copy, the full memo)."""
    fns = [value for value in bound if isinstance(value, types.FunctionType)]
    full_memo = _Memo(memo, (value for value in bound if isinstance(value, weakref.ref)))
    cells: dict[int, types.CellType] = {}
    for fn in fns:
        closure = tuple(cells.setdefault(id(cell), types.CellType()) for cell in fn.__closure__ or ())
        full_memo[id(fn)] = functools.update_wrapper(
            types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, closure), fn, updated=()
        )
    with _memo_is_asked():
        result = copy.deepcopy(module, full_memo)
        _replace_strays(module, result, full_memo)
        for fn in fns:
            new = full_memo[id(fn)]
            new.__defaults__, new.__kwdefaults__ = copy.deepcopy((fn.__defaults__, fn.__kwdefaults__), full_memo)
            new.__dict__ = copy.deepcopy(fn.__dict__, full_memo)
            for cell in fn.__closure__ or ():
                if _filled(cell):
                    cells[id(cell)].cell_contents = copy.deepcopy(cell.cell_contents, full_memo)
        return result, tuple(full_memo.get(id(value)) for value in bound), full_memo


def _replace_strays(module: nn.Module, result: nn.Module, memo: _Memo) -> None:
    """Puts the memo's tensors in the place of those that a part with its own `__deepcopy__` or `__getstate__` made (one
    that pickles a graph of its own, as e3nn's products)."""
    parts = dict(result.named_modules(remove_duplicate=False))
    for path, part in module.named_modules(remove_duplicate=False):
        twin = parts.get(path, part)
        for held, copies in ((part._parameters, twin._parameters), (part._buffers, twin._buffers)):
            for name, value in held.items():
                wanted = None if value is None else memo.get(id(value))
                if wanted is not None and (stray := copies.get(name)) is not None and stray is not wanted:
                    copies[name], memo.strays[id(stray)] = wanted, stray


@contextlib.contextmanager
def _memo_is_asked() -> Iterator[None]:
    """Since Python 3.14 `copy.deepcopy` gives functions and weak references back before it looks into its memo. Within
    this it looks first, in other threads too, where it finds nothing and does as it did. Python's modules, of which it
    makes no copy (functions of torch.func close over one), stay what they are."""
    atomic: set[type] = getattr(copy, "_atomic_types", set())
    copiers: dict[type, Any] = getattr(copy, "_deepcopy_dispatch", {})
    with _COPYING:
        kinds = atomic & {types.FunctionType, weakref.ref}
        added = kinds | ({types.ModuleType} - copiers.keys())
        copiers |= dict.fromkeys(added, lambda value, memo: value)
        atomic -= kinds
        try:
            yield
        finally:
            atomic |= kinds
            for kind in added:
                del copiers[kind]


def leak(module: nn.Module, original: dict[int, Any]) -> str:
    """A way from a copied module's forward to a part that is `own` by its original, as text; "" if there is none.

    Of a class it follows only the attributes whose names occur in code that forward can reach.
    """
    return next((path for value, path in _walk(module, "", classes=True) if id(value) in original), "")


def _walk(root: Any, name: str, *, classes: bool) -> Iterator[tuple[Any, str]]:
    """Every object that an object can reach by itself, each once, with a path to it. It does not look into tensors."""
    visited: dict[int, Any] = {}
    stack = [(root, name)]
    reached = _Reached()
    while stack:
        value, path = stack.pop()
        if id(value) in visited:
            continue
        visited[id(value)] = value
        yield value, path
        if not isinstance(value, _ATOMS):
            stack += _parts(value, path)
            if classes:
                stack += reached.by(value, path)


def _parts(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """The objects that an object refers to, each with its path."""
    held = next((kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind)), None)
    if isinstance(value, dict):
        yield from ((x, f"{path}[{key!r}]") for key, x in list(dict.items(value)))
    elif held is not None:  # by the class's own iteration: one that inherits it may refuse its length
        yield from ((x, f"{path}[{i}]") for i, x in enumerate(list(held.__iter__(value))))
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
    """(name, value) of an object's attributes: its `__dict__` and its slots."""
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
    """The objects that a function refers to beside its arguments: cells, defaults, and those globals that are modules
    or tensors."""
    where = f"{path} ({short_name(fn.__code__.co_filename)}:{fn.__code__.co_firstlineno})"
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        if _filled(cell):
            yield cell.cell_contents, f"{where} by closure over {name!r}"
    yield from ((x, f"{where} by a default") for x in (fn.__defaults__, fn.__kwdefaults__) if x)
    for name in _globals(fn.__code__):
        if isinstance(value := fn.__globals__.get(name), (nn.Module, Tensor)):
            yield value, f"{where} by the global {name!r}"


class _Reached:
    """The objects that modules' forwards can reach by name: attributes of the modules' classes, and global functions.

    Of torch's own classes only the names in their code are taken. They lead to users' methods, and reach no module
    except by self.

    names: the names that reachable code mentions. waiting: attributes of classes that no code has named yet. kinds: the
    classes already looked at. Only the methods here write them.
    """

    def __init__(self) -> None:
        self.names = {"forward"}
        self.waiting: dict[str, list[tuple[type, Any, str]]] = {}
        self.kinds: set[type] = set()

    def by(self, value: Any, path: str) -> Iterator[tuple[Any, str]]:
        """The objects that become reachable with this one."""
        if isinstance(value, types.FunctionType):
            self.names.update(_mentioned(value.__code__))
            called = (value.__globals__.get(name) for name in _globals(value.__code__))
            yield from (
                (x, f"{path} > {x.__name__}") for x in called if isinstance(x, types.FunctionType) and not _torchs(x)
            )
        elif isinstance(value, nn.Module):
            for base in set(type(value).__mro__) - self.kinds:
                self._wait(base, path)
        while ready := self.names & self.waiting.keys():
            for base, x, where in (item for name in ready for item in self.waiting.pop(name)):
                if not _torchs(base):
                    yield x, where
                elif isinstance(x, types.FunctionType):
                    self.names.update(_mentioned(x.__code__))

    def _wait(self, kind: type, path: str) -> None:
        self.kinds.add(kind)
        for name, x in kind.__dict__.items():
            if name in _MAKERS:  # though code of another class that forward reaches may name it
                continue
            self.waiting.setdefault(name, []).append((kind, x, f"{path}.{name}".lstrip(".")))
            if name.startswith("__") and not _torchs(kind):
                self.names.add(name)  # as __call__, which no code names


def _torchs(value: type | types.FunctionType) -> bool:
    return f"{value.__module__}.".startswith("torch.")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of all functions written within it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _mentioned(code: types.CodeType) -> Iterator[str]:
    """The names of all attributes and globals in a code, and its strings, since getattr takes strings."""
    for inner in _codes(code):
        yield from inner.co_names
        yield from (x for x in inner.co_consts if isinstance(x, str))


@functools.lru_cache(1 << 12)  # to disassemble takes long, and models share their code
def _globals(code: types.CodeType) -> tuple[str, ...]:
    """The names that a code looks up as globals; `co_names` holds those of attributes too."""
    found = (x for inner in _codes(code) for x in dis.get_instructions(inner) if x.opname in _GLOBAL)
    return tuple(dict.fromkeys(x.argval for x in found))


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
