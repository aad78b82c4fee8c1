"""rows: this rank's part of batches of any data set, from a position on.

A data set with a length (`len(d)`, `d[i]`: a list, a torch `Dataset`, a `datasets.Dataset` of Hugging Face) is read by
index. The sample at position p depends on (seed, p) alone, as in `Tokens`: an epoch has each sample once, and a batch
may end one epoch and begin the next. So every batch has its full size, and no sample is left out.

A stream (only `iter(d)`: a torch `IterableDataset`, a streaming data set of Hugging Face, a class with `__iter__`) is
read in its own order, again from its beginning when it ends. Every rank reads all of it and keeps its part; to resume,
the rows before the position are read and discarded.

Either way the state is one integer, and every rank gets the same number of rows at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from fzero import tree
from fzero.data.tokens import _part, _positive, place, samples_at
from fzero.errors import DataError

Collate = Callable[[list[Any]], Any]
BY_INDEX = ("shuffled", "sequential")


def batches(
    dataset: Any,
    batch_size: int,
    *,
    collate: Collate | None = None,
    order: str | None = None,
    seed: int = 0,
    position: int = 0,
    workers: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Rows:
    """Endless batches of `batch_size` samples over all ranks; each rank gets its part.

    dataset: with `len` and `[i]`, or one that can only be iterated. batch_size: samples of all ranks. collate: makes a
    batch from a list of samples, as a DataLoader's `collate_fn`; by default samples are pytrees of numbers and tensors
    of equal shapes, and are stacked.
    order: "shuffled" (the default with a length) or "sequential" (the default of a stream, and all that it can be).
    seed: of the shuffled order. position: the number of samples returned so far over all ranks; save it with the
    checkpoint. workers: processes that read ahead, of a data set with a length. rank, world_size: by default those of
    the process group, or of torchrun before there is one. mesh: as in `Spec(mesh=...)`; ranks that differ only in `pp`
    or `tp` get the same rows.

    Raises DataError for a batch size that the ranks do not divide, an empty data set, and samples that do not stack.

    >>> import fzero
    >>> squares = [{"x": float(n), "y": n * n} for n in range(10)]
    >>> rows = fzero.data.batches(squares, 4, order="sequential")
    >>> next(rows)["y"], rows.position
    (tensor([0, 1, 4, 9]), 4)
    >>> again = fzero.data.batches(squares, 4, order="sequential", position=rows.position)
    >>> next(again)["x"]
    tensor([4., 5., 6., 7.])
    >>> next(again)["x"]  # the end of an epoch, and the beginning of the next
    tensor([8., 9., 0., 1.])
    >>> next(fzero.data.batches(squares, 4, order="sequential", rank=1, world_size=2))["y"]
    tensor([4, 9])
    """
    rank, world_size = place(rank, world_size, mesh)
    part = _part(batch_size, rank, world_size)
    _check_kind(dataset)
    by_index = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    order = order or ("shuffled" if by_index else "sequential")
    if not by_index and not hasattr(dataset, "__iter__"):
        raise DataError(
            f"batches(dataset={type(dataset).__name__}): needed a data set with len() and [i], or one to iterate over"
        )
    _check_order(order, by_index, workers)
    if by_index and len(dataset) == 0:
        raise DataError("batches: the data set has no samples")
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise DataError(f"batches(seed={seed!r}): needed an int in [0, 2**64). Write seed % 2**64")
    if type(position) is not int or position < 0:
        raise DataError(f"batches(position={position!r}): needed the number of samples so far, an int of at least 0")
    if workers:
        _positive("batches", workers=workers)
    return Rows(dataset, batch_size, part, rank, collate or stacked, order, seed, position, workers, by_index)


def _check_kind(dataset: Any) -> None:
    """Raises DataError for what looks like a data set, and holds something else than samples."""
    if isinstance(dataset, Mapping) and 0 not in dataset:
        first = next(iter(dataset), "x")
        raise DataError(
            f"batches(dataset={type(dataset).__name__}): a dict holds no samples by number. Give one of its data sets, "
            f"as dataset[{first!r}]; of columns a list of samples, or torch.utils.data.StackDataset(**columns)"
        )
    if isinstance(dataset, torch.utils.data.DataLoader) and dataset.batch_sampler is not None:
        raise DataError(
            "batches(dataset=DataLoader): it gives batches, and these would be stacked again. Give its data set, "
            "loader.dataset, and collate=loader.collate_fn if it has one of your own"
        )


def _check_order(order: str, by_index: bool, workers: int) -> None:
    if order not in BY_INDEX:
        raise DataError(f"batches(order={order!r}): needed one of {', '.join(BY_INDEX)}")
    if not by_index and (order != "sequential" or workers):
        raise DataError(
            "a data set without len() and [i] is read in its own order, by this process: leave out order= and "
            "workers=. Shuffle the stream itself, with one seed on all ranks"
        )


@dataclass
class Rows(Iterator[Any]):
    """An endless iterator. `position`, the samples returned so far over all ranks, is all of its state, and may be set.

    part: the rows of a batch that this rank gets. by_index: whether the data set is read by index.
    """

    dataset: Any = field(repr=False)
    batch_size: int
    part: int
    rank: int
    collate: Collate = field(repr=False)
    order: str
    seed: int
    position: int
    workers: int = 0
    by_index: bool = True
    _source: Iterator[Any] | None = field(default=None, repr=False, init=False)
    _source_position: int = field(default=-1, repr=False, init=False)  # of the batch that it gives next

    def __next__(self) -> Any:
        if self._source is None or self._source_position != self.position:
            self._source = iter(self._loader() if self.by_index else self._from_stream())
        batch = next(self._source)
        self.position += self.batch_size
        self._source_position = self.position
        return batch

    def indices(self, position: int) -> list[int]:
        """The samples of this rank in the batch at a position, of a data set that is read by index."""
        first = position + self.rank * self.part
        found: list[int] = samples_at(first, self.part, len(self.dataset), self.order, self.seed).tolist()
        return found

    def _loader(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(
            self.dataset,
            batch_sampler=_FromPosition(replace(self)),  # not itself: in a circle, workers would outlive it
            collate_fn=self.collate,
            num_workers=self.workers,
        )

    def _from_stream(self) -> Iterator[Any]:
        rows = _again_and_again(self.dataset)
        skipped = sum(1 for _ in islice(rows, self.position))
        assert skipped == self.position, "an endless stream"
        while True:
            batch = list(islice(rows, self.batch_size))
            yield self.collate(batch[self.rank * self.part : (self.rank + 1) * self.part])


class _FromPosition(torch.utils.data.Sampler[list[int]]):
    """The samples of each batch of `Rows`, from its position on, without an end."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[list[int]]:
        position = self.rows.position
        while True:
            yield self.rows.indices(position)
            position += self.rows.batch_size


def _again_and_again(dataset: Any) -> Iterator[Any]:
    """The rows of a stream, from its beginning again when it ends. Raises DataError if it gives none."""
    epoch = 0
    while True:
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        empty = True
        for row in dataset:
            empty = False
            yield row
        if empty:
            what = "has no samples" if epoch == 0 else "gave no samples the second time: an iterator ends once"
            raise DataError(f"batches: the data set {what}. Give one that can be iterated again, such as a class")
        epoch += 1


def stacked(samples: Sequence[Any]) -> Any:
    """Samples as one batch: each leaf a tensor with a new first dim.

    Raises DataError for a leaf that is no number or tensor, and for shapes that differ.

    >>> stacked([{"a": 1, "b": [1.0, 2.0]}, {"a": 2, "b": [3.0, 4.0]}])
    {'a': tensor([1, 2]), 'b': tensor([[1., 2.],
            [3., 4.]])}
    """
    rows = [_tensors(sample) for sample in samples]
    try:
        return tree.map(lambda *leaves: torch.stack(leaves), *rows)
    except (RuntimeError, ValueError, TypeError) as error:
        first, *others = (tree.flatten(row)[0] for row in rows)
        if other := [paths for paths in others if paths != first]:
            text = (
                f"one holds {', '.join(first)}, another {', '.join(other[0])}. Give each the same entries, or collate="
            )
            raise DataError(f"the samples of a batch do not stack: {text}") from error
        raise DataError(
            f"the samples of a batch do not stack: {str(error).splitlines()[0]}. Give collate=, which pads them to "
            "one length; or use fzero.data.by_length, which keeps few lengths"
        ) from error


def _tensors(sample: Any) -> Any:
    """A sample with each leaf as a tensor; a list of numbers is one leaf, as Hugging Face's data sets give it."""
    if isinstance(sample, Mapping):
        return {name: _tensors(value) for name, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(_tensors(value) for value in sample)
    try:
        return torch.as_tensor(sample)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"a sample holds {type(sample).__name__} {str(sample)[:40]!r}, which is not a tensor: leave the column "
            "out, or give collate="
        ) from error
