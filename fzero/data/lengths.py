"""lengths: batches of few lengths, for a step has a program for each shape of its batch.

`pad_to` pads the leaves of a batch to a multiple, or to one of some lengths. `by_length` makes batches of samples of
like length from a data set, in a shuffled order that depends on (seed, epoch) alone:

1. The epoch's samples are permuted. What is more than a multiple of the batch size is left out, another rest each time.
2. Each goes to the least padded length that holds it. Lengths are filled in that order, in batches; what is left at one
   length goes to the next longer one.
3. The batches are permuted, so that lengths are mixed.

So all samples of a batch, over all ranks, have one padded length. The state is one integer, the samples handed out.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fzero import tree
from fzero.data.tokens import _mixed, _part, _positive, permute, place
from fzero.errors import DataError, leaf_name

To = int | Sequence[int]  # a multiple, or the lengths that there are
Values = float | Mapping[str, float]  # one for all leaves, or path rules
LONGER = "Cut it, or give a longer one"
TOO_SHORT = "by_length(lengths=) gives no sample of this batch such a length: give each that of its longest leaf"


def pad_to(batch: Any, to: To, values: Values = 0, *, dim: int = 1) -> Any:
    """The batch with its leaves padded at the end of `dim`.

    batch: a pytree; leaves that are not tensors, or have no such dim, are unchanged. to: an int pads to the next
    multiple of it; several ints are lengths, of which the smallest that fits is used. Each leaf is padded separately,
    so inputs and targets may have different lengths. values: the padding, one number or path rules to numbers; with
    rules, a leaf that none matches is unchanged. dim: 1 for (rows, length, ...), -1 if the length is the last dim.

    Raises DataError for a leaf that is longer than all lengths, a rule that matches no leaf, and a batch without a leaf
    to pad. The loss must mask the padding: with a mask and `fzero.Mean`, or with labels of -100.

    >>> batch = {"input_ids": torch.ones(2, 5, dtype=torch.int64), "labels": torch.ones(2, 5), "weight": torch.ones(2)}
    >>> padded = pad_to(batch, 8, {"input_ids": 0, "labels": -100})
    >>> padded["labels"][0].tolist(), padded["weight"].shape
    ([1.0, 1.0, 1.0, 1.0, 1.0, -100.0, -100.0, -100.0], torch.Size([2]))
    >>> pad_to(batch, [16, 64])["input_ids"].shape
    torch.Size([2, 16])
    """
    _check_to("pad_to", to)
    return _all_padded(batch, to, values, dim, "batch")


def _all_padded(batch: Any, to: To, values: Values, dim: int, name: str, fix: str = LONGER) -> Any:
    """As `pad_to`. name: of the batch, in errors. fix: the remedy for a leaf that is longer than all lengths."""
    rules = values if isinstance(values, Mapping) else {"**": values}
    for rule, padding in rules.items():
        if not isinstance(padding, (int, float)):
            raise DataError(f"pad_to(values=...): {rule!r} is padded with {padding!r}: needed a number, as 0 or -100")
    paths, leaves, treedef = tree.flatten(batch)
    for rule in rules:
        if not any(tree.matches(rule, path) for path in paths):
            raise DataError(f"pad_to(values=...): the rule {rule!r} matches no leaf.{tree.suggest(rule, paths)}")
    new = []
    for path, leaf in zip(paths, leaves, strict=True):
        value = next((rules[rule] for rule in rules if tree.matches(rule, path)), None)
        has_dim = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and -leaf.ndim <= dim < leaf.ndim
        new.append(leaf if value is None or not has_dim else _padded(path, leaf, to, value, dim, name, fix))
    if not any(isinstance(leaf, torch.Tensor) and -leaf.ndim <= dim < leaf.ndim for leaf in leaves):
        raise DataError(f"pad_to(dim={dim}): no leaf of the batch has such a dim. Give the dim of the length")
    return tree.unflatten(treedef, new)


def by_length(
    dataset: Any,
    lengths: Sequence[int],
    batch_size: int,
    *,
    to: To,
    values: Values = 0,
    dim: int = 1,
    collate: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    position: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    mesh: Mapping[str, int] | None = None,
) -> ByLength:
    """Endless batches of `batch_size` samples over all ranks, of similar length and padded to it; each rank gets its
    shard.

    dataset: `dataset[i]` is a sample, a pytree of tensors without the batch dim. lengths: the length of each sample.
    batch_size: samples of all ranks.
    to, values, dim: as in `pad_to`, of the batch; each length that occurs needs its own program. collate: makes a batch
    from a list of samples, and the batch is then padded; by default the samples are padded and stacked. seed: the seed
    of the order. position: the number of samples returned so far, a multiple of the batch size. rank, world_size, mesh:
    as in `Tokens.batches`.

    An epoch has each sample once, except for a remainder smaller than a batch, which differs each time. A batch has the
    same shapes on all ranks.

    >>> texts = [{"x": torch.full((n,), n)} for n in (3, 9, 4, 2, 12, 8, 11, 1)]
    >>> batches = by_length(texts, [len(t["x"]) for t in texts], 2, to=[4, 12])
    >>> sorted(tuple(next(batches)["x"].shape) for _ in range(4)), batches.position
    ([(2, 4), (2, 4), (2, 12), (2, 12)], 8)
    """
    rank, world_size = place(rank, world_size, mesh)
    _check_to("by_length", to)
    _part(batch_size, rank, world_size)
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise DataError(f"by_length(seed={seed!r}): needed an int in [0, 2**64). Write seed % 2**64")
    own = np.asarray(lengths)
    if own.ndim != 1 or own.dtype.kind not in "iu" or len(own) != len(dataset) or (own < 0).any():
        raise DataError(f"by_length(lengths=...): needed an int of at least 0 for each of the {len(dataset)} samples")
    if dim == 0:
        raise DataError("by_length(dim=0): that is the dim of the rows. Needed 1, or -1 where the length comes last")
    if len(own) < batch_size:
        raise DataError(f"by_length: {len(own)} samples make no batch of {batch_size}. Give a smaller batch_size")
    if type(position) is not int or position < 0 or position % batch_size:
        raise DataError(
            f"by_length(position={position!r}): needed the number of samples so far, a multiple of "
            f"batch_size={batch_size}. With another batch size an epoch has other batches: begin with the next one"
        )
    padded = np.array(
        [_target(f"by_length: sample {i}", int(n), to, LONGER) for i, n in enumerate(own)], dtype=np.int64
    )
    return ByLength(dataset, padded, batch_size, values, dim, collate, seed, position, rank, world_size)


@dataclass
class ByLength(Iterator[Any]):
    """An endless iterator. `position`, the samples handed out so far over all ranks, is all of its state.

    padded: of each sample the length that it is padded to, int64.
    """

    dataset: Any = field(repr=False)
    padded: np.ndarray[Any, np.dtype[np.int64]] = field(repr=False)
    batch_size: int
    values: Values
    dim: int
    collate: Callable[[list[Any]], Any] | None
    seed: int
    position: int
    rank: int
    world_size: int
    _epoch: tuple[int, Any] = field(default=(-1, None), repr=False, init=False)  # the last one that was made

    @property
    def samples(self) -> int:
        """The samples of an epoch: all but a rest that makes no batch."""
        return len(self.padded) // self.batch_size * self.batch_size

    def epoch(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The samples of an epoch's batches: int64 of shape (batches, batch size)."""
        if self._epoch[0] != number:
            self._epoch = number, self._made(_mixed(self.seed ^ _mixed(number)))
        batches: np.ndarray[Any, np.dtype[np.int64]] = self._epoch[1]
        return batches

    def __next__(self) -> Any:
        number, within = divmod(self.position, self.samples)
        part = self.batch_size // self.world_size
        chosen = self.epoch(number)[within // self.batch_size]
        length = int(self.padded[chosen].max())
        own = [int(i) for i in chosen[self.rank * part : (self.rank + 1) * part]]
        samples = [self.dataset[i] for i in own]
        if self.collate is not None:
            batch = _all_padded(self.collate(samples), [length], self.values, self.dim, "batch", TOO_SHORT)
        else:
            along = self.dim - 1 if self.dim > 0 else self.dim
            whole = [
                _all_padded(sample, [length], self.values, along, f"dataset[{i}]", TOO_SHORT)
                for i, sample in zip(own, samples, strict=True)
            ]
            batch = tree.map(lambda *leaves: torch.stack([torch.as_tensor(leaf) for leaf in leaves]), *whole)
        self.position += self.batch_size
        return batch

    def _made(self, key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        order = permute(np.arange(len(self.padded), dtype=np.uint64), len(self.padded), key).astype(np.int64)
        order = order[: self.samples]
        batches, left = [], order[:0]
        for length in np.unique(self.padded[order]):
            left = np.concatenate([left, order[self.padded[order] == length]])
            whole = len(left) // self.batch_size * self.batch_size
            batches.append(left[:whole].reshape(-1, self.batch_size))
            left = left[whole:]
        joined = np.concatenate(batches)
        return joined[permute(np.arange(len(joined), dtype=np.uint64), len(joined), _mixed(key)).astype(np.int64)]


def _padded(path: str, leaf: torch.Tensor, to: To, value: float, dim: int, name: str, fix: str) -> torch.Tensor:
    missing = _target(leaf_name(name, path), leaf.shape[dim], to, fix) - leaf.shape[dim]
    if not missing:
        return leaf
    if not leaf.is_floating_point() and not leaf.is_complex():
        low, high = (0, 1) if leaf.dtype == torch.bool else (torch.iinfo(leaf.dtype).min, torch.iinfo(leaf.dtype).max)
        if not low <= value <= high or value != int(value):
            given = f"pad_to: {path!r} is {leaf.dtype}, and {value} is no such number"
            raise DataError(f"{given}. Give an int in [{low}, {high}]")
    shape = list(leaf.shape)
    shape[dim] = missing
    return torch.cat([leaf, leaf.new_full(shape, value)], dim)


def _target(name: str, length: int, to: To, fix: str) -> int:
    """The length that one is padded to. Raises DataError, with the remedy, for one longer than all."""
    if isinstance(to, int):
        return -(-length // to) * to
    known = sorted(to)
    if length > known[-1]:
        raise DataError(f"{name} has length {length}, which none of {known} holds. {fix}")
    return known[bisect.bisect_left(known, length)]


def _check_to(name: str, to: To) -> None:
    if isinstance(to, int):
        _positive(name, to=to)
    elif not isinstance(to, Sequence) or not to or any(type(n) is not int or n < 1 for n in to):
        raise DataError(f"{name}(to={to!r}): needed a positive int, or some of them")
