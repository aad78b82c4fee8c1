"""worth: which values are the same: one object, or equal ones of a type that cannot change; and how they are shown."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import reprlib
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fzero._torch_compat import is_fake
from fzero.capture.provenance import defined_at, describe, short_name


class _Missing(enum.Enum):
    MISSING = "nothing"

    def __repr__(self) -> str:
        return "not there"


MISSING = _Missing.MISSING


FIXED = (
    int, float, complex, str, bytes, bool, type(None), range, slice, np.generic,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction, pathlib.PurePath, re.Pattern,
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
        a, b = tuple(tuple.__iter__(old)), tuple(tuple.__iter__(new))  # a class may refuse its `len`
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(old, FIXED):
        return bool(old == new)
    if isinstance(old, types.FunctionType):
        return _same_function(old, new)
    if isinstance(old, types.CodeType):
        return same_code(old, new)
    if isinstance(old, types.MethodType):
        return old.__self__ is new.__self__ and same(old.__func__, new.__func__)
    return isinstance(old, DESCRIPTORS) and same(functions_of(old), functions_of(new))


WRAPPERS = (types.FunctionType, type(functools.lru_cache(int)))  # what a decorator may put in a function's place
DESCRIPTORS = (property, functools.cached_property, classmethod, staticmethod)


def functions_of(raw: Any) -> tuple[Any, ...]:
    """What a class's attribute runs where it is asked for, or called."""
    if isinstance(raw, property):
        return raw.fget, raw.fset, raw.fdel
    if isinstance(raw, (classmethod, staticmethod)):
        return (raw.__func__,)
    return (raw.func,) if isinstance(raw, functools.cached_property) else (raw,)


def within(fn: Any) -> list[Any]:
    """A function, and those within it that decorators have wrapped (`functools.wraps`)."""
    found: list[Any] = []
    while fn is not None and not any(fn is one for one in found):
        found.append(fn)
        fn = vars(fn).get("__wrapped__") if isinstance(fn, WRAPPERS) else None
    return found


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


_DEPTH = 5  # of the parts of a value in which a message looks for what differs


def is_traced(value: Any) -> bool:
    """Whether a value is an input's, or computed from one: a tensor of the trace."""
    return isinstance(value, torch.Tensor) and is_fake(value)


def shown(value: Any) -> str:
    """A value as messages show it."""
    if isinstance(value, torch.Tensor):
        return describe(value)
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return defined_at(value)
    if isinstance(value, types.CodeType):
        name = value.co_qualname.rpartition("<locals>.")[2]
        return f"{name} ({short_name(value.co_filename)}:{value.co_firstlineno})"
    if isinstance(value, nn.Module):
        return type(value).__name__
    return " ".join(reprlib.repr(value).split())  # of some configurations it has lines


def apart(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """(name, old, new) of the part in which two values of a name differ, where their texts are cut short.

    >>> apart("sizes", [[1] * 20, [2] * 20], [[1] * 20, [2] * 19 + [3]])
    ('sizes[1][19]', 2, 3)
    """
    was, now = shown(old), shown(new)
    return (_difference(name, old, new, _DEPTH) if was == now or "..." in was + now else None) or (name, old, new)


def _difference(name: str, old: Any, new: Any, depth: int) -> tuple[str, Any, Any] | None:
    if same(old, new) or depth == 0:
        return None
    if type(old) is not type(new):
        return name, old, new
    if isinstance(old, dict):
        parts = [(f"{name}[{key!r}]", old[key], new[key]) for key in old if key in new]
    elif isinstance(old, (list, tuple)):
        parts = [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(old, new, strict=False))]
    elif hasattr(old, "__dict__"):
        parts = [(f"{name}.{key}", vars(old)[key], vars(new)[key]) for key in vars(old) if key in vars(new)]
    else:  # of equal arrays, say, it is not known that they are equal
        return (name, old, new) if is_fixed(old) or shown(old) != shown(new) else None
    return next(filter(None, (_difference(*part, depth - 1) for part in parts)), None)


@dataclass(frozen=True, eq=False, repr=False)
class Worth:
    """A value that is compared as `same` compares, number by number within a list."""

    value: Any

    def __eq__(self, other: object) -> bool:
        old, new = self.value, other.value if isinstance(other, Worth) else MISSING
        return same(tuple(old), tuple(new)) if isinstance(old, list) and isinstance(new, list) else same(old, new)

    def __repr__(self) -> str:
        return shown(self.value)
