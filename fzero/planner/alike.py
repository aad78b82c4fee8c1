"""alike: what the sketch says of many candidates, by what those most like each were found to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fzero.planner.candidates import Candidate
from fzero.planner.planned import Row


class Alike:
    """The candidates of a problem, as numbers. said: of each the sketch's seconds and bytes."""

    def __init__(self, said: Mapping[Candidate, tuple[float, int]]) -> None:
        self.place = {one: i for i, one in enumerate(said)}
        self._said = np.array(list(said.values()), dtype=float)
        self._numbers = [dict[object, int]() for _ in next(iter(said)).values]
        codes = [[n.setdefault(x, len(n)) for n, x in zip(self._numbers, one.values, strict=True)] for one in said]
        self._codes = np.array(codes, dtype=np.int32).T
        self._rows: tuple[Row, ...] | None = None
        self._corrected = self._said

    def differs(self, one: Candidate) -> NDArray[np.int64]:
        """In how many fields each candidate differs from one."""
        own = [numbers.get(x, -1) for numbers, x in zip(self._numbers, one.values, strict=True)]
        return np.count_nonzero(self._codes != np.array(own)[:, None], axis=0)

    def corrected(self, rows: Sequence[Row]) -> NDArray[np.float64]:
        """(seconds, bytes) of each candidate: as said, times what the rows most like it were found to take over what
        was said of them; the mean of these. rows: of candidates that are here, or are not counted, as refused ones."""
        if self._rows is not None and len(self._rows) == len(rows) and all(map(_is, self._rows, rows)):
            return self._corrected
        self._rows = tuple(rows)
        known = [row for row in rows if not row.refused and row.candidate in self.place]
        if not known:
            self._corrected = self._said
            return self._said
        far = np.array([self.differs(row.candidate) for row in known])
        alike = far == far.min(axis=0)
        mean = np.zeros_like(self._said)
        for row, counts in zip(known, alike, strict=True):
            seconds, nbytes = self._said[self.place[row.candidate]]
            mean += np.outer(counts, (row.seconds / seconds, row.peak / max(nbytes, 1.0)))
        self._corrected = self._said * (mean / alike.sum(axis=0)[:, None])
        return self._corrected


def _is(a: Row, b: Row) -> bool:
    return a is b
