"""some_layers: as few layers are recomputed as the memory asks for, where all of them fit and none of them does.

A layer that is recomputed takes the same seconds as every other, so the fewest that fit are the fastest. How many these
are follows from what layers hold (`held_layers`). One layer less is the proof, as far as `TRIES` go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fzero.errors import FzeroError
from fzero.passes.recompute import GATHERS
from fzero.planner.candidates import Candidate
from fzero.planner.deep import is_deep, shallow_say
from fzero.planner.equal_layers import Layers, Stack
from fzero.planner.held_layers import held_layers
from fzero.planner.planned import Row
from fzero.planner.search import Search

MOST_SHARE = 0.9  # kept of layers that are recomputed: on one rank, which gathers nothing, it may be all
A_PROBE = 0.5  # of a try
TRIES, OPS = 5, 15_000  # programs that are lowered in full: as many as have so many ops, and not more than that
ROOM = 0.01  # of the budget, left by what is proposed for a deep pipeline, of which few can be tried
BY_SKETCH = 0.95  # of the fastest's seconds, what a candidate may take that the sketch alone speaks of
DIGITS = "0123456789"
SPECIAL = {*"*[]"}  # characters of rules


@dataclass(frozen=True)
class FirstLayers:
    """A value of `remat`: the first `count` of `depth` layers of each stack are recomputed. They hold their values the
    longest. rest: the value for all others, "none" or "gathers"."""

    count: int
    depth: int
    stacks: tuple[Stack, ...]
    rest: str = "none"

    @property
    def rules(self) -> dict[str, str]:
        """The value as `Spec(remat=)` takes it.

        >>> FirstLayers(12, 24, (("blocks",),)).rules
        {'blocks/[0123456789]/**': 'full', 'blocks/1[01]/**': 'full'}
        """
        first = {"/".join((*stack, n, "**")): "full" for stack in self.stacks for n in numbers_below(self.count)}
        return first if self.rest == "none" else {**first, "**": self.rest}

    def __str__(self) -> str:
        return f"{self.count} of {self.depth} layers" + (f" and {self.rest}" if self.rest != "none" else "")


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
    left, tried = float(TRIES), set[Candidate]()
    while left >= 1:
        between = [found for found in _between(done, problem.equal.depth) if found[1] not in tried]
        seconds, one = min(between, key=lambda found: found[0], default=(best.seconds, None))
        if one is None or seconds >= best.seconds:
            break
        if _probes(done, one):
            left -= A_PROBE
            continue  # it may no longer be the fastest
        tried.add(one)
        fitted, left = _fewest(done, one, problem.equal, left)
        if fitted is not None:
            done.correct(fitted, seconds)
            best = min(done.fitting, key=lambda row: row.seconds)
    return best if isinstance(best.candidate.remat, FirstLayers) else None


def _probes(done: Search, one: Candidate) -> bool:
    """Whether shallow programs were lowered that say what all layers take, and none: where that takes a second."""
    left = [end for end in (one, replace(one, remat="full")) if end not in done.rows]
    if not left or not is_deep(done.problem) or one.ranks.roles > 1:
        return False
    for end in left:
        done.row(end)
    return True


def _fewest(done: Search, one: Candidate, layers: Layers, left: float) -> tuple[Row | None, float]:
    """(the row with the fewest layers recomputed that fits, how much may still be tried): proposed by what layers hold,
    then by what each proposal was found to take, until one layer less does not fit, or is no faster. One that was too
    large is mended once, also where no more may be tried."""
    try:
        held, fitted = held_layers(done.problem, one, layers.depth, min(done.share, MOST_SHARE)), None
    except FzeroError:  # as of a schedule for other microbatches
        return None, left
    full = replace(one, remat="full")
    large = is_deep(done.problem) and one.ranks.roles > 1
    budget = done.problem.budget * (1 - ROOM * large)
    each = _saved(done, one, full) / (held.most(0) - held.most(layers.depth))
    if each <= 0:
        return None, left
    low, high = 0, layers.depth  # of numbers of layers, one that does not fit, and one that does
    count = held.fewest(budget, (high, done.likely(full)[1]), each)
    count, mended = min(max(count, 1), high - 1), False
    while (left >= 1 or (low and not mended and fitted is None)) and low < count < high:
        mended = bool(low)
        first = FirstLayers(count, layers.depth, tuple(sorted(layers.stacks)), one.remat)
        row = done.row_in_full(replace(one, remat=first), presses=not large)  # another layer is what mends it
        left -= max(1, done.ops(row.candidate) * TRIES / OPS)
        fits = done.fits(row)
        if row.refused or (fits and fitted is not None and row.seconds >= fitted.seconds):
            break
        fitted, low, high = (row, low, count) if fits else (fitted, count, high)
        count = max(held.fewest(budget, (count, row.peak), each), low + 1)
        count = min(count, high - 1) if fitted is not None else count
    return fitted, left


def _saved(done: Search, one: Candidate, full: Candidate) -> int:
    """The bytes that all layers save: as both were found, or as the sketch says of both."""
    if one in done.rows and full in done.rows:
        return done.rows[one].peak - done.rows[full].peak
    return done.estimates[one][1] - done.estimates[full][1]


def _between(done: Search, depth: int) -> Iterator[tuple[float, Candidate]]:
    """(seconds, a candidate) where all layers fit and none does: at most those on the line between both."""
    budget, fastest = done.problem.budget, min(row.seconds for row in done.fitting)
    for one in done.estimates:
        if one.remat not in ("none", GATHERS):
            continue
        if (full := replace(one, remat="full")) not in done.estimates:
            continue  # as of the default
        if any(end in done.rows and done.rows[end].refused for end in (one, full)):
            continue
        seconds, peak = done.likely(one)
        slower, least = done.likely(full)
        if peak <= budget or least >= budget or peak <= least:
            continue
        between = seconds + (peak - budget) / (peak - least) * (slower - seconds)
        if not is_deep(done.problem) or shallow_say(done.problem, one.ranks):
            yield between, one
        elif between < BY_SKETCH * fastest:
            yield between / BY_SKETCH, one
