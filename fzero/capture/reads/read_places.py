"""read_places: where a value lies that a function reads: an entry of a dict, an item, an attribute; and whether it is
still the same.

A `ReadPlace` is read again without running code of the user: a property is no place. Values are the same if they are
one object, or equal values of one type that cannot change (`same`).
"""

from __future__ import annotations

import contextvars
import enum
import functools
import operator
import os
import reprlib
import threading
import types
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fzero._torch_compat import is_fake
from fzero.capture.provenance import defined_at, describe


class _Missing(enum.Enum):
    MISSING = "nothing"

    def __repr__(self) -> str:
        return "not there"


MISSING = _Missing.MISSING
ENTRY, ITEM, ATTRIBUTE, COPY = "entry", "item", "attribute", "copy"
READ: dict[str, Callable[[Any, Any], Any]] = {
    ENTRY: lambda holder, key: dict.get(holder, key, MISSING),
    ITEM: operator.getitem,
    ATTRIBUTE: lambda holder, key: getattr(holder, key, MISSING),
    COPY: lambda holder, copy: copy(holder),  # the key makes a value that can be compared: a length, bytes, members
}
Spot = tuple[str, Any, Any]  # (kind, holder, key)

CONTAINERS = (dict, list, tuple, set, deque)
MOST_ITEMS = 512  # of a container whose contents are noted one by one
MOST_IN_ALL = 2048  # items of it and of the containers within it
DEEP = 4  # containers within containers
MOST_BYTES = 4096  # of a numpy array whose contents are noted
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")


@dataclass(eq=False)
class ReadPlace:
    """A place that was read, and its value then. `parent`: the place that its holder came from.

    name: as the user's code has it. where: the function that read it, and the line. behind: of an entry that is not
    there, the value that the class has instead. whole: the value was given to what may read all of it.
    """

    kind: str
    holder: Any
    key: Any
    name: str
    where: str
    value: Any
    parent: ReadPlace | None = None
    behind: Any = MISSING
    whole: bool = False

    def now(self) -> Any:
        """The value that it has now, MISSING if there is none."""
        return self.on(self.holder)

    def holds(self, value: Any) -> bool:
        """Whether a value is the one that was read, or of its worth."""
        return bool(self.value == value) if self.kind == COPY else same(self.value, value)

    def on(self, holder: Any) -> Any:
        """The value in the same place of another holder."""
        try:
            return READ[self.kind](holder, self.key)
        except Exception:  # an index beyond a shorter list, an empty cell, what a __getattr__ of the user raises
            return MISSING


def attribute(owner: Any, name: str) -> tuple[list[Spot], Any]:
    """(where an attribute lies, its value). No spots, and MISSING, for one that is computed or of a built-in type.

    A class's attribute has two: the object's own entry, which would hide it, and the class's.
    """
    if isinstance(owner, torch.Tensor):
        return [], MISSING
    if name == "__class__":
        return [], type(owner)
    if _ASKED.get(name, lambda _: False)(owner):
        return [(COPY, owner, Asked(name))], MISSING
    names = getattr(owner, "_fields", ()) if isinstance(owner, tuple) else ()  # of a named tuple
    if name in names:
        return [(ITEM, owner, names.index(name))], getattr(owner, name)
    if isinstance(owner, type):
        value = _get(owner, name)
        stable = value is not MISSING and value is _get(owner, name) and owner.__flags__ & _HEAP_TYPE
        return ([(ATTRIBUTE, owner, name)], value) if stable else ([], MISSING)
    kind, own = type(owner), getattr(owner, "__dict__", None)
    own = own if isinstance(own, dict) else None
    raw = next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), MISSING)
    if isinstance(raw, types.MemberDescriptorType):  # of __slots__
        return [(ATTRIBUTE, owner, name)], _get(owner, name)
    if raw is not MISSING and hasattr(type(raw), "__set__"):
        return [], MISSING
    if own is not None and name in own:
        return [(ENTRY, own, name)], own[name]
    if raw is not MISSING:
        value = raw.__func__ if isinstance(raw, staticmethod) else raw
        computed = hasattr(type(raw), "__get__") and not isinstance(raw, (types.FunctionType, staticmethod))
        if computed or not kind.__flags__ & _HEAP_TYPE:
            return [], MISSING
        return [*([] if own is None else [(ENTRY, own, name)]), (ATTRIBUTE, kind, name)], value
    for part in _MODULE_PARTS if isinstance(owner, nn.Module) else ():
        if name in vars(owner)[part]:
            return [(ENTRY, vars(owner)[part], name)], vars(owner)[part][name]
    if hasattr(kind, "__getattr__") and not isinstance(owner, types.ModuleType):
        value = _get(owner, name)
        return ([(ATTRIBUTE, owner, name)], value) if same(value, _get(owner, name)) else ([], value)
    may_come = own is not None and not isinstance(owner, types.ModuleType)  # `hasattr(cfg, "alpha")`
    return ([(ENTRY, own, name)] if may_come else []), MISSING


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, MISSING)
    except Exception:  # of a __getattr__ of the user, who will meet it
        return MISSING


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code made, or whose attributes may be set


def target(owner: Any, name: str) -> Spot:
    """Where `owner.name = value` puts the value of a plain attribute."""
    own = getattr(owner, "__dict__", None)
    return (ENTRY, own, name) if isinstance(own, dict) else (ATTRIBUTE, owner, name)


def item(owner: Any, key: Any) -> tuple[list[Spot], Any]:
    """(where `owner[key]` lies, its value): of dicts, lists, tuples, lists of modules. Else no spots, and MISSING."""
    if isinstance(owner, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        owner, key = owner._modules, str(key)
    try:
        if isinstance(owner, dict):
            return ([] if key is MISSING else [(ENTRY, owner, key)]), dict.get(owner, key, MISSING)
        if isinstance(owner, (list, tuple, deque)) or (isinstance(owner, Mapping) and key in owner):
            return [(ITEM, owner, key)], owner[key]
    except Exception:  # a key that does not fit: the user's own code will say so
        pass
    return [], MISSING


def contents(owner: Any, depth: int = 0) -> list[tuple[Spot, str]]:
    """The spots that hold what a container, a small numpy array or a `functools.partial` is made of, each with the end
    of its name. Of a container with more than MOST_ITEMS, or MOST_IN_ALL with those within, only the length.

    depth: how many containers it lies in."""
    if isinstance(owner, np.ndarray):
        return [((COPY, owner, np.ndarray.tobytes), "")] if owner.nbytes <= MOST_BYTES else []
    if isinstance(owner, functools.partial):
        return [((ATTRIBUTE, owner, part), f".{part}") for part in ("func", "args", "keywords")]
    if isinstance(owner, nn.Module):
        parts = _Parts(owner)
        return [
            ((ENTRY, vars(owner), "training"), ".training"),
            ((COPY, owner, parts.training), "'s parts' training"),
            ((COPY, owner, parts.modules), "'s parts"),
        ]
    if not isinstance(owner, CONTAINERS):
        return []
    whole: list[tuple[Spot, str]] = [] if isinstance(owner, tuple) else [((COPY, owner, len), "'s length")]
    if len(owner) > MOST_ITEMS or (not depth and _in_all(owner) > MOST_IN_ALL):
        return whole
    if isinstance(owner, set):
        return [((COPY, owner, frozenset), "")]
    if isinstance(owner, dict):
        return [((COPY, owner, list), "'s keys"), *(((ENTRY, owner, key), f"[{key!r}]") for key in owner)]
    return [*whole, *(((ITEM, owner, i), f"[{i}]") for i in range(len(owner)))]


@dataclass(frozen=True)
class Has:
    """Whether a dict has a key: of a place of the kind COPY."""

    key: Any

    def __call__(self, owner: dict[Any, Any]) -> bool:
        return self.key in owner


@dataclass(frozen=True)
class Asked:
    """What a method of the standard library or of torch returns, or a computed attribute: of a place of the kind COPY.

    key: its argument, if it has one."""

    name: str
    key: Any = MISSING

    def __call__(self, owner: Any) -> Worth:
        found = getattr(owner, self.name)
        if callable(found):
            found = found() if self.key is MISSING else found(self.key)
        return Worth(MISSING if is_traced(found) else found)


@dataclass(frozen=True, eq=False, repr=False)
class Worth:
    """A value that is compared as `same` compares, number by number within a list."""

    value: Any

    def __eq__(self, other: object) -> bool:
        old, new = self.value, other.value if isinstance(other, Worth) else MISSING
        return same(tuple(old), tuple(new)) if isinstance(old, list) and isinstance(new, list) else same(old, new)

    def __repr__(self) -> str:
        return shown(self.value)


ENVIRON = type(os.environ)
_ASKED: dict[str, Callable[[Any], bool]] = {  # by name: of which owners it is read
    "get": lambda owner: isinstance(owner, contextvars.ContextVar),
    "is_set": lambda owner: isinstance(owner, threading.Event),
    "get_last_lr": lambda owner: isinstance(owner, torch.optim.lr_scheduler.LRScheduler),
    "value": lambda owner: type(owner).__module__ in ("ctypes", "multiprocessing.sharedctypes"),
}


def of_all(owner: Any, name: str) -> bool:
    """Whether an attribute is a method of a container, which may read all that it holds."""
    kinds = [kind for kind in CONTAINERS if isinstance(owner, kind)]
    return any(hasattr(kind, name) for kind in kinds) or (tuple in kinds and name.startswith("_"))


def _in_all(owner: Any, depth: int = 0) -> int:
    """How many items containers within containers have; more than MOST_IN_ALL are not counted on."""
    if not isinstance(owner, CONTAINERS) or depth == DEEP or len(owner) > MOST_ITEMS:
        return 0
    count = len(owner)
    for part in owner.values() if isinstance(owner, dict) else owner:
        if count > MOST_IN_ALL:
            break
        count += _in_all(part, depth + 1)
    return count


class _Parts:
    """The modules within one: their modes, and who holds whom. Immutable."""

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        self.flags = [vars(part) for part in parts]
        self.children = [part._modules for part in parts if part._modules]

    def training(self, module: nn.Module) -> list[bool]:
        """Whether each is in training."""
        return [*map(_TRAINING, self.flags)]

    def modules(self, module: nn.Module) -> list[list[nn.Module | None]]:
        """The modules that each holds."""
        return [*map(list, map(dict.values, self.children))]


_TRAINING = operator.itemgetter("training")
FIXED = (
    int, float, complex, str, bytes, bool, type(None), range, slice, np.generic,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip


def same(old: Any, new: Any) -> bool:
    """Whether a value is what it was: one object, or equal ones of one type that cannot change. A function that was
    defined again from the same code, with the same defaults and no closure, is the same."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, (float, complex)):
        return repr(old) == repr(new)  # 0.0 is not -0.0, and nan is nan
    if isinstance(old, (tuple, frozenset)):
        if isinstance(old, frozenset):
            return bool(old == new)
        return len(old) == len(new) and all(map(same, old, new))
    if isinstance(old, FIXED):
        return bool(old == new)
    if isinstance(old, types.FunctionType):
        return _same_function(old, new)
    if isinstance(old, types.MethodType):
        return old.__self__ is new.__self__ and same(old.__func__, new.__func__)
    return False


def _same_function(old: types.FunctionType, new: types.FunctionType) -> bool:
    alike = same_code(old.__code__, new.__code__) and not old.__closure__ and not new.__closure__
    defaults = same(old.__defaults__, new.__defaults__) and old.__kwdefaults__ == new.__kwdefaults__
    return alike and defaults and old.__globals__ is new.__globals__


def same_code(old: types.CodeType, new: types.CodeType) -> bool:
    """Whether two functions were made from the same text, on whatever lines."""
    return (
        old.replace(co_filename="", co_firstlineno=1, co_linetable=b"", co_consts=())
        == new.replace(co_filename="", co_firstlineno=1, co_linetable=b"", co_consts=())
        and len(old.co_consts) == len(new.co_consts)
        and all(map(_same_constant, old.co_consts, new.co_consts))
    )


def _same_constant(old: Any, new: Any) -> bool:
    codes = isinstance(old, types.CodeType) and isinstance(new, types.CodeType)
    return same_code(old, new) if codes else same(old, new)


def is_fixed(value: Any) -> bool:
    """Whether a value cannot change, and may be a key."""
    return isinstance(value, (*FIXED, enum.Enum)) or (isinstance(value, tuple) and all(map(is_fixed, value)))


def is_number(value: Any) -> bool:
    """Whether a value may count: an int or a float, and no flag."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_traced(value: Any) -> bool:
    """Whether a value is an input's, or computed from one: a tensor of the trace."""
    return isinstance(value, torch.Tensor) and is_fake(value)


def shown(value: Any) -> str:
    """A value as messages show it."""
    if isinstance(value, torch.Tensor):
        return describe(value)
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return defined_at(value)
    if isinstance(value, nn.Module):
        return type(value).__name__
    return reprlib.repr(value)
