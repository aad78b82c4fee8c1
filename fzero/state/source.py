"""source: where the leaves of a state can come from.

A checkpoint of fzero, a folder of Hugging Face files and one of torch.distributed.checkpoint are sources: leaves by
path, of which any range of elements can be read. `fill` is what a load does: each *want* is a range of a flattened
leaf and the memory that it belongs into, so that a source sees all at once and reads every byte of its files once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

CHUNK_BYTES = 4 << 20  # what `fill` reads at a time from a source that has no way of its own


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf that a source holds: its logical shape (of a per-rank leaf with the ranks in front) and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_rank: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """Elements [start, start + len(out)) of the flattened leaf `path`, to be written to `out` (1-D, contiguous, of the
    leaf's dtype, on any device)."""

    path: str
    start: int
    out: torch.Tensor


@runtime_checkable
class Source(Protocol):
    """Leaves by path. A class that reads files derives from it, and may override `check` and `fill`."""

    @property
    def leaves(self) -> Mapping[str, Entry]: ...

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened leaf, 1-D on the CPU: only the bytes that are needed are read (and
        verified)."""
        ...

    def check(self, wants: Sequence[Want]) -> None:
        """Raises what can be known before anything is read or written, as that a file is missing."""
        return None

    def fill(self, wants: Iterable[Want]) -> None:
        """Does all of them. Where it raises, some are done."""
        for want in wants:
            step = max(CHUNK_BYTES // want.out.dtype.itemsize, 1)
            for at in range(0, len(want.out), step):
                out = want.out[at : at + step]
                out.copy_(self.read(want.path, want.start + at, want.start + at + len(out)))


def like(source: Source) -> Any:
    """The pytree of a source, as tensors on the meta device: its own `like`, or a flat dict by path."""
    held = {path: torch.empty(one.shape, dtype=one.dtype, device="meta") for path, one in source.leaves.items()}
    return getattr(source, "like", held)
