"""packing: several documents in a row of one length, so that few tokens are padding.

With known lengths rows are made by best fit, the longest document first (Ding et al. 2024, "Fewer truncations improve
language modeling"): each document goes to the fullest row that still has room for it, or begins a row. A document
longer than a row is cut into pieces of its length. It takes O(documents x log(length)) once; rows are then read by
index.

Without lengths documents are taken in their own order, and a row ends before the document that does not fit.

Either way rows are a data set for `fzero.data.batches`, which gives each rank its part, the same shapes everywhere, and
a position to resume from.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fzero import tree
from fzero.data.lengths import Values, pad_to
from fzero.data.tokens import _mixed, _positive, permute
from fzero.errors import DataError

Row = dict[str, torch.Tensor]
ADDED = ("documents", "position_ids")
Integers = np.ndarray[Any, np.dtype[np.int64]]


def packed(
    dataset: Any,
    length: int,
    *,
    lengths: Sequence[int] | None = None,
    values: Values = 0,
    seed: int = 0,
) -> Packed | PackedStream:
    """Rows of `length` tokens that hold several documents, as a data set for `fzero.data.batches`.

    dataset: of documents, each a dict of tensors or lists (n, ...) of one n, or one list of tokens, which becomes
    `input_ids`. length: of a row. lengths: n of each document, for a data set with `len` and `[i]`; rows are then found
    by best fit and read by index. None: documents are read in their own order, also of a stream.
    values: the padding at the end of a row, as in `pad_to`. seed: which of the documents of one length share a row.

    A row has the leaves of a document (length, ...), and two more, int64 (length,): `documents`, a number for each
    document of the row and -1 at padding, for `fzero.sparse.attention`; `position_ids`, which begin at 0 in each
    document, and in the padding. A label must not cross documents: `labels.masked_fill(position_ids == 0, -100)`.

    Raises DataError for lengths that are not those of the documents, and for documents of another form.

    >>> import fzero
    >>> texts = [[1, 1, 1], [2, 2, 2, 2], [3], [4, 4], [5, 5]]
    >>> rows = packed(texts, 6, lengths=[len(text) for text in texts])
    >>> len(rows), rows.fill
    (2, 1.0)
    >>> rows[0]["input_ids"].tolist(), rows[0]["documents"].tolist(), rows[0]["position_ids"].tolist()
    ([2, 2, 2, 2, 5, 5], [0, 0, 0, 0, 1, 1], [0, 1, 2, 3, 0, 1])
    >>> batches = fzero.data.batches(rows, 2)
    >>> next(batches)["documents"].shape, batches.position
    (torch.Size([2, 6]), 2)
    >>> [row["input_ids"].tolist() for row in packed(iter(texts), 6)]
    [[1, 1, 1, 0, 0, 0], [2, 2, 2, 2, 3, 0], [4, 4, 5, 5, 0, 0]]
    """
    _positive("packed", length=length)
    if lengths is None:
        if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
            raise DataError(f"packed(dataset={type(dataset).__name__}): needed documents to iterate over, or lengths=")
        return PackedStream(dataset, length, values)
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise DataError(f"packed(seed={seed!r}): needed an int in [0, 2**64). Write seed % 2**64")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(f"packed(dataset={type(dataset).__name__}): lengths= needs a data set with len() and [i]")
    own = np.asarray(lengths)
    if own.ndim != 1 or own.dtype.kind not in "iu" or len(own) != len(dataset) or (own < 0).any() or not own.any():
        raise DataError(f"packed(lengths=...): needed an int of at least 0 for each of the {len(dataset)} documents")
    return Packed(dataset, own.astype(np.int64), length, values, seed)


class Packed:
    """Rows of known documents, by index. Nothing is written after the constructor.

    rows: for each row, its pieces as (document, start, stop). fill: the share of all places that are not padding.
    """

    def __init__(self, dataset: Any, lengths: Integers, length: int, values: Values, seed: int) -> None:
        self.dataset: Any = dataset
        self.lengths: Integers = lengths
        self.length: int = length
        self.values: Values = values
        pieces = _pieces(lengths, length)
        order = permute(np.arange(len(pieces), dtype=np.uint64), len(pieces), _mixed(seed)).astype(np.int64)
        pieces = pieces[order]
        pieces = pieces[np.argsort(pieces[:, 1] - pieces[:, 2], kind="stable")]  # the longest first
        self.rows: list[Integers] = [pieces[row] for row in _best_fit((pieces[:, 2] - pieces[:, 1]).tolist(), length)]

    @property
    def fill(self) -> float:
        return float(self.lengths.sum() / (len(self.rows) * self.length))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        parts = []
        for number, start, stop in self.rows[index].tolist():
            document = _document(self.dataset[number])
            if _size(document) != self.lengths[number]:
                raise DataError(
                    f"document {number} has {_size(document)} tokens, and lengths= says {self.lengths[number]}: give "
                    "the lengths of these documents"
                )
            parts.append({name: leaf[start:stop] for name, leaf in document.items()})
        return _joined(parts, self.length, self.values)


class PackedStream(torch.utils.data.IterableDataset[Row]):
    """Rows of documents in their own order. The same documents give the same rows."""

    def __init__(self, dataset: Any, length: int, values: Values) -> None:
        self.dataset: Any = dataset
        self.length: int = length
        self.values: Values = values

    def set_epoch(self, epoch: int) -> None:
        """Tells the data set, if it has an order for each epoch."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Row]:
        parts: list[Row] = []
        free = self.length
        for document in map(_document, self.dataset):
            size = _size(document)
            for start in range(0, size, self.length):
                piece = {name: leaf[start : start + self.length] for name, leaf in document.items()}
                if _size(piece) > free:
                    yield _joined(parts, self.length, self.values)
                    parts, free = [], self.length
                parts.append(piece)
                free -= _size(piece)
        if parts:
            yield _joined(parts, self.length, self.values)


def _pieces(lengths: Integers, length: int) -> Integers:
    """(document, start, stop) of each piece of at most `length` tokens; a document without tokens has none."""
    counts = -(-lengths // length)
    numbers = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)) * length
    return np.stack([numbers, starts, np.minimum(starts + length, lengths[numbers])], axis=1)


def _best_fit(sizes: list[int], length: int) -> list[list[int]]:
    """Rows of the indices of sizes, which come in falling order: each in the fullest row that has room for it.

    >>> _best_fit([5, 4, 2, 2, 1], 6)
    [[0, 4], [1, 2], [3]]
    """
    rows: list[list[int]] = []
    free: list[int] = []  # how much room rows have, each once, sorted
    having: dict[int, list[int]] = {}  # the rows with that much room
    for index, size in enumerate(sizes):
        at = bisect.bisect_left(free, size)
        if at < len(free):
            room = free[at]
            row = having[room].pop()
            if not having[room]:
                free.pop(at)
        else:
            room, row = length, len(rows)
            rows.append([])
        rows[row].append(index)
        if left := room - size:
            if not having.setdefault(left, []):
                bisect.insort(free, left)
            having[left].append(row)
    return rows


def _document(sample: Any) -> Row:
    """A document as a dict of tensors of one length. Raises DataError for another form."""
    named = sample if isinstance(sample, Mapping) else {"input_ids": sample}
    try:
        document = {str(name): torch.as_tensor(leaf) for name, leaf in named.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"a document is {str(sample)[:60]!r}: needed a dict of tensors or lists of numbers, or one list of tokens. "
            "Leave other columns out"
        ) from error
    shapes = {name: tuple(leaf.shape) for name, leaf in document.items()}
    if not document or any(leaf.ndim == 0 for leaf in document.values()) or len({s[0] for s in shapes.values()}) != 1:
        raise DataError(f"a document has leaves {shapes}: needed the same number of tokens, as dim 0, in each")
    if clash := [name for name in ADDED if name in document]:
        raise DataError(f"a document has a leaf {clash[0]!r}, which packing makes: leave it out")
    return document


def _size(document: Row) -> int:
    return next(iter(document.values())).shape[0]


def _joined(parts: Sequence[Row], length: int, values: Values) -> Row:
    """One row of some pieces."""
    if any(part.keys() != parts[0].keys() for part in parts):
        raise DataError(f"documents have different leaves: {[sorted(part) for part in parts][:2]}")
    sizes = [_size(part) for part in parts]
    row: Row = tree.map(lambda *leaves: torch.cat(leaves), *parts)
    row = pad_to(row, [length], values, dim=0)
    padding = length - sum(sizes)
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    row["documents"] = torch.cat([numbers, numbers.new_full((padding,), -1)])
    row["position_ids"] = torch.cat([torch.arange(size) for size in (*sizes, padding)])
    return row
