"""leaf_classes: leaves that mirror one another, as a parameter, its moments and its EMA: they take the same place in
buckets of one geometry. All that is decided of them is in one record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def leaf_classes(flat: list[int], paths: Sequence[str], leaves: Sequence[torch.Tensor]) -> list[LeafClass]:
    """Unites a leaf with the leaf of another top-level entry whose path below that entry is the longest to end its own,
    or to be its own but for a stretch inside it: `opt/critic/mu/w` with `nets/critic/w`."""
    split = {i: tuple(paths[i].split("/")) for i in flat}
    anchors: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    for i in flat:
        anchors.setdefault((split[i][1:], tuple(leaves[i].shape)), []).append(i)
    bare: dict[tuple[int, ...], list[int]] = {}
    for i in flat:
        if len(split[i]) == 1:
            bare.setdefault(tuple(leaves[i].shape), []).append(i)
    parent = {i: i for i in flat}

    def find(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i in flat:
        for cut in range(1, len(split[i]) + 1):
            hits = anchors.get((split[i][cut:], tuple(leaves[i].shape)), [])
            others = [j for j in hits if split[j][0] != split[i][0]]
            whole = [j for j in bare.get(tuple(leaves[i].shape), []) if split[j] == split[i][cut:] and j != i]
            if cut == len(split[i]):  # nothing left to compare: only the one leaf that is an entry by itself
                others = others if len(others) == 1 and cut > 1 else []
            inside = [] if whole or others else _but_inside(split[i], cut - 1, anchors, tuple(leaves[i].shape))
            if whole or others or inside:
                low, high = sorted((find((whole or others or inside)[0]), find(i)))
                parent[high] = low
                break
    members: dict[int, list[int]] = {}
    for i in flat:
        members.setdefault(find(i), []).append(i)
    return [_class(group, split) for group in sorted(members.values(), key=min)]


def _but_inside(
    own: tuple[str, ...], left_out: int, anchors: Mapping[tuple[tuple[str, ...], tuple[int, ...]], list[int]],
    shape: tuple[int, ...],
) -> list[int]:  # fmt: skip
    """The leaves whose path below their entry is a leaf's own but for so many parts inside it."""
    starts = range(2, len(own) - left_out) if left_out else ()
    found = (anchors.get((own[1:start] + own[start + left_out :], shape), []) for start in starts)
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
