"""source: what a state can be made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Entry:
    """A leaf that a source holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class Source(Protocol):
    """Leaves by path, read in pieces."""

    @property
    def leaves(self) -> Mapping[str, Entry]: ...

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened leaf, 1-D."""
        ...


def like(source: Source) -> Any:
    """The pytree of a source, as tensors on the meta device: its own `like`, or a flat dict by path."""
    held = {path: torch.empty(one.shape, dtype=one.dtype, device="meta") for path, one in source.leaves.items()}
    return getattr(source, "like", held)
