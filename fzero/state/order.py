"""order: the order in which the elements of a leaf are counted.

A leaf is counted as it is flattened. A leaf that lies over the ranks of `tp` by a dim is counted part by part instead:
the part of the first rank, flattened, then that of the second, and so on. So what a rank holds of it is one range, and
so is each slice of that which ZeRO or a checkpoint cuts.

In the flattened leaf such a part lies in *runs* of equal length, at equal distances. The leaf is (rounds, ranks, run)
there, and (ranks, rounds, run) in the order. For a leaf of shape (4, 6) over two ranks:

| cut | rounds | run | the first rank's elements of the flattened leaf |
|---|---|---|---|
| dim 0 | 1 | 12 | 0 to 11 |
| dim 0, two groups | 2 | 6 | 0 to 5, 12 to 17 |
| dim 1 | 4 | 3 | 0 to 2, 6 to 8, 12 to 14, 18 to 20 |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """Each of `groups` equal parts of dim `dim` lies over `ranks` ranks."""

    dim: int
    groups: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a leaf of ranks * rounds * run elements. A flattened leaf has one rank and one run.

    >>> Order.of((4, 6)), Order.of((4, 6), Cut(1, 1, 2))
    (Order(ranks=1, rounds=1, run=24), Order(ranks=2, rounds=4, run=3))
    """

    ranks: int
    rounds: int
    run: int

    @classmethod
    def of(cls, shape: Sequence[int], cut: Cut | None = None) -> Order:
        """The order of a leaf of this logical shape."""
        if cut is None:
            return cls(1, 1, math.prod(shape))
        return cls(
            cut.ranks,
            math.prod(shape[: cut.dim]) * cut.groups,
            shape[cut.dim] // (cut.groups * cut.ranks) * math.prod(shape[cut.dim + 1 :]),
        )

    @property
    def numel(self) -> int:
        """The elements of the leaf."""
        return self.ranks * self.part

    @property
    def part(self) -> int:
        """The elements of one rank's part."""
        return self.rounds * self.run

    @property
    def period(self) -> int:
        """The distance of a part's runs in the flattened leaf."""
        return self.ranks * self.run

    def at(self, i: int) -> int:
        """The place in the flattened leaf of element i of the order.

        >>> [Order.of((4, 6), Cut(1, 1, 2)).at(i) for i in (0, 2, 3, 12)]
        [0, 2, 6, 3]
        """
        rank, inside = divmod(i, self.part)
        return inside // self.run * self.period + rank * self.run + inside % self.run

    def within(self, rank: int, low: int, high: int) -> tuple[int, int]:
        """The range of the order that `rank` holds of elements [low, high) of the flattened leaf.

        >>> Order.of((4, 6), Cut(1, 1, 2)).within(1, 2, 11)
        (12, 17)
        """
        start, stop = (
            x // self.period * self.run + min(max(x % self.period - rank * self.run, 0), self.run) for x in (low, high)
        )
        return rank * self.part + start, rank * self.part + stop

    def ranges(self, start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
        """Cuts [start, stop) of the order into ranges that lie within `most` elements of the flattened leaf.

        A range is a number of whole runs, or lies in one run.

        >>> order = Order.of((4, 6), Cut(1, 1, 2))
        >>> list(order.ranges(1, 12, 12)), list(order.ranges(1, 5, 2))
        ([(1, 6), (6, 12)], [(1, 3), (3, 5)])
        """
        step = most // self.period * self.run
        while start < stop:
            ends = (start // step + 1) * step if step else min((start // self.run + 1) * self.run, start + most)
            end = min(stop, ends, (start // self.part + 1) * self.part)
            yield start, end
            start = end

    def views(self, window: torch.Tensor, low: int, start: int, stop: int) -> list[torch.Tensor]:
        """Elements [start, stop) of the order, all of one part, as views of a window of the flattened leaf.

        window: 1-D and contiguous, the flattened leaf from element `low` on. One after the other the views hold the
        elements in order. There are at most three, for a range may begin and end within a run.

        >>> window = torch.arange(24)
        >>> [view.tolist() for view in Order.of((4, 6), Cut(1, 1, 2)).views(window, 0, 1, 10)]
        [[1, 2], [[6, 7, 8], [12, 13, 14]], [18]]
        """
        found = []
        while start < stop:
            place, left = self.at(start) - low, self.run - start % self.run
            rows = (stop - start) // self.run
            if left < self.run or rows < 2:  # within one run
                size = min(left, stop - start)
                found.append(window[place : place + size])
            else:
                size = rows * self.run
                offset = window.storage_offset() + place
                found.append(window.as_strided((rows, self.run), (self.period, 1), offset))
            start += size
        return found


def split_like(flat: torch.Tensor, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A 1-D tensor cut into tensors of the shapes of `views`, one after the other."""
    return [x.view(y.shape) for x, y in zip(flat.split([y.numel() for y in views]), views, strict=True)]
