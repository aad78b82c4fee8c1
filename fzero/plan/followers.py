"""followers: leaves that belong to another leaf and have another shape, as Adafactor's row and column of a matrix.

A leaf whose path ends as the path of a parameter below its entry follows that parameter: the role of a pipeline that
keeps the one keeps the other. Where its shape is the parameter's without some dims, it lies as the
dims do that it has: whole, where the dim that is cut is one that it lacks. Of several ways to leave dims out (a
square matrix) the first such leaf in the tree lacks the later dims, as `row` before `col`.

A leaf whose path goes on behind the parameter's, as Shampoo's two of a matrix, follows it too, and is not cut.

It stays in a bucket of its own geometry: a slice of its parameter's bucket is no slice of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from fzero.plan.leaf_classes import LeafClass
from fzero.shard.layouts import Layout


@dataclass(frozen=True)
class Follows:
    """What a class follows. leader: the index of that class. dims: which dims of its leaf it has, in order; None where
    its shape does not tell."""

    leader: int
    dims: tuple[int, ...] | None

    def layout(self, of_leader: Layout) -> Layout:
        """How the follower lies if its leader lies so: without the cuts of dims that it lacks.

        >>> from fzero.shard.layouts import AxisCut, Shard
        >>> lies = Layout((AxisCut("tp", 2, Shard(1)),))
        >>> str(Follows(0, (0,)).layout(lies)), str(Follows(0, (1,)).layout(lies))
        ('', 'S0 over tp')
        """
        dims = self.dims or ()
        own = [(cut, place) for cut, place in of_leader.dims if place.dim in dims]
        return Layout(tuple(replace(cut, placement=replace(place, dim=dims.index(place.dim))) for cut, place in own))


def followers(
    classes: Sequence[LeafClass], leaves: Sequence[torch.Tensor], is_param: Sequence[bool]
) -> list[Follows | None]:
    """Of each class, what it follows; None of most.

    >>> w, row, col = torch.zeros(4, 4), torch.zeros(4), torch.zeros(4)
    >>> pairs = [(("w",), "params"), (("row", "w"), "m"), (("col", "w"), "m")]
    >>> classes = [LeafClass(key, ((prefix, i),)) for i, (key, prefix) in enumerate(pairs)]
    >>> followers(classes, [w, row, col], [True, False, False])
    [None, Follows(leader=0, dims=(0,)), Follows(leader=0, dims=(1,))]
    >>> grams = [LeafClass(("w",), (("params", 0),)), LeafClass(("gram", "w", "0"), (("m", 1),))]
    >>> followers(grams, [w, w], [True, False])
    [None, Follows(leader=0, dims=None)]
    """
    leaders = {c.key: number for number, c in enumerate(classes) if any(is_param[i] for _, i in c.members)}
    seen: Counter[tuple[int, tuple[int, ...]]] = Counter()  # followers so far, by their leader and shape
    found: list[Follows | None] = []
    for number, leaf_class in enumerate(classes):
        key, size = leaf_class.key, len(leaf_class.key)
        runs = ((begin, end) for end in range(size, 0, -1) for begin in range(end))  # the ends of the path first
        leader, end = next(((leaders[key[a:b]], b) for a, b in runs if key[a:b] in leaders), (number, size))
        if leader == number or number in leaders.values():
            found.append(None)
            continue
        if end < size:
            found.append(Follows(leader, None))
            continue
        shape, whole = (tuple(leaves[classes[c].members[0][1]].shape) for c in (number, leader))
        ways = [dims for dims in combinations(range(len(whole)), len(shape)) if tuple(whole[d] for d in dims) == shape]
        found.append(Follows(leader, ways[min(seen[leader, shape], len(ways) - 1)] if ways else None))
        seen[leader, shape] += 1
    return found
