"""order: the order in which the elements of a leaf are counted.

A leaf is counted as it is flattened. A leaf that lies in parts over ranks by its dims is counted part by part instead:
the part of the first place, flattened, then that of the second, and so on. So what a rank holds of it is one range, and
so is each slice of that which ZeRO or a checkpoint cuts.

In the flattened leaf such a part lies in *runs* of equal length, in nested loops of equal distances. For a leaf of
shape (4, 6) over two ranks:

| cut | loops (times, distance) | run | the first rank's elements of the flattened leaf |
|---|---|---|---|
| dim 0 | | 12 | 0 to 11 |
| dim 0, two groups | (2, 12) | 6 | 0 to 5, 12 to 17 |
| dim 1 | (4, 6) | 3 | 0 to 2, 6 to 8, 12 to 14, 18 to 20 |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fzero.shard.layouts import Layout


@dataclass(frozen=True, slots=True)
class DimCut:
    """Each of `groups` equal parts of dim `dim` lies over `ranks` ranks."""

    dim: int
    groups: int
    ranks: int


def cuts(layout: Layout) -> tuple[DimCut, ...]:
    """The cuts of dims of a layout, without the names of its axes: the outer one first."""
    return tuple(DimCut(place.dim, place.groups, cut.n) for cut, place in layout.dims)


@dataclass(frozen=True, slots=True)
class Order:
    """The order of a leaf that lies in parts. A leaf that is whole has one part of one run.

    ranks: of each cut, (its ranks, the distance in the flattened leaf from one's part to the next one's), the outer cut
    first. loops: (times, distance) of the runs of a part, the outer loop first. run: elements of a run.

    >>> Order.of((4, 6)), Order.of((4, 6), [DimCut(1, 1, 2)])
    (Order(ranks=(), loops=(), run=24), Order(ranks=((2, 3),), loops=((4, 6),), run=3))
    >>> Order.of((4, 6), [DimCut(0, 1, 2), DimCut(1, 1, 2)])
    Order(ranks=((2, 12), (2, 3)), loops=((2, 6),), run=3)
    """

    ranks: tuple[tuple[int, int], ...]
    loops: tuple[tuple[int, int], ...]
    run: int

    @classmethod
    def of(cls, shape: Sequence[int], cuts: Sequence[DimCut] = ()) -> Order:
        """The order of a leaf of this logical shape. Several cuts of one dim have the same groups, and each cuts what
        the one before it leaves."""
        loops, stride = [], math.prod(shape)
        distances = [0] * len(cuts)
        for dim, size in enumerate(shape):
            stride //= size or 1
            own, mine = size, [(i, cut) for i, cut in enumerate(cuts) if cut.dim == dim]
            groups = mine[0][1].groups if mine else 1
            own //= groups
            loops.append((groups, own * stride))
            for i, cut in mine:
                own //= cut.ranks
                distances[i] = own * stride
            loops.append((own, stride))
        return cls(tuple((cut.ranks, far) for cut, far in zip(cuts, distances, strict=True)), *_merged(loops))

    @property
    def parts(self) -> int:
        """In how many parts the leaf lies."""
        return math.prod(ranks for ranks, _ in self.ranks)

    @property
    def numel(self) -> int:
        """The elements of the leaf."""
        return self.parts * self.part

    @property
    def part(self) -> int:
        """The elements of one part."""
        return math.prod(times for times, _ in self.loops) * self.run

    @property
    def block(self) -> int:
        """The elements of the innermost loop of runs, which are at one distance."""
        return self.loops[-1][0] * self.run if self.loops else self.run

    @property
    def period(self) -> int:
        """The distance of the runs of a block in the flattened leaf."""
        return self.loops[-1][1] if self.loops else self.run

    def start(self, place: int) -> int:
        """The place in the flattened leaf of the first element of a part."""
        first = 0
        for ranks, distance in reversed(self.ranks):
            place, rank = divmod(place, ranks)
            first += rank * distance
        return first

    def at(self, i: int) -> int:
        """The place in the flattened leaf of element i of the order.

        >>> [Order.of((4, 6), [DimCut(1, 1, 2)]).at(i) for i in (0, 2, 3, 12)]
        [0, 2, 6, 3]
        """
        number, inside = divmod(i, self.part)
        row, place = divmod(inside, self.run)
        for times, distance in reversed(self.loops):
            row, step = divmod(row, times)
            place += step * distance
        return self.start(number) + place

    def within(self, place: int, low: int, high: int) -> tuple[int, int]:
        """The range of the order that part number `place` holds of elements [low, high) of the flattened leaf.

        >>> Order.of((4, 6), [DimCut(1, 1, 2)]).within(1, 2, 11)
        (12, 17)
        """
        start, stop = (self._below(x - self.start(place)) for x in (low, high))
        return place * self.part + start, place * self.part + stop

    def _below(self, x: int) -> int:
        """How many elements of a part lie below the place x, counted from its first."""
        count, inner = 0, self.part
        for times, distance in self.loops:
            inner //= times
            steps = min(max(x // distance, 0), times)
            count += steps * inner
            if steps == times:
                return count
            x -= steps * distance
        return count + min(max(x, 0), self.run)

    def ranges(self, start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
        """Cuts [start, stop) of the order into ranges that lie within `most` elements of the flattened leaf.

        A range is a number of whole runs of one block, or lies in one run.

        >>> order = Order.of((4, 6), [DimCut(1, 1, 2)])
        >>> list(order.ranges(1, 12, 12)), list(order.ranges(1, 5, 2))
        ([(1, 6), (6, 12)], [(1, 3), (3, 5)])
        """
        step = most // self.period * self.run
        while start < stop:
            first = start // self.block * self.block
            ends = (
                first + ((start - first) // step + 1) * step
                if step
                else min((start // self.run + 1) * self.run, start + most)
            )
            end = min(stop, ends, first + self.block)
            yield start, end
            start = end

    def views(self, window: torch.Tensor, low: int, start: int, stop: int) -> list[torch.Tensor]:
        """Elements [start, stop) of the order, all of one part, as views of a window of the flattened leaf.

        window: 1-D and contiguous, the flattened leaf from element `low` on. One after the other the views hold the
        elements in order. There are at most three in a block, for a range may begin and end within a run.

        >>> window = torch.arange(24)
        >>> [view.tolist() for view in Order.of((4, 6), [DimCut(1, 1, 2)]).views(window, 0, 1, 10)]
        [[1, 2], [[6, 7, 8], [12, 13, 14]], [18]]
        """
        found = []
        while start < stop:
            place, left = self.at(start) - low, self.run - start % self.run
            rows = (min(stop, (start // self.block + 1) * self.block) - start) // self.run
            if left < self.run or rows < 2:  # within one run
                size = min(left, stop - start)
                found.append(window[place : place + size])
            else:
                size = rows * self.run
                offset = window.storage_offset() + place
                found.append(window.as_strided((rows, self.run), (self.period, 1), offset))
            start += size
        return found


def _merged(loops: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...], int]:
    """(loops of more than one step, those that follow one another as one; the run: the innermost, of distance 1)."""
    found: list[tuple[int, int]] = []
    for times, distance in loops:
        if times == 1:
            continue
        if found and found[-1][1] == times * distance:
            found[-1] = (found[-1][0] * times, distance)
        else:
            found.append((times, distance))
    run = found.pop()[0] if found and found[-1][1] == 1 else 1
    return tuple(found), run


def split_like(flat: torch.Tensor, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A 1-D tensor cut into tensors of the shapes of `views`, one after the other."""
    return [x.view(y.shape) for x, y in zip(flat.split([y.numel() for y in views]), views, strict=True)]
