"""batch_key: what of a batch decides its program, and a Python value in it that changes.

The phase of the run decides it too: it is a function of the step number, known on the host (`fzero.phases`).

A tensor counts by shape and dtype, another leaf by its value, a dict by the order of its keys too. A number that
changes would be a program a step. So from its first change on it is a 0-d tensor of the batch: one program serves all
its values. `fzero.static` is exempt, and so is a bool, which has two values. A string cannot be a tensor: one that
changes and is not marked is refused.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import optree
import torch

from fzero import tree
from fzero.capture import ambient
from fzero.capture.leaves import check_leaf
from fzero.capture.provenance import describe
from fzero.capture.static import Static
from fzero.errors import TreeError, leaf_name
from fzero.state.state import ShardedTensor

NUMBERS, STRINGS = (int, float), (str, bytes)
Key = tuple[Any, ...]


class Called:
    """A function as part of a key, equal to itself alone, and a method to that of the same object.

    Its own == may be that of an object that does not compare all that it computes with, or come without a hash.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.parts = (fn.__self__, fn.__func__) if isinstance(fn, types.MethodType) else (fn,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Called) and self._ids() == other._ids()

    def __hash__(self) -> int:
        return hash(self._ids())

    def _ids(self) -> tuple[int, ...]:
        return tuple(map(id, self.parts))


class Plain(NamedTuple):
    """A Python value of a builtin type. As text 0.0 is not -0.0, 1 is not True, and nan is nan."""

    kind: type
    text: str


def key_of(batch: Any, device: torch.device, phase: str = "") -> Key:
    """What the program of a batch depends on, in a phase of the run ("" without phases). Raises TreeError for a leaf
    whose value could change unseen."""
    paths, leaves, treedef = tree.flatten(batch)
    shown = [(path, _entry(leaf_name("batch", path), leaf)) for path, leaf in zip(paths, leaves, strict=True)]
    structure = str(treedef), *_orders(treedef)
    return (tuple(shown), structure, *ambient.settings(device), f"phase {phase!r}")


def check_batch(batch: Any, device: torch.device | None = None) -> None:
    """Raises TreeError for a leaf of the batch with a gradient, that no buffer can hold, or on another device than this
    one."""
    for path, leaf in zip(*tree.flatten(batch)[:2], strict=True):
        name = leaf_name("batch", path)
        if not isinstance(leaf, torch.Tensor):
            continue
        if device is not None and leaf.device != device:
            raise TreeError(f"{name} is on {leaf.device}, the state on {device}. Move it there")
        if leaf.requires_grad:
            raise TreeError(f"{name} requires grad, which no step would use. detach() it")
        check_leaf(name, leaf)


def has_plain(batch: Any) -> bool:
    """Whether a leaf of the batch is a number or a string."""
    return any(_kind(leaf) in (*NUMBERS, *STRINGS) for leaf in tree.flatten(batch)[1])


def changed(key: Key, keys: Collection[Key]) -> Iterator[tuple[str, Plain, Plain]]:
    """(path, value before, value now) of the numbers and strings that alone tell a new key from one of `keys`."""
    if key in keys:
        return
    rest, now = _rest(key)
    for other in keys:
        others, before = _rest(other)
        if others == rest:
            yield from ((path, before[path], value) for path, value in now.items() if before[path] != value)
            return


def check_strings(changes: Collection[tuple[str, Plain, Plain]]) -> None:
    """Raises TreeError for a string that changes."""
    for path, before, now in changes:
        if now.kind in STRINGS or before.kind in STRINGS:
            name = leaf_name("batch", path)
            raise TreeError(
                f"{name} was {before.text}, is {now.text}: a string decides the program, so one that changes would be "
                "a program a step. Where it has few values mark it, as in batch['task'] = fzero.static(task), for a "
                f"program of each; else leave {name} out of the batch"
            )


def with_tensors(batch: Any, paths: Collection[str], device: torch.device) -> Any:
    """The batch with the numbers at these paths as tensors of no dims: an int as int64, a float in torch's default
    dtype."""

    def tensor(path: str, leaf: Any) -> Any:
        kind = _kind(leaf)
        if path not in paths or kind not in NUMBERS:
            return leaf
        if kind is int and not -(1 << 63) <= leaf < 1 << 63:
            raise TreeError(f"{leaf_name('batch', path)} is {leaf}: needed an int of 64 bits")
        dtype = torch.int64 if kind is int else torch.get_default_dtype()
        return torch.full((), kind(leaf), dtype=dtype, device=device)

    return tree.map_with_path(tensor, batch)


def difference(old: Key, new: Key) -> str:
    """The difference of two batch keys, in words."""
    before, after = ({leaf_name("batch", p): _words(v) for p, v in key[0]} for key in (old, new))
    words = [f"{p} was {before[p]}, is {v}" for p, v in after.items() if p in before and before[p] != v]
    words += [f"{p} is new" for p in after if p not in before]
    words += [f"{p} is gone" for p in before if p not in after]
    words += [f"{was} became {now}" for was, now in zip(old[2:], new[2:], strict=True) if was != now]
    rest = "the keys are in another order" if old[1][0] == new[1][0] else "the batch has another structure"
    return "; ".join(words) or rest


def _orders(treedef: optree.PyTreeSpec) -> Iterator[str]:
    """The keys of each dict of a pytree in their order, in which a function may loop over it."""
    if treedef.type is not None and issubclass(treedef.type, dict):
        yield str(tree.keys(treedef))
    for child in treedef.children():
        yield from _orders(child)


def _rest(key: Key) -> tuple[Key, dict[str, Plain]]:
    """A key without its numbers and strings, and these by path."""
    values = {path: v for path, v in key[0] if isinstance(v, Plain) and v.kind in (*NUMBERS, *STRINGS)}
    others = tuple((path, None if path in values else v) for path, v in key[0])
    return (others, *key[1:]), values


def _kind(leaf: Any) -> Any:
    """The builtin type of a number or string, also of numpy's; None for another leaf."""
    if isinstance(leaf, (np.integer, np.floating)):
        return int if isinstance(leaf, np.integer) else float
    return type(leaf) if type(leaf) in (bool, complex, *NUMBERS, *STRINGS) else None


def _words(entry: Any) -> str:
    if isinstance(entry, Plain):
        return entry.text
    return entry if isinstance(entry, str) else describe(entry[1])


def _as_tensors(leaf: Any) -> str:
    """What makes tensors of a leaf that is none: the end of an error."""
    if isinstance(leaf, np.ndarray):
        return ". Give torch.from_numpy(x)"
    if is_dataclass(leaf):
        return ". Give vars(x), a dict of its fields, or make the class a NamedTuple, whose fields are leaves too"
    return ""


def _entry(name: str, leaf: Any) -> Any:
    """The entry in a program's key for a leaf of the batch. Raises TreeError if its value could change."""
    if isinstance(leaf, (torch.Tensor, Static)):
        return describe(leaf)
    if (kind := _kind(leaf)) is not None:
        return Plain(kind, describe(leaf))
    if isinstance(leaf, ShardedTensor):
        raise TreeError(f"{name} is ShardedTensor {leaf.path!r}, a leaf of a state: give its whole tensor, .full()")
    try:
        hash(leaf)
    except TypeError:
        raise TreeError(
            f"{name} is {type(leaf).__name__}: needed a tensor or a hashable value{_as_tensors(leaf)}"
        ) from None
    fixed = (type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.layout, torch.memory_format)
    hashes: Any = type(leaf).__hash__
    by_identity = hashes is object.__hash__ and not isinstance(leaf, fixed)
    if by_identity or any(isinstance(value, torch.Tensor) for value in getattr(leaf, "__dict__", {}).values()):
        raise TreeError(
            f"{name} is a {type(leaf).__name__}, whose contents would stay what they were at the first step. Pass a "
            "dict, a tuple or a named tuple of tensors, or register the class with "
            "optree.register_pytree_node(..., namespace='fzero')"
        )
    return (type(leaf), leaf, _exact(name, leaf))


def _exact(name: str, value: Any) -> Any:
    """What is equal for values alone that no function tells apart: 1 is equal to True and 0.0 to -0.0, also in a
    dataclass, which may leave fields out of its comparison too. Raises TreeError for a value without a hash."""
    if (kind := _kind(value)) is not None:
        return Plain(kind, describe(value))
    if isinstance(value, (tuple, frozenset)):
        held = tuple if isinstance(value, tuple) else frozenset
        return (type(value), held(_exact(name, x) for x in value))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_exact(name, getattr(value, field.name)) for field in fields(value)))
    try:
        hash(value)
    except TypeError:
        raise TreeError(
            f"{name} holds a {type(value).__name__}, which could change unseen: needed hashable values"
        ) from None
    return (type(value), value)
