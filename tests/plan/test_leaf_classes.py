"""leaf_classes: which leaves mirror one another, by the ends of their paths and their shapes; and the stage of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero
from fzero import tree
from fzero.plan.block_scales import scales, with_scales
from fzero.plan.leaf_classes import LeafClass, leaf_classes, stages_of


def classes(*paths: str, **shapes: tuple[int, ...]) -> dict[str, list[tuple[str, str]]]:
    """By the common path of a class, its (prefix, path of the leaf). shapes: of leaves that are not (2, 3), by their
    paths with `_` for `/`."""
    leaves = [torch.empty(shapes.get(path.replace("/", "_"), (2, 3)), device="meta") for path in paths]
    found = leaf_classes([*range(len(paths))], paths, leaves)
    assert sorted(i for c in found for _, i in c.members) == [*range(len(paths))]
    return {c.path: [(prefix, paths[i]) for prefix, i in c.members] for c in found}


def test_moments_mirror_their_parameter() -> None:
    assert classes("params/a/w", "params/b/w", "opt/mu/a/w", "opt/nu/b/w", "ema/a/w") == {
        "a/w": [("params", "params/a/w"), ("opt/mu", "opt/mu/a/w"), ("ema", "ema/a/w")],
        "b/w": [("params", "params/b/w"), ("opt/nu", "opt/nu/b/w")],
    }


def test_a_leaf_of_another_shape_or_of_the_same_entry_is_apart() -> None:
    assert len(leaf_classes([0, 1], ["params/w", "mu/w"], [torch.ones(2), torch.ones(3)])) == 2
    assert len(classes("params/x/w", "params/y/w")) == 2


def test_the_longest_end_decides() -> None:
    assert classes("params/w", "params/a/w", "mu/a/w") == {
        "w": [("params", "params/w")], "a/w": [("params", "params/a/w"), ("mu", "mu/a/w")]
    }  # fmt: skip


def test_an_entry_that_is_one_leaf() -> None:
    """Its moment is below an entry of its own; of several such leaves none is the one."""
    assert classes("w", "opt/mu/w") == {"w": [("", "w"), ("opt/mu", "opt/mu/w")]}
    assert classes("params", "mu/params") == {"params": [("", "params"), ("mu", "mu/params")]}
    assert len(classes("a", "b")) == 2


def test_names_of_a_class() -> None:
    paths = ["params/a/w", "opt_state/mu/a/w"]
    (one,) = leaf_classes([0, 1], paths, [torch.ones(2, 3)] * 2)
    assert (one.key, one.path, one.shown(paths)) == (("a", "w"), "a/w", "params/a/w")
    assert one.names(paths) == ["a/w", *paths]
    assert LeafClass(("w",), (("params", 0),), lead=torch.ones(2, 3, dtype=torch.bfloat16)).nbytes == 12


def staged(zero: Any) -> list[Any]:
    state = {"params": {"a": torch.ones(2), "b": torch.ones(2)}, "mu": {"a": torch.ones(2)}, "n": torch.tensor(1)}
    paths, leaves, _ = tree.flatten(state)
    flat = [i for i, leaf in enumerate(leaves) if leaf.ndim]
    return stages_of(leaf_classes(flat, paths, leaves), paths, zero)


def test_the_first_rule_that_matches_a_member_says_the_stage() -> None:
    assert staged(2) == [2, 2]
    assert staged({"mu/a": 1, "a": 3, "**": 0}) == [1, 0]
    assert staged({"a": 3, "**": 0}) == [3, 0]
    assert staged({"params/**": 3, "**": 0}) == [3, 3]
    assert staged({"n": 1, "**": 3}) == [3, 3], "a rule may be of a leaf in no bucket"


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"a": 3}, "zero has no rule for 'params/b': add a last rule, as in {..., '**': 1}"),
        ({"c": 3, "**": 1}, "the zero rule 'c' matches no leaf"),
        ({"params/**": 3, "aa/**": 1, "**": 1}, "the zero rule 'aa/\\*\\*' matches no leaf. Did you mean 'a/\\*\\*'?"),
    ],
)
def test_a_rule_that_misses_is_refused(zero: Any, message: str) -> None:
    with pytest.raises(fzero.SpecError) as error:
        staged(zero)
    assert message.replace("\\", "") in str(error.value)


# --- moments in blocks of 64 ------------------------------------------------------------------------------------------

BYTES, NUMBERS = torch.zeros(10, 13, dtype=torch.int8), torch.zeros(3)  # 130 codes: three blocks


@pytest.mark.parametrize(
    ("paths", "leaves", "found"),
    [
        (["mu/codes/w", "mu/scales/w"], [BYTES, NUMBERS], {1: 0}),
        (["mu/scales/w", "mu/codes/w"], [NUMBERS, BYTES], {0: 1}),
        (["codes/scales/w", "codes/codes/w"], [NUMBERS, BYTES], {0: 1}),
        (["mu/codes/w", "mu/scales/w"], [BYTES, torch.zeros(2)], {}),
        (["mu/codes/w", "mu/scales/w"], [BYTES, torch.zeros(3, 1)], {}),
        (["mu/codes/w", "mu/scales/w"], [BYTES, torch.zeros(3, dtype=torch.int64)], {}),
        (["mu/codes/w", "mu/scales/w"], [BYTES.float(), NUMBERS], {}),
        (["mu/codes/w", "nu/scales/w"], [BYTES, NUMBERS], {}),
        (["mu/codes/w", "mu/scales/w"], [BYTES[:0], torch.zeros(0)], {}),
        (["mu/codes/w", "mu/w"], [BYTES, NUMBERS], {}),
    ],
)
def test_scales_are_those_of_the_codes_beside_them(
    paths: list[str], leaves: list[torch.Tensor], found: dict[int, int]
) -> None:
    assert scales(paths, leaves) == found
    for path in paths:
        assert scales(paths, leaves, per_rank=[path]) == {}, "what each rank keeps for itself is whole"


def test_scales_join_the_class_of_their_codes() -> None:
    paths = ["mu/codes/w", "mu/scales/w", "params/w", "nu/codes/v"]
    leaves = [BYTES, NUMBERS, torch.zeros(10, 13), BYTES]
    made = with_scales(leaf_classes([0, 2, 3], paths, leaves), {1: 0}, paths, leaves)
    (one,) = made
    assert one.members == (("params", 2), ("mu/codes", 0), ("mu/scales", 1)), "codes without a number are no class"
