"""source: the places that the leaves of a state can come from.

Sources are a checkpoint of fzero, a folder of Hugging Face files and one of torch.distributed.checkpoint. A source has
leaves by path, and any range of elements of a leaf can be read. `fill` serves a load. Each *want* is a range of a
flattened leaf with the memory that receives it. A source sees all wants at once, so it reads every byte of its files
once.

A rank's part of a leaf that is cut by its dims is a range in the order of its own (`fzero.state.order`), and scattered
in the flattened leaf. `batches` turns such wants into wants in the order that a source stores. Ranges that are not
contiguous in both orders go by way of memory that covers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from fzero.state.order import Order, split_like

CHUNK_BYTES = 4 << 20  # that `fill` reads at a time, unless the source has its own `fill`
STAGED_BYTES = 64 << 20  # of wanted ranges that are scattered: what is read together


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf that a source holds: its logical shape (the ranks come first for a per-rank leaf) and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_rank: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """Elements [start, start + len(out)) of the flattened leaf `path`. They are written to `out`: 1-D, contiguous, of
    the leaf's dtype, on any device.

    order: in which they are counted instead. Only `batches`, and the source of a checkpoint, take wants with one.
    """

    path: str
    start: int
    out: torch.Tensor
    order: Order | None = None


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


@dataclass
class Batch:
    """Wants to be filled together, in the order that is stored. `finish` then moves what was read to its place.

    moves: (to, from), in order. nbytes: the memory that the batch takes beside the state.
    """

    wants: list[Want] = field(default_factory=list)
    moves: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    nbytes: int = 0

    def finish(self) -> None:
        """Moves what was read to its place."""
        for to, read in self.moves:
            to.copy_(read)


def batches(wants: Iterable[Want], stored: Callable[[str], Order]) -> Iterator[Batch]:
    """Wants in any order as wants in the order in which a source stores the leaf: `stored(path)`.

    The caller fills the wants of a batch and then finishes it. What needs no memory is in the last batch, together.
    """
    last, batch = Batch(), Batch()
    for want in wants:
        there = stored(want.path)
        here = want.order or Order.of((there.numel,))
        if here == there:
            last.wants.append(Want(want.path, want.start, want.out))
            continue
        most = max(CHUNK_BYTES // want.out.dtype.itemsize, 1)
        for start, stop in here.ranges(want.start, want.start + len(want.out), most):
            out = want.out[start - want.start : stop - want.start]
            _stage(batch, want.path, here, start, out, there)
            if batch.nbytes >= STAGED_BYTES:
                yield batch
                batch = Batch()
    yield Batch(last.wants + batch.wants, batch.moves, batch.nbytes)


def _stage(batch: Batch, path: str, here: Order, start: int, out: torch.Tensor, there: Order) -> None:
    """Adds elements [start, start + len(out)) of the order `here` to a batch, as wants in the order `there`.

    They are taken from the window of the flattened leaf that covers them, and the window from the parts of `there`.
    """
    stop = start + len(out)
    low, high = here.at(start), here.at(stop - 1) + 1
    window, moves = out, []
    if high - low > len(out):
        window = _memory(batch, high - low, out)
        taken = here.views(window, low, start, stop)
        moves = list(zip(split_like(out, taken), taken, strict=True))
    for rank in range(there.parts):
        first, end = there.within(rank, low, high)
        if first == end or _apart(here, start // here.part, there, rank):
            continue
        views = there.views(window, low, first, end)
        if len(views) == 1 and views[0].is_contiguous():
            batch.wants.append(Want(path, first, views[0].view(-1)))
        else:
            part = _memory(batch, end - first, out)
            batch.wants.append(Want(path, first, part))
            batch.moves += zip(views, split_like(part, views), strict=True)
    batch.moves += moves


def _apart(here: Order, rank: int, there: Order, other: int) -> bool:
    """Whether two parts of orders with the same period have no element in common: nothing to read."""
    if here.period != there.period:
        return False
    one, two = here.start(rank) % here.period, there.start(other) % there.period
    return one >= two + there.run or two >= one + here.run


def _memory(batch: Batch, numel: int, like: torch.Tensor) -> torch.Tensor:
    batch.nbytes += numel * like.dtype.itemsize
    return torch.empty(numel, dtype=like.dtype)
