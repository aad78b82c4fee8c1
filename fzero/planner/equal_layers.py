"""equal_layers: the layers of a model that have the same leaves, by the paths of its parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree

NUMBER = re.compile("0|[1-9][0-9]{0,8}")  # as an index is written
Stack = tuple[str, ...]  # the path of a stack of layers, without their numbers


@dataclass(frozen=True)
class Layers:
    """The equal layers of a model. depth: how many. stacks: the paths of those that have so many: one, or an encoder's
    and a decoder's."""

    depth: int
    stacks: frozenset[Stack]

    def drops(self, path: str, depth: int) -> bool:
        """Whether a leaf is of a layer beyond a depth."""
        stack, number, _ = _split(path)
        return stack in self.stacks and number >= depth


def layers_of(params: Any) -> Layers | None:
    """The equal layers of a pytree of parameters; None if the deepest stack has other layers, or none has two."""
    paths, leaves, _ = tree.flatten(params)
    found: dict[Stack, dict[int, dict[str, Any]]] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        stack, number, rest = _split(path)
        if number >= 0 and isinstance(leaf, torch.Tensor):
            found.setdefault(stack, {}).setdefault(number, {})[rest] = (tuple(leaf.shape), leaf.dtype)
    depth = max(map(len, found.values()), default=0)
    deepest = {stack: layers for stack, layers in found.items() if len(layers) == depth}
    equal = all(
        set(layers) == set(range(depth)) and all(layer == layers[0] for layer in layers.values())
        for layers in deepest.values()
    )
    return Layers(depth, frozenset(deepest)) if equal and depth > 1 else None


def _split(path: str) -> tuple[Stack, int, str]:
    """(the stack, the layer's number, the rest) of a leaf's path; -1 where it has no number.

    >>> _split("model.layers.3.mlp.weight")
    (('model', 'layers'), 3, 'mlp/weight')
    """
    parts = tree.parts(path)
    at = next((n for n, part in enumerate(parts) if NUMBER.fullmatch(part)), None)
    return ((), -1, path) if at is None else (parts[:at], int(parts[at]), "/".join(parts[at + 1 :]))
