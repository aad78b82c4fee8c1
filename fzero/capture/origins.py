"""origins: what a value in a trace is made of: inputs, draws, or neither."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cache

import torch
from torch import fx

from fzero.ir.recorder import Recorder


def is_drawn(recorder: Recorder, values: Iterable[torch.Tensor]) -> bool:
    """Whether values are made of random numbers, and of no input."""
    left = [node for value in values if (node := recorder.nodes.get(value)) is not None]
    seen, drawn = set(left), False
    while left:
        node = left.pop()
        if node.op == "placeholder":
            return False
        drawn |= _draws(node)
        if not _draws_by_key(node):
            left += (new := [x for x in dict.fromkeys(node.all_input_nodes) if x not in seen])
            seen.update(new)
    return drawn


def made_anew(recorder: Recorder, changing: Collection[int]) -> Callable[[torch.Tensor], bool]:
    """Tells of a value whether each step makes it of other numbers: of draws, or of inputs that change from step to
    step. changing: the places of these inputs."""

    @cache
    def nodes() -> set[fx.Node]:
        found, place = set[fx.Node](), -1
        for node in recorder.graph.nodes:
            if node.op == "placeholder":
                place += 1
                anew = place in changing
            else:
                anew = _draws(node) or not found.isdisjoint(node.all_input_nodes)
            if anew:
                found.add(node)
        return found

    return lambda value: recorder.nodes.get(value) in nodes()


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers, with a key or without one."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or _draws_by_key(node)


def _draws_by_key(node: fx.Node) -> bool:
    """Whether it is an op of `fzero.random`."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and [x.name for x in schema.arguments[:1]] == ["key"]
