"""layers_cut: which layers of a pipeline begin a chunk: so that the largest chunk has the fewest elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from fzero.ir.decisions import Choice

EMPTY = float("inf")  # elements of a cut with an empty chunk: it is none


def fewest_elements(layers: Mapping[str, int], last: int, chunks: int) -> Choice[tuple[str, ...]]:
    """The first layer of each chunk but the first. layers: elements of each, in order, at least as many as chunks.
    last: elements of what comes after them. The runner-up is the best of those that differ by one layer.

    >>> fewest_elements({"blocks/0": 4, "blocks/1": 4, "blocks/2": 4}, 5, 2).value
    ('blocks/2',)
    """
    names, sizes = list(layers), list(layers.values())
    starts = _balanced(sizes, last, chunks)
    near = [(*starts[:i], start + step, *starts[i + 1 :]) for i, start in enumerate(starts) for step in (-1, 1)]
    found = {tuple(starts): 0.0, **dict.fromkeys(near, 0.0)}
    costs = {cut: cost for cut in found if (cost := _largest(sizes, last, cut)) < EMPTY}
    named = {tuple(names[i] for i in cut): cost for cut, cost in costs.items()}
    reason = (
        "the largest chunk of numbered layers, and the head, has the fewest elements. Pipeline(cut=) cuts otherwise"
    )
    return Choice.least(named, tuple(names[i] for i in starts), reason, "elements")


def _largest(sizes: Sequence[int], last: int, starts: Sequence[int]) -> float:
    """The elements of the largest chunk; EMPTY where a chunk has no layer."""
    ends = (0, *starts, len(sizes))
    if any(begin >= end for begin, end in pairwise(ends)):
        return EMPTY
    parts = [sum(sizes[begin:end]) for begin, end in pairwise(ends)]
    return float(max([*parts[:-1], parts[-1] + last]))


def _balanced(sizes: Sequence[int], last: int, chunks: int) -> list[int]:
    """Where chunks after the first begin, so that the largest has the fewest elements: a table over layers, chunks."""
    total = [0, *accumulate(sizes)]
    count = len(sizes)
    best = [[float("inf")] * (count + 1) for _ in range(chunks + 1)]
    where = [[0] * (count + 1) for _ in range(chunks + 1)]
    best[0][0] = 0
    for c in range(1, chunks + 1):
        for end in range(c, count + 1):
            for begin in range(c - 1, end):
                here = total[end] - total[begin] + (last if c == chunks else 0)
                worst = max(best[c - 1][begin], here)
                if worst < best[c][end]:
                    best[c][end], where[c][end] = worst, begin
    starts, end = [], count
    for c in range(chunks, 1, -1):
        end = where[c][end]
        starts.append(end)
    return starts[::-1]
