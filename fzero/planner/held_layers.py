"""held_layers: what the layers of a model hold at the fullest moment, by how many of them are recomputed.

Layers that are recomputed are the first ones. In a pipeline a role holds the layers of each microbatch that is in
flight, and the first roles have the most of these: so the last layers that keep everything cost least, and often
nothing.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cache

from fzero.pipeline import Schedule
from fzero.planner.candidates import Candidate
from fzero.planner.deep import cut_of
from fzero.planner.problem import Problem
from fzero.planner.programs import by_rates


@dataclass(frozen=True)
class HeldLayers:
    """depth: how many layers there are. share: of all that a layer keeps, what is kept of one that is recomputed.
    order: of the roles; None where there is one. chunk_of: of each layer."""

    depth: int
    share: float
    order: Schedule | None = None
    chunk_of: tuple[int, ...] = ()

    def most(self, count: int) -> float:
        """What the fullest rank holds if so many layers are recomputed, in units of a layer that keeps everything.

        >>> HeldLayers(8, 0.25).most(0), HeldLayers(8, 0.25).most(8)
        (8.0, 2.0)
        """
        kept = [self.share] * count + [1.0] * (self.depth - count)
        if self.order is None:
            return sum(kept)
        weights = [0.0] * self.order.chunks
        for chunk, weight in zip(self.chunk_of, kept, strict=True):
            weights[chunk] += weight
        return max(self.order.most_held(weights))

    def fewest(self, budget: float, known: tuple[int, float], each: float) -> int:
        """The fewest layers by which the bytes fit; all if none do. known: a number of layers and the bytes that it
        takes. each: bytes of a layer that keeps everything.

        >>> HeldLayers(8, 0.25).fewest(6.5, (0, 8.0), 1.0)
        2
        """
        most, (count, nbytes) = cache(self.most), known
        fixed = nbytes - each * most(count)
        return bisect.bisect_left(range(self.depth), -budget, key=lambda n: -(fixed + each * most(n)))


def held_layers(problem: Problem, one: Candidate, depth: int, share: float) -> HeldLayers:
    """Of a candidate. Raises FzeroError where its model is not cut for it."""
    stacks = problem.equal.stacks if problem.equal is not None else ()
    if one.ranks.roles == 1 or len(stacks) != 1:
        return HeldLayers(depth, share)
    spec = one.spec(problem.spec, problem.rules.shard)
    cut = cut_of(problem, spec, by_rates(problem.machine, one.ranks))
    if cut is None:
        return HeldLayers(depth, share)
    (stack,) = stacks
    chunks = tuple(cut.chunk("/".join((*stack, str(number)))) for number in range(depth))
    return HeldLayers(depth, share, spec.parallel.order.order(one.ranks.roles, one.microbatches), chunks)
