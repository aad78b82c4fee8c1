"""structure: the containers of a pytree as JSON, so that a checkpoint gives back its tree without any code.

A leaf is "*" and None is null. Every other node has one key: {"dict": [[key, node], ...]}, {"list": [node, ...]},
{"tuple": [node, ...]}, {"other": [type's name, [[field, node], ...]]}. Keys are text or integers. A named tuple or any
other container is "other". It comes back as a dict by field, since its class is code; the paths of its leaves are the
same. Leaves are counted in the order in which they are met. A dict has its keys in the order in which they were put in,
by which a loss may loop over it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import optree

from fzero import tree
from fzero.checkpoint.strict import MAX_DEPTH, MAX_INT, Invalid

LEAF = "*"


def describe(treedef: optree.PyTreeSpec, depth: int = 0) -> tuple[Any, list[int]]:
    """Returns (the structure of a flattened pytree, as JSON; its leaves in the order in which they are met there, by
    their numbers in `tree.flatten`, which sorts a dict by key). Raises Invalid if it is nested too deep."""
    if depth > MAX_DEPTH:
        raise Invalid(f"the state's pytree is nested deeper than {MAX_DEPTH}")
    kind = treedef.type
    if kind is None:
        return LEAF, [0]
    if kind is type(None):
        return None, []
    children, first = [], 0
    for child in treedef.children():
        node, met = describe(child, depth + 1)
        children.append((node, [first + number for number in met]))
        first += child.num_leaves
    entries = list(getattr(kind, "_fields", None) or treedef.entries())
    if issubclass(kind, dict):
        by_key = dict(zip(entries, children, strict=True))
        entries = tree.keys(treedef)
        children = [by_key[key] for key in entries]
    nodes = [node for node, _ in children]
    return _container(kind, entries, nodes), [number for _, met in children for number in met]


def _container(kind: type, entries: Sequence[Any], nodes: Sequence[Any]) -> Any:
    """The node of a container that has these entries."""
    if kind in (list, deque):
        return {"list": nodes}
    if kind is tuple:
        return {"tuple": nodes}
    if issubclass(kind, dict) and all(type(e) is str or (type(e) is int and abs(e) < MAX_INT) for e in entries):
        return {"dict": [[entry, node] for entry, node in zip(entries, nodes, strict=True)]}
    return {"other": [kind.__name__, [[str(e), node] for e, node in zip(entries, nodes, strict=True)]]}


def build(node: Any, values: Sequence[Any]) -> Any:
    """Returns the pytree of this structure with these leaves."""
    return _build(node, iter(values))


def _build(node: Any, values: Iterator[Any]) -> Any:
    if node == LEAF:
        return next(values)
    if node is None:
        return None
    ((kind, inner),) = node.items()
    if kind == "list":
        return [_build(child, values) for child in inner]
    if kind == "tuple":
        return tuple(_build(child, values) for child in inner)
    return {key: _build(child, values) for key, child in (inner[1] if kind == "other" else inner)}


def count(node: Any, depth: int = 0) -> int:
    """Returns the number of leaves of a structure that was read, and checks every node. Raises Invalid."""
    if depth > MAX_DEPTH:
        raise Invalid(f"it.structure is nested deeper than {MAX_DEPTH}")
    if node is None:
        return 0
    if type(node) is str and node == LEAF:
        return 1
    if type(node) is not dict or len(node) != 1:
        raise Invalid(f"it.structure holds {str(node)[:80]!r}: needed '*', null or an object with one key")
    ((kind, inner),) = node.items()
    if kind == "other":
        if type(inner) is not list or len(inner) != 2 or type(inner[0]) is not str:
            raise Invalid("it.structure: 'other' needs a type's name and a list of [field, node]")
        inner = inner[1]
    if kind not in ("dict", "list", "tuple", "other") or type(inner) is not list:
        raise Invalid(f"it.structure holds {kind[:80]!r}: needed a list under dict, list, tuple or other")
    if kind in ("list", "tuple"):
        return sum(count(child, depth + 1) for child in inner)
    keys = set()
    for pair in inner:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) not in ((str, int) if kind == "dict" else (str,)):
            raise Invalid(f"it.structure: {kind!r} needs a list of [key, node]")
        keys.add(pair[0])
    if len(keys) != len(inner):
        raise Invalid(f"it.structure: a {kind!r} has a key twice")
    return sum(count(child, depth + 1) for _, child in inner)
