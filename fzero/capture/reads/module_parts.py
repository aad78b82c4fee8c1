"""module_parts: what is compared of a module that a step calls, and of those within it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from fzero._torch_compat import forward_hooks

_COPIES: ContextVar[frozenset[int]] = ContextVar("fzero_copies", default=frozenset())


@contextmanager
def standing_in(copies: Iterable[Any]) -> Iterator[None]:
    """While here, a call works on these copies of what the user holds: what it counts in them, the user counts."""
    holders = {id(holder) for copy in copies for holder in (copy, getattr(copy, "__dict__", copy))}
    token = _COPIES.set(_COPIES.get() | holders)
    try:
        yield
    finally:
        _COPIES.reset(token)


def stands_in(holder: Any) -> bool:
    """Whether what holds a value is one of the copies that a call in progress works on."""
    return id(holder) in _COPIES.get()


class ModuleParts:
    """The modules within one: their modes, who holds whom, their hooks, and what torch's layers among them are set to
    (a `Dropout.p`, a `LayerNorm.eps`): no line of the user reads that. Immutable."""

    def __init__(self, module: nn.Module) -> None:
        paths, parts = zip(*module.named_modules(), strict=True)
        self.flags = [vars(part) for part in parts]
        self.children = [part._modules for part in parts if part._modules]
        self.hooked = [hooks for part in parts for hooks in forward_hooks(part)]
        settings = [(path, *setting) for path, part in zip(paths, parts, strict=True) for setting in _settings(part)]
        self.of_layers = [holder for _, holder, _ in settings], [name for _, _, name in settings]
        names = [*((path, "training") for path in paths), *((path, name) for path, _, name in settings)]
        self.names = [".".join(filter(None, name)) for name in names]

    def settings(self, module: nn.Module) -> list[Any]:
        """Whether each is in training, and the numbers, texts and flags of torch's layers."""
        return [*map(_TRAINING, self.flags), *map(dict.get, *self.of_layers)]

    def told(self, name: str, old: list[Any], new: list[Any]) -> tuple[str, Any, Any]:
        """(name, old, new) of the first setting that is another, of those of the module of a name."""
        if len(old) == len(self.names) == len(new):
            changed = (i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b and a != b)
            i = next(changed, 0)
            return ".".join((name.partition("'")[0], self.names[i])), old[i], new[i]
        return name, old, new

    def modules(self, module: nn.Module) -> list[Any]:
        """The modules that each holds, and how many hooks it has on its forward, and before it."""
        return [*map(list, map(dict.values, self.children)), *map(len, self.hooked)]


def _settings(part: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where a layer of torch's has its settings, and the tensors that it does without."""
    if not type(part).__module__.startswith("torch.nn.") or type(part) in _OF_SIZES_ALONE:
        return []
    own = [(vars(part), name) for name, x in vars(part).items() if isinstance(x, _PLAIN) and _may_be_set(name)]
    return own + [(held, name) for held in (part._parameters, part._buffers) for name, x in held.items() if x is None]


def _may_be_set(name: str) -> bool:
    return name != "training" and not name.startswith("_")


_OF_SIZES_ALONE = (nn.Linear, nn.Embedding, nn.Identity)
_PLAIN = (int, float, str, tuple, type(None))
_TRAINING = operator.itemgetter("training")
