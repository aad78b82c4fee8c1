"""read_places: where a value lies that a function reads: an entry of a dict, an item, an attribute; and whether it is
still the same.

A `ReadPlace` is read again without running code of the user: a property is no place. Values are the same if they are
one object, or equal values of one type that cannot change (`same`).
"""

from __future__ import annotations

import array
import contextvars
import functools
import gc
import io
import operator
import os
import threading
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fzero.capture.reads.frames import LIBRARY, TORCH, kind_of
from fzero.capture.reads.module_parts import ModuleParts
from fzero.capture.reads.worth import DESCRIPTORS, MISSING, WRAPPERS, Worth, is_fixed, is_traced, same

ENTRY, ITEM, ATTRIBUTE, COPY = "entry", "item", "attribute", "copy"
READ: dict[str, Callable[[Any, Any], Any]] = {
    ENTRY: lambda holder, key: dict.get(holder, key, MISSING),
    ITEM: operator.getitem,
    ATTRIBUTE: lambda holder, key: getattr(holder, key, MISSING),
    COPY: lambda holder, copy: copy(holder),  # the key makes a value that can be compared: a length, bytes, members
}
Spot = tuple[str, Any, Any]  # (kind, holder, key)

CONTAINERS = (dict, list, tuple, set, deque)
BUFFERS = (np.ndarray, bytearray, memoryview, array.array)
MOST_ITEMS = 512  # of a container whose contents are noted one by one
MOST_IN_ALL = 2048  # items of it and of the containers within it
DEEP = 4  # containers within containers
MOST_BYTES = 4096  # of a numpy array whose contents are noted
SAMPLED = 1 << 24  # bytes of one of which 256 elements are
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")


@dataclass(eq=False)
class ReadPlace:
    """A place that was read, and its value then. `parent`: the place that its holder came from.

    name: as the user's code has it. where: the function that read it, and the line. behind: of an entry that is not
    there, the value that the class has instead. whole: the value was given to what may read all of it. filled: by the
    trace, as a `cached_property` is: it may be emptied.
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
    filled: bool = False

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
        return [(ATTRIBUTE, owner, name)] if name in ("requires_grad", "dtype") else [], MISSING
    if name == "__class__":
        return [], type(owner)
    if name == "__dict__":
        return [], vars(owner) if hasattr(owner, "__dict__") else MISSING
    if _ASKED.get(name, lambda _: False)(owner):
        return [(COPY, owner, Asked(name))], MISSING
    names = getattr(owner, "_fields", ()) if isinstance(owner, tuple) else ()  # of a named tuple
    if name in names:
        return [(ITEM, owner, names.index(name))], getattr(owner, name)
    if isinstance(owner, type):
        value = _get(owner, name)
        stable = value is not MISSING and value is _get(owner, name) and owner.__flags__ & _HEAP_TYPE
        return (
            ([(ATTRIBUTE, owner, name)], value)
            if stable
            else (_of_descriptor(owner, name, of_class(owner, name)), MISSING)
        )
    kind, own = type(owner), getattr(owner, "__dict__", None)
    own = own if isinstance(own, dict) and own is getattr(owner, "__dict__", None) else None  # no copy of what it holds
    raw = of_class(kind, name)
    if isinstance(raw, types.MemberDescriptorType):  # of __slots__
        return [(ATTRIBUTE, owner, name)], _get(owner, name)
    if raw is not MISSING and hasattr(type(raw), "__set__"):
        return _of_descriptor(kind, name, raw), MISSING
    if own is not None and name in own:  # an assignment may give the object another dict, as pydantic's do
        fixed = isinstance(owner, (types.ModuleType, nn.Module))
        return [*([] if fixed else [(ATTRIBUTE, owner, "__dict__")]), (ENTRY, own, name)], own[name]
    if raw is not MISSING:
        value = raw.__func__ if isinstance(raw, staticmethod) else raw
        computed = hasattr(type(raw), "__get__") and not isinstance(raw, (*WRAPPERS, staticmethod))
        if computed or not kind.__flags__ & _HEAP_TYPE:
            filled = [(ENTRY, own, name)] if own is not None and isinstance(raw, functools.cached_property) else []
            return [*filled, *_of_descriptor(kind, name, raw)], MISSING
        return [*([] if own is None else [(ENTRY, own, name)]), (ATTRIBUTE, kind, name)], value
    for part in _MODULE_PARTS if isinstance(owner, nn.Module) else ():
        if name in vars(owner).get(part, ()):
            return [(ENTRY, vars(owner)[part], name)], vars(owner)[part][name]
    if hasattr(kind, "__getattr__") and not isinstance(owner, types.ModuleType):
        value = _get(owner, name)
        return ([(ATTRIBUTE, owner, name)], value) if same(value, _get(owner, name)) else ([], value)
    may_come = own is not None and not isinstance(owner, types.ModuleType)  # `hasattr(cfg, "alpha")`
    return ([(ENTRY, own, name)] if may_come else []), MISSING


def of_class(kind: type, name: str) -> Any:
    """What a class, or one that it is derived from, has by a name; MISSING if there is none."""
    return next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), MISSING)


def computed_elsewhere(owner: Any, name: str) -> bool:
    """Whether code that is not the user's makes an attribute of what the object holds, which no place tells: the `day`
    of a date, a method of C."""
    raw = of_class(type(owner), name)
    plain = raw is MISSING or isinstance(raw, (types.FunctionType, types.MemberDescriptorType, *DESCRIPTORS))
    return not plain and hasattr(type(raw), "__get__") and not isinstance(owner, _TOLD)


_TOLD = (type, types.ModuleType, io.IOBase, *CONTAINERS)  # whose methods and parts others tell


@dataclass(frozen=True)
class OfClass:
    """What a class has by a name: of a place of the kind COPY."""

    name: str

    def __call__(self, kind: type) -> Worth:
        return Worth(of_class(kind, self.name))


def _of_descriptor(kind: type, name: str, raw: Any) -> list[Spot]:
    """Where a property or a class method lies, which another may take the place of."""
    if not isinstance(raw, DESCRIPTORS) or not kind.__flags__ & _HEAP_TYPE:
        return []
    stays = _get(kind, name) is raw  # as a property does, asked of the class
    return [(ATTRIBUTE, kind, name) if stays else (COPY, kind, OfClass(name))]


def _get(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, MISSING)
    except Exception:  # of a __getattr__ of the user, who will meet it
        return MISSING


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code made, or whose attributes may be set


def target(owner: Any, name: str) -> Spot:
    """Where `owner.name = value` puts the value of a plain attribute, or of a part that a module has."""
    for part in _MODULE_PARTS if isinstance(owner, nn.Module) else ():
        if name in vars(owner).get(part, ()):
            return ENTRY, vars(owner)[part], name
    own = getattr(owner, "__dict__", None)
    return (ENTRY, own, name) if isinstance(own, dict) else (ATTRIBUTE, owner, name)


def item(owner: Any, key: Any) -> tuple[list[Spot], Any]:
    """(where `owner[key]` lies, its value): of dicts, lists, tuples, lists of modules, objects of installed libraries.
    Else no spots, and MISSING."""
    if isinstance(owner, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        owner, key = owner._modules, str(key)
    try:
        if isinstance(owner, dict):
            return ([] if key is MISSING else [(ENTRY, owner, key)]), dict.get(owner, key, MISSING)
        if isinstance(owner, (list, tuple, deque)) or (isinstance(owner, Mapping) and key in owner):
            return [(ITEM, owner, key)], owner[key]
        if is_fixed(key) and by_library(owner, "__getitem__") and same(value := owner[key], owner[key]):
            return [(ITEM, owner, key)], value
    except IndexError:  # which may come later
        return [(COPY, owner, len)], MISSING
    except Exception:  # a key that does not fit: the user's own code will say so
        pass
    return [], MISSING


def got(owner: Any, key: Any) -> tuple[list[Spot], Any]:
    """The same of `owner.get(key)` of such an object."""
    asked = Asked("get", key)
    try:
        if is_fixed(key) and by_library(owner, "get") and (value := asked(owner)) == asked(owner):
            return [(COPY, owner, asked)], value.value
    except Exception:  # the user's own code will say so
        pass
    return [], MISSING


def by_library(owner: Any, method: str) -> bool:
    """Whether a method of an object, as a configuration's, is written in an installed library that is not torch."""
    fn = of_class(type(owner), method)
    name = fn.__code__.co_filename if isinstance(fn, types.FunctionType) else ""
    return kind_of(name) == LIBRARY and not name.startswith(TORCH)


def contents(owner: Any, depth: int = 0) -> list[tuple[Spot, str]]:
    """The spots that hold what a container, a numpy array or a `functools.partial` is made of, each with the end of its
    name. Of a container with more than MOST_ITEMS, or MOST_IN_ALL with those within, only the length; of an array over
    MOST_BYTES some elements.

    depth: how many containers it lies in."""
    if isinstance(owner, BUFFERS):
        if not isinstance(owner, np.ndarray):
            return [((COPY, owner, bytes), "")] if memoryview(owner).nbytes <= MOST_BYTES else []
        if owner.nbytes <= MOST_BYTES:
            return [((COPY, owner, Elements.of), "")]
        return [((COPY, owner, _sample), "")] if owner.nbytes <= SAMPLED and not isinstance(owner, np.memmap) else []
    if isinstance(owner, functools.partial):
        return [((ATTRIBUTE, owner, part), f".{part}") for part in ("func", "args", "keywords")]
    if isinstance(owner, nn.Module):
        if "_modules" not in vars(owner):  # its own __init__ gives it away first, as in `super(Net, self).__init__()`
            return []
        parts = ModuleParts(owner)
        return [
            ((ENTRY, vars(owner), "training"), ".training"),
            ((COPY, owner, parts.settings), "'s parts' settings"),
            ((COPY, owner, parts.modules), "'s parts"),
        ]
    if not isinstance(owner, CONTAINERS):
        return _of_library(owner)
    whole: list[tuple[Spot, str]] = [] if isinstance(owner, tuple) else [((COPY, owner, size_of), "'s length")]
    if size_of(owner) > MOST_ITEMS or (not depth and _in_all(owner) > MOST_IN_ALL):
        return whole
    if isinstance(owner, set):
        return [((COPY, owner, frozenset), "")]
    if isinstance(owner, dict):
        return [((COPY, owner, list), "'s keys"), *(((ENTRY, owner, key), f"[{key!r}]") for key in owner)]
    return [*whole, *(((ITEM, owner, i), f"[{i}]") for i in range(size_of(owner)))]


def size_of(owner: Any) -> int:
    """How many items a container has. A class that inherits from one may refuse its `len`, or count something else."""
    kind: Any = next(kind for kind in CONTAINERS if isinstance(owner, kind))
    return int(kind.__len__(owner))


def maps_of_library(owner: Any) -> bool:
    """Whether an object is a mapping of an installed library, as its configuration."""
    return not isinstance(owner, nn.Module) and by_library(owner, "keys") and by_library(owner, "__getitem__")


def lists_of_library(owner: Any) -> bool:
    """Whether an object is a sequence of an installed library, as its configuration."""
    return isinstance(owner, Sequence) and by_library(owner, "__getitem__")


def has_length(owner: Any) -> bool:
    """Whether the truth of a container is that of its length."""
    return isinstance(owner, CONTAINERS) or maps_of_library(owner) or lists_of_library(owner)


def _of_library(owner: Any) -> list[tuple[Spot, str]]:
    """The same of a configuration of an installed library, which is a mapping or a sequence."""
    try:
        if maps_of_library(owner):
            keys = [*owner.keys()]
            whole: list[tuple[Spot, str]] = [((COPY, owner, list), "'s keys")] if [*owner] == keys else []
        elif lists_of_library(owner):
            keys, whole = [*range(len(owner))], [((COPY, owner, len), "'s length")]
        else:
            return []
    except Exception:  # the user's own code will say so
        return []
    held = [] if len(keys) > MOST_ITEMS else keys
    return [*whole, *((spot, f"[{key!r}]") for key in held for spot in item(owner, key)[0])]


class Elements(NamedTuple):
    """What a numpy array holds, as a value that cannot change."""

    data: bytes
    dtype: str

    def __repr__(self) -> str:
        return "objects" if self.dtype == "|O" else str(np.frombuffer(self.data, self.dtype))

    @classmethod
    def of(cls, values: np.ndarray[Any, Any]) -> Elements:
        """All elements of an array."""
        return cls(values.tobytes(), values.dtype.str)


def _sample(values: np.ndarray[Any, Any]) -> Elements:
    """256 elements from the first to the last: some microseconds at any size."""
    return Elements.of(values.flat[_spread(values.size)])


@functools.lru_cache(maxsize=64)
def _spread(size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.linspace(0, size - 1, 256).astype(np.int64)


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


ENVIRON = type(os.environ)
_ASKED: dict[str, Callable[[Any], bool]] = {  # by name: of which owners it is read
    "get": lambda owner: isinstance(owner, contextvars.ContextVar),
    "is_set": lambda owner: isinstance(owner, threading.Event),
    "get_last_lr": lambda owner: isinstance(owner, torch.optim.lr_scheduler.LRScheduler),
    "value": lambda owner: type(owner).__module__ in ("ctypes", "multiprocessing.sharedctypes"),
}


def of_all(owner: Any, name: str) -> bool:
    """Whether an attribute is a method of a container, which may read all that it holds."""
    if not isinstance(owner, (*CONTAINERS, *_WRAPPERS)):
        return name in ("keys", "values", "items") and maps_of_library(owner)
    kinds = [kind for kind in type(owner).__mro__ if name in vars(kind)]
    own = bool(kinds) and kinds[0].__module__ in _OF_CONTAINERS and name != "__dict__"
    return own or (isinstance(owner, tuple) and name.startswith("_"))


_WRAPPERS = (UserDict, UserList, ChainMap, types.MappingProxyType)
_OF_CONTAINERS = ("builtins", "collections", "collections.abc", "torch._C")  # and torch.Size


def wrapped(owner: Any) -> Any:
    """The container that one of `_WRAPPERS` shows, or whose method it is (`get = table.get`); another object as it
    is."""
    if isinstance(owner, types.BuiltinMethodType) and isinstance(owner.__self__, (*CONTAINERS, *_WRAPPERS)):
        owner = owner.__self__
    if isinstance(owner, types.MappingProxyType):
        return gc.get_referents(owner)[0]
    if isinstance(owner, (UserDict, UserList)):
        return vars(owner).get("data", owner)
    return owner.maps if isinstance(owner, ChainMap) else owner


def _in_all(owner: Any, depth: int = 0) -> int:
    """How many items containers within containers have; more than MOST_IN_ALL are not counted on."""
    if not isinstance(owner, CONTAINERS) or depth == DEEP or size_of(owner) > MOST_ITEMS:
        return 0
    count = size_of(owner)
    for part in owner.values() if isinstance(owner, dict) else owner:
        if count > MOST_IN_ALL:
            break
        count += _in_all(part, depth + 1)
    return count
