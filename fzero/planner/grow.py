"""grow: a sequence at any size, from two that differ by one.

A program of d layers and one of d + 1 are the same sequence of tokens, but for a few runs of tokens that the second has
more: a layer's forward, its backward, its update. The program of d + n layers then has each of these runs n times. A
figure that differs between two tokens in the same place (of an op over all layers) grows by as much with each layer.

The runs are found by dynamic programming: as few as possible, and rather such as repeat what is beside them. Whether
this is how a program grows is checked against a third, of d + 2 layers: if what is foretold differs from it in any
token, there is no growth.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

REPEATED, A_RUN = 2, 20  # what a run costs that repeats what is beside it, and any other
ANOTHER_FIGURE, FAR = 1, 2  # what tokens cost that differ in figures alone, and more if these differ by far
NEVER = 1 << 20
Numbers = npt.NDArray[Any]
SAME = 1e-9  # of figures that are not whole numbers


@dataclass(frozen=True, slots=True)
class Token:
    """kind: what must be equal. figures: what may grow."""

    kind: tuple[Any, ...]
    figures: tuple[float, ...] = ()


@dataclass(frozen=True)
class Growth:
    """How a sequence grows by one. pieces: in order, (tokens of the first, those of the second in the same place, the
    run that the second has after them)."""

    pieces: tuple[tuple[Sequence[Token], Sequence[Token], Sequence[Token]], ...]

    def grown(self, times: int) -> list[Token]:
        """The sequence `times` after the first: 0 gives the first, 1 the second."""
        result: list[Token] = []
        for first, second, more in self.pieces:
            result += [_grown(a, b, times) for a, b in zip(first, second, strict=True)]
            result += [*more] * times
        return result


def _grown(a: Token, b: Token, times: int) -> Token:
    if a.figures == b.figures:
        return a
    return Token(a.kind, tuple(x + times * (y - x) for x, y in zip(a.figures, b.figures, strict=True)))


def growth(first: Sequence[Token], second: Sequence[Token]) -> Growth | None:
    """How the first becomes the second; None if tokens of the first are missing there."""
    more = len(second) - len(first)
    places = _aligned(first, second, more) if more >= 0 else None
    if places is None:
        return None
    pieces, begun, at = [], 0, 0  # at: how many were inserted before
    for i, inserted in enumerate([*places, more]):
        if inserted > at or i == len(first):
            pieces.append((first[begun:i], second[begun + at : i + at], second[i + at : i + inserted]))
            begun, at = i, inserted
    return Growth(tuple(pieces))


def checked(first: Sequence[Token], second: Sequence[Token], third: Sequence[Token]) -> Growth | None:
    """The growth of the first two, if it foretells the third."""
    found = growth(first, second)
    if found is None or not _same(found.grown(2), third):
        return None
    return found


def _same(foretold: Sequence[Token], found: Sequence[Token]) -> bool:
    def figures(a: Token, b: Token) -> bool:
        return all(math.isclose(x, y, rel_tol=SAME, abs_tol=1e-15) for x, y in zip(a.figures, b.figures, strict=True))

    return len(foretold) == len(found) and all(
        a.kind == b.kind and figures(a, b) for a, b in zip(foretold, found, strict=True)
    )


def _aligned(first: Sequence[Token], second: Sequence[Token], more: int) -> list[int] | None:
    """Of each token of the first, how many tokens of the second are inserted before its own place there; None if it
    has none. costs[k]: the least cost with k inserted so far."""
    a, b = _numbered(first, second)
    a_kind, b_kind = _numbered([x.kind for x in first], [x.kind for x in second])
    a_figures, b_figures = (_table([x.figures for x in tokens]) for tokens in (first, second))
    again, lanes = _repeated(b, more), np.arange(more + 1)
    costs = np.where(lanes == 0, 0, NEVER)
    steps = []
    for i in range(len(first) + 1):
        costs, came = _with_a_run(costs, again, i)
        steps.append(came)
        if i < len(first):
            here = slice(i, i + more + 1)
            far = (np.abs(b_figures[here] - a_figures[i]) * 2 > np.abs(b_figures[here] + a_figures[i])).any(axis=1)
            other = np.where(b_kind[here] == a_kind[i], ANOTHER_FIGURE + FAR * far, NEVER)
            costs = np.minimum(costs + np.where(b[here] == a[i], 0, other), NEVER)
    if costs[more] >= NEVER:
        return None
    inserted, places = int(steps[-1][more]), []
    for came in reversed(steps[:-1]):
        places.append(inserted)
        inserted = int(came[inserted])
    return places[::-1]


def _with_a_run(costs: Numbers, again: tuple[Numbers, Numbers], at: int) -> tuple[Numbers, Numbers]:
    """(the least costs where a run may be inserted before token `at`, how many were inserted before it)."""
    size, lanes = len(costs), np.arange(len(costs))
    best = np.minimum.accumulate(costs * size + lanes)  # the least cost up to here, and where it is
    by_run = np.concatenate([[NEVER], best[:-1] // size + A_RUN])
    came = np.where(by_run < costs, np.concatenate([[0], best[:-1] % size]), lanes)
    result = np.minimum(costs, by_run)
    places, lengths = again
    near = slice(*np.searchsorted(places, [at, at + size]))
    begun, ended = places[near] - at, places[near] - at + lengths[near]
    begun, ended = begun[ended < size], ended[ended < size]
    repeats = np.full(size, NEVER * size)
    np.minimum.at(repeats, ended, (costs[begun] + REPEATED) * size + begun)
    cheaper = repeats // size < result
    return np.where(cheaper, repeats // size, result), np.where(cheaper, repeats % size, came)


def _repeated(tokens: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """(places in order, lengths) of the runs of at most so many tokens that repeat what is just before, or are repeated
    just behind."""
    places, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for length in range(1, most + 1):
        equal = np.concatenate([[0], np.cumsum(tokens[length:] == tokens[:-length])])
        whole = np.flatnonzero(equal[length:] - equal[:-length] == length)  # a run here, and again behind it
        places.append(np.union1d(whole, whole + length))
        lengths.append(np.full(len(places[-1]), length))
    every, long = np.concatenate(places), np.concatenate(lengths)
    order = np.argsort(every, kind="stable")
    return every[order], long[order]


def _numbered(first: Sequence[Hashable], second: Sequence[Hashable]) -> tuple[Numbers, Numbers]:
    """Both as numbers: equal for equal tokens."""
    numbers: dict[Hashable, int] = {}
    found = [
        np.array([numbers.setdefault(x, len(numbers)) for x in tokens], dtype=np.int64) for tokens in (first, second)
    ]
    return found[0], found[1]


def _table(rows: Sequence[tuple[float, ...]]) -> Numbers:
    """Rows of figures, filled up with zeros."""
    table = np.zeros((len(rows), max(map(len, rows), default=0)))
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table
