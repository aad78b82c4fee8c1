"""source: the places that the leaves of a state can come from.

Sources are a checkpoint of fzero, a folder of Hugging Face files and one of torch.distributed.checkpoint. A source has
leaves by path, and any range of elements of a leaf can be read. `fill` serves a load. Each *want* is a range of a
flattened leaf with the memory that receives it. A source sees all wants at once, so it reads every byte of its files
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

CHUNK_BYTES = 4 << 20  # that `fill` reads at a time, unless the source has its own `fill`


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf that a source holds: its logical shape (the ranks come first for a per-rank leaf) and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_rank: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """Elements [start, start + len(out)) of the flattened leaf `path`. They are written to `out`: 1-D, contiguous, of
    the leaf's dtype, on any device."""

    path: str
    start: int
    out: torch.Tensor


@runtime_checkable
class Source(Protocol):
    """Leaves by path. A class that reads files derives from it, and may override `check` and `fill`."""

    @property
    def leaves(self) -> Mapping[str, Entry]:
        """The leaves that this source holds, by path."""
        ...

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened leaf, 1-D on the CPU. Only the bytes that are needed are read and
        verified."""
        ...

    def check(self, wants: Sequence[Want]) -> None:
        """Raises the errors that can be known before anything is read or written, such as a missing file."""
        return None

    def fill(self, wants: Iterable[Want]) -> None:
        """Fills every want. If it raises, some of them are filled."""
        for want in wants:
            step = max(CHUNK_BYTES // want.out.dtype.itemsize, 1)
            for offset in range(0, len(want.out), step):
                out = want.out[offset : offset + step]
                out.copy_(self.read(want.path, want.start + offset, want.start + offset + len(out)))


def like(source: Source) -> Any:
    """The pytree of a source, as tensors on the meta device: its own `like`, or a flat dict by path."""
    leaves = {path: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for path, entry in source.leaves.items()}
    return getattr(source, "like", leaves)
