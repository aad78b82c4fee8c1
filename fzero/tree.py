"""Pytrees: the one place that says how fzero names a leaf.

A leaf is named by the keys on the way to it, joined with `/`: `params/blocks/0/attn/w`. Dict keys, sequence indices and
the fields of named tuples and dataclasses all appear by name. A dotted key, as in `module.named_parameters()`, stays
one key here; `parts` cuts it where layers are looked for and where a pattern is matched.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import optree

NAMESPACE = "fzero"


def flatten(tree: Any) -> tuple[list[str], list[Any], optree.PyTreeSpec]:
    """The leaf paths, the leaves and the structure of a pytree. `None` is an empty subtree, as in JAX."""
    accessors, leaves, treedef = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)
    return ["/".join(_entry_name(entry) for entry in accessor) for accessor in accessors], leaves, treedef


def leaves(tree: Any) -> list[Any]:
    """The leaves of a pytree, in `flatten`'s order, without the paths, which take longest.

    >>> leaves({"b": 1, "a": [2, None]})
    [2, 1]
    """
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def plain(tree: Any) -> Any:
    """The pytree with a dict for every Mapping that is no node of it by itself, as a tokenizer's BatchEncoding.

    >>> from types import MappingProxyType
    >>> plain([MappingProxyType({"x": MappingProxyType({"y": 1})})])
    [{'x': {'y': 1}}]
    """
    return map(lambda leaf: plain(dict(leaf)) if isinstance(leaf, Mapping) else leaf, tree)


def unflatten(treedef: optree.PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """The pytree of this structure with these leaves, in `flatten`'s order."""
    return optree.tree_unflatten(treedef, leaves)


def keys(treedef: optree.PyTreeSpec) -> list[Any]:
    """The keys of a dict in the order in which they were put in, by which a loop meets them. `flatten` sorts them.

    >>> keys(flatten({"b": 1, "a": 2})[2])
    ['b', 'a']
    """
    return list(unflatten(treedef, range(treedef.num_leaves)))


def map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`fn` on every leaf; the further trees must have the structure of the first.

    >>> map(lambda x, y: x + y, {"a": 1, "b": [2]}, {"a": 10, "b": [20]})
    {'a': 11, 'b': [22]}
    """
    return optree.tree_map(fn, tree, *rest, namespace=NAMESPACE)


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`fn(path, leaf, *others)` on every leaf.

    >>> map_with_path(lambda path, x: f"{path}={x}", {"a": 1, "b": [2]})
    {'a': 'a=1', 'b': ['b/0=2']}
    """
    paths, leaves, treedef = flatten(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    return unflatten(treedef, [fn(path, *args) for path, *args in zip(paths, leaves, *others, strict=True)])


def partition(tree: Any, wanted: Iterable[str] | Callable[[str, Any], bool]) -> tuple[Any, Any]:
    """Returns (the wanted leaves, the others). Each has the tree's structure, with None for the leaves of the other.

    `wanted` is path rules, or a function `(path, leaf) -> bool`.

    >>> partition({"a": 1, "b": {"lora": 2}}, ["**/lora"])
    ({'a': None, 'b': {'lora': 2}}, {'a': 1, 'b': {'lora': None}})
    """
    paths, leaves, treedef = flatten(tree)
    if callable(wanted):
        chosen = [bool(wanted(path, leaf)) for path, leaf in zip(paths, leaves, strict=True)]
    else:
        rules = list(wanted)
        chosen = [any(matches(rule, path) for rule in rules) for path in paths]
    picked = unflatten(treedef, [x if c else None for x, c in zip(leaves, chosen, strict=True)])
    return picked, unflatten(treedef, [None if c else x for x, c in zip(leaves, chosen, strict=True)])


def merge(tree: Any, rest: Any) -> Any:
    """Joins the two trees that `partition` returned.

    >>> merge(*partition({"a": 1, "b": 2}, ["a"]))
    {'a': 1, 'b': 2}
    """
    if rest is None:
        return tree
    return optree.tree_map(lambda x, y: y if x is None else x, tree, rest, none_is_leaf=True, namespace=NAMESPACE)


def parts(path: str) -> tuple[str, ...]:
    """The components of a path, cut at `/` and at the dots of dotted names.

    >>> parts("params/h.0.attn.weight")
    ('params', 'h', '0', 'attn', 'weight')
    """
    return tuple(part for part in re.split(r"[/.]", path) if part)


def matches(pattern: str, path: str) -> bool:
    """Whether a path rule matches: `*` stands for one component or a part of it, `**` for any number of components,
    `[qkv]` for one of these characters.

    A final `/**` covers the leaf of that name too: `params/**` matches `params`. A path matches itself.

    >>> matches("blocks/**", "blocks/0/attn/w"), matches("**/bias", "blocks/0/bias"), matches("*/w", "a/b/w")
    (True, True, False)
    >>> matches("*/w[qkv]", "0/wq"), matches("*/w[qkv]", "0/wo")
    (True, False)
    """
    return pattern == path or _compiled(pattern).fullmatch("/".join(parts(path))) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    *init, last = parts(pattern)
    text = "".join("(?:[^/]+/)*" if p == "**" else _component(p) + "/" for p in init)
    if last != "**":
        return re.compile(text + _component(last), re.DOTALL)
    return re.compile(f"{text[:-1]}(?:/.*)?" if text.endswith("/") else f"{text}.*", re.DOTALL)


def _component(part: str) -> str:
    text = re.escape(part).replace(r"\*", "[^/]*")
    return re.sub(r"\\\[([^\[\]/\\]+)\\\]", r"[\1]", text)


def suggest(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing: the tail of an error about an unknown name."""
    names = {name.lower(): name for name in known}
    close = [names[name] for name in difflib.get_close_matches(word.lower(), list(names), n=1)]
    return f" Did you mean {close[0]!r}?" if close else ""


def _entry_name(entry: Any) -> str:
    for attribute in ("field", "name"):
        value = getattr(entry, attribute, None)
        if isinstance(value, str):
            return value
    return str(entry.entry)
