"""leaf_classes: leaves that mirror one another, as a parameter, its moments and its EMA: they take the same place in
buckets of one geometry. All that is decided of them is in one record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch

from fzero import tree
from fzero.errors import SpecError
from fzero.kernels.codecs import EXACT, Coding
from fzero.plan.stages import Stage
from fzero.shard.layouts import WHOLE, Layout

NOTHING = torch.empty(0, device="meta")


@dataclass(frozen=True)
class LeafClass:
    """Leaves that mirror one another.

    key: their common path. members: (column prefix, index of the leaf), a floating-point one first. layout: how each
    lies over the axes that cut dims. lead: one rank's part of the first. stage: by `zero`. cast: the narrowest dtype
    that it may be gathered in. coding: the codecs of its messages. chunk: of a pipeline, which keeps it.
    """

    key: tuple[str, ...]
    members: tuple[tuple[str, int], ...]
    layout: Layout = WHOLE
    lead: torch.Tensor = NOTHING
    stage: Stage = 0
    cast: torch.dtype = torch.float32
    coding: Coding = EXACT
    chunk: int = 0

    @property
    def path(self) -> str:
        return "/".join(self.key)

    @property
    def nbytes(self) -> int:
        """Of one rank's part of the first member."""
        return self.lead.numel() * self.lead.dtype.itemsize

    def names(self, paths: Sequence[str]) -> list[str]:
        """What a rule may match: the common path, and the paths of the members."""
        return [self.path, *(paths[i] for _, i in self.members)]

    def shown(self, paths: Sequence[str]) -> str:
        """The path by which a user knows them: the parameter's, which is the shortest."""
        return min((paths[i] for _, i in self.members), key=len)


def leaf_classes(
    flat: list[int], paths: Sequence[str], leaves: Sequence[torch.Tensor], is_param: Sequence[bool] = ()
) -> list[LeafClass]:
    """Unites a leaf with the leaf of another top-level entry whose path below that entry is the longest to end its own,
    or to be its own but for a stretch inside it: `opt/critic/mu/w` with `nets/critic/w`. Of two nets' moments
    (`d_opt/mu/w`, `g_opt/mu/w`) each is united with a parameter rather, which may be of its entry: `g/opt/mu/w` with
    `g/net/w`. is_param: of each leaf, if it is known."""
    split = {i: tuple(paths[i].split("/")) for i in flat}
    trained = {i for i in flat if i < len(is_param) and is_param[i]}
    ends, parent = _Ends(flat, split, leaves, trained), {i: i for i in flat}

    def find(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i in flat:
        twins: list[int] = []
        for cut in range(1, len(split[i]) + 1):
            found = ends.hits(i, cut) or (ends.beside(i, cut) if trained and i not in trained else [])
            twins = twins if twins and trained.isdisjoint(found) else found
            sibling = twins and trained and trained.isdisjoint({i, *twins})  # the moment of another net, perhaps
            if twins and not (sibling and all(len(split[j]) == len(split[i]) for j in twins)):
                break
        if twins:
            low, high = sorted((find(twins[0]), find(i)))
            parent[high] = low
    members: dict[int, list[int]] = {}
    for i in flat:
        members.setdefault(find(i), []).append(i)
    return [_class(group, split) for group in sorted(members.values(), key=min)]


class _Ends:
    """The leaves whose paths end as that of another leaf."""

    def __init__(self, flat: list[int], split: Mapping[int, tuple[str, ...]], leaves: Sequence[torch.Tensor],
                 trained: AbstractSet[int]) -> None:  # fmt: skip
        self.split = split
        self.shape = {i: tuple(leaves[i].shape) for i in flat}
        self.below: dict[tuple[object, ...], list[int]] = {}  # by the path below the entry
        self.bare: dict[tuple[object, ...], list[int]] = {}
        self.inside: dict[tuple[object, ...], list[int]] = {}  # parameters, by their path without a part inside
        for i in flat:
            own, shape = split[i], self.shape[i]
            self.below.setdefault((own[1:], shape), []).append(i)
            if len(own) == 1:
                self.bare.setdefault((own, shape), []).append(i)
            for at in range(1, len(own) - 1) if i in trained else ():
                self.inside.setdefault((own[:at], own[at + 1 :], shape), []).append(i)

    def hits(self, i: int, cut: int) -> list[int]:
        """The leaves that end as a leaf does behind so many parts of its path, the closest kind of them."""
        own, shape = self.split[i], self.shape[i]
        others = self._others(i, own[cut:])
        if cut == len(own):  # nothing left to compare: only the one leaf that is an entry by itself
            others = others if len(others) == 1 and cut > 1 else []
        whole = [j for j in self.bare.get((own[cut:], shape), ()) if j != i]
        return whole or others or self._but_inside(i, cut - 1)

    def _others(self, i: int, below: tuple[str, ...]) -> list[int]:
        """The leaves of this path below another entry."""
        found = self.below.get((below, self.shape[i]), ())
        return [j for j in found if self.split[j][0] != self.split[i][0]]

    def _but_inside(self, i: int, left_out: int) -> list[int]:
        """Those of whom the path below their entry is a leaf's own but for so many parts inside it."""
        own = self.split[i]
        starts = range(2, len(own) - left_out) if left_out else ()
        found = (self._others(i, own[1:start] + own[start + left_out :]) for start in starts)
        return next((hits for hits in found if hits), [])

    def beside(self, i: int, cut: int) -> list[int]:
        """The parameters that begin as a leaf does, too, and have one part where it has several: `net`, `opt/mu`."""
        own = self.split[i]
        found = (self.inside.get((own[:at], own[cut:], self.shape[i]), []) for at in range(cut - 2, 0, -1))
        return next((hits for hits in found if hits), [])


def _class(group: list[int], split: Mapping[int, tuple[str, ...]]) -> LeafClass:
    common = 0
    if len(group) > 1:
        shortest = min(len(split[i]) for i in group)
        while common < shortest and len({split[i][-1 - common] for i in group}) == 1:
            common += 1
    else:
        common = max(len(split[group[0]]) - 1, 0)
    prefixes = tuple(("/".join(split[i][: len(split[i]) - common]), i) for i in group)
    key = split[group[0]][len(split[group[0]]) - common :] or split[group[0]]
    return LeafClass(key, prefixes)


def stages_of(classes: Sequence[LeafClass], paths: Sequence[str], zero: Stage | Mapping[str, Stage]) -> list[Stage]:
    rules = zero if isinstance(zero, Mapping) else {"**": zero}
    used: set[str] = set()
    stages = []
    for leaf_class in classes:
        names = leaf_class.names(paths)
        rule = next((r for r in rules if any(tree.matches(r, name) for name in names)), None)
        if rule is None:
            raise SpecError(f"zero has no rule for {names[1]!r}: add a last rule, as in {{..., '**': 1}}")
        used.add(rule)
        stages.append(rules[rule])
    every = {c.path for c in classes} | {*paths} | {path.partition("/")[2] for path in paths}  # 0-d ones too
    for rule in rules:
        if rule not in used and not any(tree.matches(rule, name) for name in every) and rule != "**":
            known = {"/".join(c.key[: n + 1]) + "/**" for c in classes for n in range(len(c.key))}
            raise SpecError(f"the zero rule {rule!r} matches no leaf.{tree.suggest(rule, known)}")
    return stages
