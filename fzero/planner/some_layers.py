"""some_layers: as few layers are recomputed as the memory asks for, where all of them fit and none of them does.

A layer that is recomputed saves the same bytes and takes the same seconds as every other. So between "none" and "full"
both lie on a line, and the fewest that fit are the fastest. One layer less is the proof, as far as `TRIES` go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fzero.planner.candidates import Candidate
from fzero.planner.deep import is_deep, shallow_say
from fzero.planner.equal_layers import Stack
from fzero.planner.planned import Row
from fzero.planner.search import Search

TRIES, OPS = 5, 15_000  # programs that are lowered in full: as many as have so many ops, and not more than that
DIGITS = "0123456789"
SPECIAL = {*"*[]"}  # characters of rules


@dataclass(frozen=True)
class FirstLayers:
    """A value of `remat`: the first `count` of `depth` layers of each stack are recomputed. They hold their values the
    longest."""

    count: int
    depth: int
    stacks: tuple[Stack, ...]

    @property
    def rules(self) -> dict[str, str]:
        """The value as `Spec(remat=)` takes it.

        >>> FirstLayers(12, 24, (("blocks",),)).rules
        {'blocks/[0123456789]/**': 'full', 'blocks/1[01]/**': 'full'}
        """
        return {"/".join((*stack, n, "**")): "full" for stack in self.stacks for n in numbers_below(self.count)}

    def __str__(self) -> str:
        return f"{self.count} of {self.depth} layers"


def numbers_below(n: int) -> list[str]:
    """Patterns of the numbers from 0 to n - 1, as path rules have them.

    >>> numbers_below(3), numbers_below(10), numbers_below(126)
    (['[012]'], ['[0123456789]'], ['[0123456789]', '[123456789][0123456789]', '1[01][0123456789]', '12[012345]'])
    """
    found, any_ = [], f"[{DIGITS}]"
    for width in range(1, len(str(n)) + 1):
        if n >= 10**width:
            found.append((any_ if width == 1 else f"[{DIGITS[1:]}]") + any_ * (width - 1))
            continue
        for at, digit in enumerate(str(n)):
            low = 1 if at == 0 and width > 1 else 0  # no number begins with 0, but 0
            if of := DIGITS[low : int(digit)]:
                found.append(str(n)[:at] + (f"[{of}]" if len(of) > 1 else of) + any_ * (width - at - 1))
    return found


def fewest_layers(done: Search) -> Row | None:
    """The row of the fastest program in which some layers are recomputed, lowered in full; None where no such program
    fits and is faster than all that fit. What was tried is in the search's rows."""
    problem, best = done.problem, min(done.fitting, key=lambda row: row.seconds, default=None)
    if "remat" in problem.given or problem.equal is None or best is None:
        return None
    if any(SPECIAL & {*part} for stack in problem.equal.stacks for part in stack):
        return None  # a rule would match other paths
    depth, stacks, left = problem.equal.depth, tuple(sorted(problem.equal.stacks)), float(TRIES)
    for seconds, one, count in sorted(_between(done, depth), key=lambda found: found[0]):
        if seconds >= best.seconds or left < 1:
            break
        fitted: Row | None = None
        while left >= 1 and 0 < count < depth:
            row = done.row_in_full(replace(one, remat=FirstLayers(count, depth, stacks)))
            left -= max(1, done.ops(row.candidate) * TRIES / OPS)
            if done.fits(row) and (fitted is None or row.seconds < fitted.seconds):
                fitted, count = row, count - 1
            elif fitted is not None:
                break  # one layer less does not fit, or only by what costs more
            else:
                count = max(count + 1, _more(done, one, row, count, depth))
        if fitted is not None:
            done.correct(fitted, seconds)
            best = min(done.fitting, key=lambda row: row.seconds)
    return best if isinstance(best.candidate.remat, FirstLayers) else None


def _more(done: Search, one: Candidate, row: Row, count: int, depth: int) -> int:
    """How many layers fit, where so many take what a row says: on the line from there to all of them."""
    least = done.likely(replace(one, remat="full"))[1]
    slope = (row.peak - least) / (depth - count)
    return depth - int((done.problem.budget - least) / slope) if slope > 0 else depth


def _between(done: Search, depth: int) -> Iterator[tuple[float, Candidate, int]]:
    """(seconds, a candidate, how many of its layers) where all layers fit and none does, on the line between both."""
    budget, deep = done.problem.budget, is_deep(done.problem)
    for one in done.estimates:
        if one.remat != "none" or (deep and not shallow_say(done.problem, one.ranks)):
            continue  # of a deep model each such program takes minutes
        if (full := replace(one, remat="full")) not in done.estimates:
            continue  # as of the default
        seconds, peak = done.likely(one)
        slower, least = done.likely(full)
        if peak <= budget or least >= budget or peak <= least:
            continue
        part = (peak - budget) / (peak - least)
        yield seconds + part * (slower - seconds), one, min(depth - 1, max(1, math.ceil(part * depth)))
