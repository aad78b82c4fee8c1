"""contents: what a buffer holds when a program runs on terms: a term for each range, and tiles that are not one yet."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Any

from fzero.ir.records import Ref
from fzero.verify.terms import Undefined

Span = tuple[int, int]


class Tiles(tuple[Any, ...]):
    """(the elements of a tile, the terms of a leaf by tile, as a tuple); None for one that was never written."""


def tile_of(held: Any, tile: tuple[int, int], ref: Ref) -> Any:
    """The term of one tile of a leaf."""
    if not isinstance(held, Tiles):
        return held
    size, terms = held
    if size != tile[1] or terms[tile[0]] is None:
        raise Undefined(f"{ref} reads a tile that was not computed")
    return terms[tile[0]]


def with_tile(held: Any, tile: tuple[int, int], value: Any, parts: int) -> Any:
    """The terms of a leaf in so many tiles once one tile has this one: one term where all tiles have it."""
    number, size = tile
    terms = [None if isinstance(held, Tiles) else held] * parts
    if isinstance(held, Tiles) and held[0] == size:
        terms = list(held[1])
    terms[number] = value
    return value if all(other == value for other in terms) else Tiles((size, tuple(terms)))


class Content:
    """The terms that a buffer holds, by (start, stop); no two overlap. `own_slices` are the ranges of which only the
    own slice was written. Only `put` writes."""

    def __init__(self, terms: Mapping[Span, Any] | None = None) -> None:
        self.terms: dict[Span, Any] = dict(terms or {})
        self.own_slices: set[Span] = set()
        self.order = sorted(key for key in self.terms if key[0] < key[1])

    def put(self, key: Span, value: Any, *, own_slice: bool = False) -> None:
        """Sets the term of a range, or of the own slice of it. Removes the terms that it overlaps."""
        if key not in self.terms and key[0] < key[1]:
            self._drop(key)
            insort(self.order, key)
        self.terms[key] = value
        (self.own_slices.add if own_slice else self.own_slices.discard)(key)

    def _drop(self, key: Span) -> None:
        position = bisect_left(self.order, key)
        if position and self.order[position - 1][1] > key[0]:
            position -= 1
        while position < len(self.order) and self.order[position][0] < key[1]:
            gone = self.order.pop(position)
            del self.terms[gone]
            self.own_slices.discard(gone)
