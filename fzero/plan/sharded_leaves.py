"""sharded_leaves: which dims of leaves the axes of a mesh cut, by the rules of `Spec(shard=...)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fzero import tree
from fzero.errors import SpecError
from fzero.ir.mesh import Mesh
from fzero.ir.records import ALIGN
from fzero.plan import whole_leaves
from fzero.plan.block_scales import CODES
from fzero.plan.followers import Follows
from fzero.plan.leaf_classes import LeafClass
from fzero.shard.layouts import WHOLE, Layout
from fzero.shard.partition import P


def layouts(
    classes: Sequence[LeafClass],
    follows: Sequence[Follows | None],
    paths: Sequence[str],
    leaves: Sequence[torch.Tensor],
    rules: Mapping[str, P],
    mesh: Mesh,
) -> list[Layout]:
    """Of each class, its layout: leaves that mirror one another lie alike, and one that follows another as that does,
    unless a rule is for it alone."""
    used: set[str] = set()
    found = [WHOLE] * len(classes)
    names = [c.names(paths) for c in classes]
    for number, leaf_class in sorted(enumerate(classes), key=lambda row: follows[row[0]] is not None):
        of = follows[number]
        rule = next((r for r in rules if any(tree.matches(r, name) for name in names[number])), None)
        if of is not None and (rule is None or any(tree.matches(rule, name) for name in names[of.leader])):
            found[number] = of.layout(found[of.leader])
            continue
        if rule is None:
            continue
        used.add(rule)
        shape = leaves[leaf_class.members[0][1]].shape
        found[number] = rules[rule].layout(leaf_class.shown(paths), shape, mesh)
        if found[number]:
            _check_whole(leaf_class, paths, leaves, rule)
    for rule in rules:
        if rule not in used and rule != "**":
            _check_unused(rule, rules, classes, paths, leaves)
    return found


def _check_unused(
    rule: str,
    rules: Mapping[str, P],
    classes: Sequence[LeafClass],
    paths: Sequence[str],
    leaves: Sequence[torch.Tensor],
) -> None:
    """Raises SpecError for a rule that placed no leaf, with the reason. `P()` for a leaf that is never cut is right."""
    for leaf_class in classes:
        own = leaf_class.names(paths)
        if any(tree.matches(rule, name) for name in own):
            first = next(r for r in rules if any(tree.matches(r, name) for name in own))
            if rules[rule] == rules[first]:  # as for the same matrix of two networks: it says what is so
                return
            raise SpecError(
                f"Spec(shard=...): the rule {rule!r} places no leaf: {first!r} comes before it and places "
                f"{leaf_class.shown(paths)}, and what mirrors it lies alike. Put {rule!r} first, give both the same P, "
                "or leave it out"
            )
    cut = {i for leaf_class in classes for _, i in leaf_class.members}
    for i, path in enumerate(paths):
        below = path.partition("/")[2]
        if i not in cut and (tree.matches(rule, path) or (below and tree.matches(rule, below))):
            if not rules[rule].axes:
                return
            raise SpecError(
                f"Spec(shard=...): the rule {rule!r} is to cut {path}, of shape {tuple(leaves[i].shape)} and "
                f"{leaves[i].dtype}. Leaves of no dim, without elements, per rank, of integers or complex are held "
                "whole: leave the rule out"
            )
    known = {c.path for c in classes}
    raise SpecError(f"Spec(shard=...): the rule {rule!r} matches no leaf.{tree.suggest(rule, known)}")


def _check_whole(leaf_class: LeafClass, paths: Sequence[str], leaves: Sequence[torch.Tensor], rule: str) -> None:
    """Raises SpecError for a sharded leaf whose optimizer needs all of it, or cuts it into blocks of its own."""
    path = leaf_class.shown(paths)
    whole = f"shard={{{path!r}: P(), ...}} before {rule!r}"
    fix = f"Take adamw for it (fzero.optim.multi_transform), or keep it whole: {whole}"
    for prefix, i in leaf_class.members:
        if whole_leaves.asks(prefix):
            raise SpecError(f"shard: {path} is stepped as a whole matrix ({prefix}), so no rank may hold a part. {fix}")
        if leaves[i].dtype in CODES:
            raise SpecError(f"shard: {path} has moments in blocks of {ALIGN} elements, which a part would cut. {fix}")
