"""block_scales: which numbers are the scales of which codes, and that they go where their codes go."""

from __future__ import annotations

import pytest
import torch

from fzero import tree
from fzero.ir.mesh import Mesh
from fzero.plan.block_scales import scales, with_scales
from fzero.plan.layout import layout
from fzero.plan.leaf_classes import leaf_classes
from fzero.plan.state_plan import Plan
from fzero.state import storage

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


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_have_a_sign_or_none(dtype: torch.dtype) -> None:
    assert scales(["mu/codes/w", "mu/scales/w"], [BYTES.to(dtype), NUMBERS]) == {1: 0}


def test_scales_are_named_by_as_many_components_as_their_codes() -> None:
    paths = ["opt/mu/codes/a/w", "opt/mu/scales/a/w", "params/a/w"]
    leaves = [BYTES, NUMBERS, torch.zeros(10, 13)]
    (one,) = with_scales(leaf_classes([0, 2], paths, leaves), {1: 0}, paths, leaves)
    assert one.key == ("a", "w")
    assert one.members == (("params", 2), ("opt/mu/codes", 0), ("opt/mu/scales", 1))


# --- in a plan --------------------------------------------------------------------------------------------------------


def planned(world: int, zero: int, per_rank: tuple[str, ...] = ()) -> tuple[Plan, list[torch.Tensor]]:
    """Two matrices whose moments are codes; one of the second has a number of scales that is not its blocks'."""
    draw = torch.Generator().manual_seed(0)
    w, v = torch.randn(10, 13, generator=draw), torch.randn(64, 8, generator=draw)
    codes = {name: torch.randint(-9, 9, x.shape, generator=draw, dtype=torch.int8) for name, x in (("w", w), ("v", v))}
    numbers = {"w": torch.randn(3, generator=draw), "v": torch.randn(7, generator=draw)}
    state = {"params": {"w": w, "v": v}, "opt": {"codes": codes, "scales": numbers}}
    paths, values, _ = tree.flatten(state)
    return layout(paths, values, mesh=Mesh((("dp", world),)), zero=zero, per_rank=per_rank), values


@pytest.mark.parametrize(("world", "zero"), [(1, 0), (2, 1), (3, 3)])
def test_every_block_lies_with_its_scale_on_one_rank(world: int, zero: int) -> None:
    plan, values = planned(world, zero)
    place = {leaf.path: leaf for leaf in plan.leaves}
    columns = {name: plan.buffers[place[f"opt/{name}/w"].buffer] for name in ("codes", "scales")}
    assert {buffer.bucket for buffer in columns.values()} == {plan.buffers[place["params/w"].buffer].bucket}
    assert (columns["codes"].per, columns["scales"].per) == (1, 64)
    assert columns["scales"].numel * 64 == columns["codes"].numel
    assert columns["scales"].sharded == columns["codes"].sharded == ("dp" if world > 1 else None)
    assert plan.ref(place["opt/scales/w"]).start * 64 == plan.ref(place["opt/codes/w"]).start
    memory = [storage.shards(plan, values, rank) for rank in range(world)]
    for leaf, value in zip(plan.leaves, values, strict=True):
        assert torch.equal(storage.join(plan, leaf, memory), value), leaf.path


def test_numbers_that_are_no_scales_are_leaves_like_others() -> None:
    """And the codes that they are beside are in the class of their parameter all the same."""
    plan, _ = planned(2, 3)
    place = {leaf.path: leaf for leaf in plan.leaves}
    assert plan.buffers[place["opt/scales/v"].buffer].per == 1
    bucket = plan.buffers[place["params/v"].buffer].bucket
    assert plan.buffers[place["opt/codes/v"].buffer].bucket == bucket
    assert plan.buffers[place["opt/scales/v"].buffer].bucket != bucket


def test_codes_that_each_rank_keeps_for_itself_leave_their_scales_alone() -> None:
    plan, _ = planned(2, 3, per_rank=("opt/codes/w",))
    place = {leaf.path: leaf for leaf in plan.leaves}
    assert (place["opt/codes/w"].slot, place["opt/codes/w"].per_rank) == (None, True)
    assert plan.buffers[place["opt/scales/w"].buffer].per == 1
