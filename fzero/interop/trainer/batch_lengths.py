"""batch_lengths: which dims of a batch are its length, so that all of them are padded alike.

The key leaf says the length: `input_ids`, else `inputs_embeds`, else what the model calls its main input. Some leaves
are known by name: their last dim is the length where it has its size (labels of a decoder have a length of their own).
Of every other dim that is learned from what varies: it is the length if it had the size of the length in every batch of
all ranks so far, and there were at least two lengths. One batch alone could agree by chance: while there was one length
only, a batch with such a dim stays as it is. A dim that once had another size is no length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fzero import tree

log = logging.getLogger("fzero")

Batch = Mapping[str, Any]
Lengths = tuple[int, int]  # of the inputs, and of what a decoder is given; 0: there are none
Dim = tuple[str, int]  # a leaf's path, and one of its dims, counted from the last, -1

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask", "labels")
DECODED = ("labels", "decoder_input_ids", "decoder_attention_mask")
EMBEDDED = "inputs_embeds"  # of shape (rows, length, hidden)
NUM_DIMS = 60  # that ranks compare, each twice
NONE = 1 << 40  # the least of no lengths


def lengths(batch: Batch, decodes: bool, main: str | None = None) -> Lengths:
    """The lengths of a batch. `decodes`: whether its labels are those of a decoder, with a length of their own. main:
    the name of the key leaf, of shape (rows, length), if there is neither `input_ids` nor `inputs_embeds`.

    >>> lengths({"input_ids": torch.zeros(2, 4, 5), "labels": torch.zeros(2, 3)}, decodes=True)
    (5, 3)
    """
    decoded = [batch[name].shape[-1] for name in DECODED if decodes and _is_sequence(batch.get(name))]
    key = key_of(batch, main)
    return (0 if key is None else key.shape[-2 if key is batch.get(EMBEDDED) else -1]), max(decoded, default=0)


def key_of(batch: Batch, main: str | None = None) -> Tensor | None:
    """The leaf that says the length of the inputs, or None."""
    ids, embedded, other = batch.get("input_ids"), batch.get(EMBEDDED), batch.get(main or "")
    if _is_sequence(ids):
        return ids
    if isinstance(embedded, Tensor) and embedded.dim() == 3:
        return embedded
    return other if _is_sequence(other) and other.dim() == 2 else None


class Seen:
    """What the batches of a run have said of their dims. `agreed` changes it, on all ranks alike."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, int]] = {}  # for a place in Lengths, the least and the largest so far
        self._others: set[tuple[Dim, int]] = set()  # had another size than that length once
        self._first: dict[Dim, int] = {}  # the first size of each dim
        self._said: set[str] = set()

    def agreed(
        self,
        batches: Sequence[Batch],
        own: Sequence[Lengths],
        gather: Callable[[Tensor], Tensor] | None,
        count: float = 0,
    ) -> tuple[Lengths | None, float]:
        """(the largest lengths of these batches of all ranks, or None if they must stay as they are; the sum of `count`
        over the ranks). A collective: `gather(row)` returns the rows of all ranks, or is None for one rank."""
        sizes = [_sizes(batch) for batch in batches]
        asked = [(dim, i) for dim in sizes[0] for i in (0, 1)][:NUM_DIMS]
        alike = {(id(held), length): (held, length) for held, length in zip(sizes, own, strict=True)}.values()
        now = {(dim, i) for held, length in alike for dim, size in held.items() for i in (0, 1)
               if length[i] and size != length[i]}  # fmt: skip
        row = [max(length[i] for length in own) for i in (0, 1)]
        row += [-min((length[i] for length in own if length[i]), default=NONE) for i in (0, 1)]
        row += [int(key in now) for key in asked] + [0] * (NUM_DIMS - len(asked))
        if gather is not None:
            rows = gather(torch.tensor([[*row, count]], dtype=torch.float64))
            row, count = [int(x) for x in rows[:, :-1].amax(0).tolist()], float(rows[:, -1].sum())
        self._others |= now | {key for key, other in zip(asked, row[4:], strict=False) if other}
        for i in (0, 1):
            if row[i]:
                low, high = self._ends.get(i, (NONE, 0))
                self._ends[i] = min(low, -row[2 + i]), max(high, row[i])
        for held, _ in alike:
            self._warn(held)
        open_ = any(row[i] and not self._varies(i) and not _named(*dim, i) and (dim, i) not in self._others
                    for dim in sizes[0] for i in (0, 1))  # fmt: skip
        return None if open_ else (row[0], row[1]), count

    def places(self, batch: Batch, own: Lengths) -> dict[str, dict[int, int]]:
        """{path: {dim: which of the two lengths}}: the dims that are the length, counted from the last, -1."""
        found: dict[str, dict[int, int]] = {}
        for (path, dim), size in _sizes(batch).items():
            for i in (0, 1):
                of_decoder = bool(own[1]) and path in DECODED
                known = own[i] == size and of_decoder <= bool(i) and (_named(path, dim, i) or self._varies(i))
                if known and ((path, dim), i) not in self._others:
                    found.setdefault(path, {}).setdefault(dim, i)
        return found

    def _varies(self, i: int) -> bool:
        low, high = self._ends.get(i, (0, 0))
        return low < high

    def _warn(self, sizes: Mapping[Dim, int]) -> None:
        """Says once of a leaf that a dim of it varies, and is no length: each size has a program."""
        for dim, size in sizes.items():
            first, path = self._first.setdefault(dim, size), dim[0]
            if size != first and path not in self._said and all((dim, i) in self._others for i in self._ends):
                self._said.add(path)
                log.warning("fzero: dim %d of batch/%s was %d and is %d, and is not the length that pad_to pads: each "
                            "size has a program. Pad it in the collator", dim[1], path, first, size)  # fmt: skip


def _sizes(batch: Batch) -> Mapping[Dim, int]:
    """The size of each dim but the rows', in an order that all ranks share. Labels that are no integers have no value
    that weighs nothing, so they have no length."""
    leaves = [x for x in zip(*tree.flatten(dict(batch))[:2], strict=True) if isinstance(x[1], Tensor)]
    shapes = sorted((path, leaf.shape) for path, leaf in leaves if path != "labels" or not leaf.is_floating_point())
    return _dims(tuple(shapes))


@lru_cache(maxsize=64)
def _dims(shapes: tuple[tuple[str, torch.Size], ...]) -> Mapping[Dim, int]:
    return {(path, dim - len(shape)): shape[dim] for path, shape in shapes for dim in range(1, len(shape))}


def _named(path: str, dim: int, i: int) -> bool:
    """Whether a dim is a length by the name of its leaf."""
    if path == EMBEDDED:
        return i == 0 and dim == -2
    return dim == -1 and path in (DECODED if i else INPUTS)


def _is_sequence(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() >= 2
