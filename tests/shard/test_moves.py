"""Transfers between layouts, by brute force: what each says is done on the tensors of all ranks, in one process."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from by_hand import Draft, aten
from torch import Tensor, fx

from fzero.errors import SpecError
from fzero.ir.mesh import Mesh, parts_of
from fzero.shard.layouts import WHOLE, AxisCut, Layout
from fzero.shard.moves import (
    Move,
    Transition,
    by_way_of_whole,
    check_heads,
    cutting_leaf,
    kind_of,
    transition,
    transitions,
    wire_bytes,
)
from fzero.shard.placements import Flat, Partial, Placement, Replicated, Shard, join, local_shape, own_part, split

MESH = Mesh((("dp_out", 2), ("dp", 3), ("tp", 2)))
RANKS = range(MESH.world_size)
ORDER = ("dp", "dp_out")  # of sums, and of ZeRO's slices: the inner axis first
FLAT = [Layout.over(MESH, axes, Flat()) for axes in ((), ("dp",), ("dp_out",), ORDER)]
PLACEMENTS: list[Placement] = [Replicated(), Shard(0), Shard(1), Shard(0, groups=2), Partial(), Partial("max"), Flat()]


def done(step: Transition, held: list[Tensor]) -> list[Tensor]:
    """What every rank holds after a transfer, from what each held."""
    after = []
    for rank in RANKS:
        place, n = MESH.coordinate(rank, step.axis), MESH.size(step.axis)
        parts = [held[peer] for peer in MESH.peers(rank, step.axis)]
        whole = held[rank] if step.kind == "own_part" else join(parts, step.source)
        assert step.kind != "all_to_all" or isinstance(step.target, Shard)
        after.append(own_part(whole, step.target, n, place))
    return after


def value(seed: int = 0) -> Tensor:
    return torch.randint(-9, 9, (72,), generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("summed", [("dp",), ("dp_out",), ORDER])
@pytest.mark.parametrize("kept", FLAT, ids=str)
def test_a_gradient_comes_to_what_each_rank_updates(summed: tuple[str, ...], kept: Layout) -> None:
    """Sums over the axes on which it is Partial alone: along others it is the same already."""
    addend = {rank: value(sum(MESH.coordinate(rank, axis) * 7**i for i, axis in enumerate(summed))) for rank in RANKS}
    total = torch.stack([addend[peer] for peer in MESH.peers(0, ".".join(summed))]).sum(0)
    held = list(addend.values())
    for step in transitions(Layout.over(MESH, summed, Partial()), kept):
        held = done(step, held)
    assert [x.tolist() for x in held] == [kept.own_part(total, MESH, rank).tolist() for rank in RANKS]


def test_a_sum_of_which_a_slice_is_kept_is_a_reduce_scatter_in_the_order_of_the_sum() -> None:
    grad = Layout.over(MESH, ORDER, Partial())
    kinds = [[f"{step.kind} {step.axis}" for step in transitions(grad, kept)] for kept in FLAT]
    assert kinds == [
        ["all_reduce dp", "all_reduce dp_out"],
        ["reduce_scatter dp", "all_reduce dp_out"],
        ["all_reduce dp", "reduce_scatter dp_out"],
        ["reduce_scatter dp", "reduce_scatter dp_out"],
    ]


@pytest.mark.parametrize("source", FLAT, ids=str)
@pytest.mark.parametrize("kept", range(3))
def test_slices_are_gathered_to_coarser_ones_at_once(source: Layout, kept: int) -> None:
    """Several axes are one gather; what both layouts cut alike stays."""
    target, whole = Layout(source.cuts[:kept]), value()
    held = [source.own_part(whole, MESH, rank) for rank in RANKS]
    steps = transitions(source, target)
    assert [step.axis for step in steps] == [".".join(parts_of(source.axes)[kept:])] * bool(source.cuts[kept:])
    for step in steps:
        held = done(step, held)
    assert [x.tolist() for x in held] == [target.own_part(whole, MESH, rank).tolist() for rank in RANKS]
    back = transitions(target, source)
    assert {step.kind for step in back} <= {"own_part"}
    for step in back:
        held = done(step, held)
    assert [x.tolist() for x in held] == [source.own_part(whole, MESH, rank).tolist() for rank in RANKS]


def test_a_leaf_cut_by_dims_and_sliced_comes_whole_the_inner_cut_first() -> None:
    lies = Layout((AxisCut("tp", 2, Shard(1)), AxisCut("dp", 3, Shard(0)), AxisCut("dp_out", 2, Shard(1))))
    whole = value().view(6, 12)
    held = [lies.own_part(whole, MESH, rank) for rank in RANKS]
    steps = transitions(lies, WHOLE)
    assert [step.axis for step in steps] == ["dp_out", "dp", "tp"]
    for step in steps:
        held = done(step, held)
    assert all(torch.equal(x, whole) for x in held)


@pytest.mark.parametrize(("source", "want"), [*product(PLACEMENTS, PLACEMENTS)], ids=str)
def test_each_placement_comes_to_each_other_one(source: Placement, want: Placement) -> None:
    """None, one transfer, or two by way of all of it; never to a sum that is missing."""
    whole = value().view(12, 6)
    if isinstance(want, Partial) and source != want:
        with pytest.raises(AssertionError, match="is never brought to"):
            transition(source, want, "tp")
        return
    steps = transition(source, want, "tp")
    direct = source == want or (want == Replicated() or source == Replicated())
    by_whole = len(steps) == 2
    assert len(steps) == (source != want) + by_whole
    assert not (direct and by_whole)
    if isinstance(want, Shard) and source != want and not isinstance(source, Flat):
        assert by_way_of_whole(source, want) == by_whole
    if len(steps) == 1:
        assert steps[0].kind == kind_of(source, want)
    flat = isinstance(source, Flat)
    parts = split(whole, source, 2)
    held = [parts[MESH.coordinate(rank, "tp")] for rank in RANKS]
    for step in steps:
        held = [x.view(12, 6) if flat and x.numel() == 72 else x for x in held]
        held = done(step, held)
    for rank in RANKS if source != want else ():
        wanted = own_part(whole, want, 2, MESH.coordinate(rank, "tp"))
        assert torch.equal(held[rank].view(wanted.shape), wanted)


def test_what_one_rank_sends() -> None:
    """Of a value of 96 bytes, over 2 ranks and 3. No transfer makes addends of what is none."""
    x = torch.zeros(4, 6)
    for n, sent in ((2, [0, 48, 96, 48, 24, 96, 96]), (3, [0, 64, 128, 64, 21, 128, 128])):
        pairs: list[tuple[Placement, Placement]] = [
            (Partial(), Partial()), (Shard(0), Replicated()), (Partial(), Replicated()), (Partial(), Shard(0)),
            (Shard(0), Shard(1)), (Partial("max"), Shard(0)), (Partial("max"), Replicated()),
        ]  # fmt: skip
        assert [int(wire_bytes(*pair, x, n)) for pair in pairs] == sent
        assert wire_bytes(Replicated(), Partial(), x, n) == wire_bytes(Partial("max"), Partial(), x, n) == math.inf


def test_axes_of_one_rank_need_no_transfer() -> None:
    alone = Mesh((("dp", 1),))
    lies = [Layout.over(alone, "dp", placement) for placement in (Partial(), Flat())]
    assert transitions(lies[0], lies[1]) == transitions(lies[1], WHOLE) == ()


def test_slices_are_equal() -> None:
    assert local_shape((4, 6), Flat(), 3) == (8,)
    with pytest.raises(SpecError, match="5 ranks need equal stretches: 24 elements"):
        local_shape((4, 6), Flat(), 5)


# --- dims that become heads -------------------------------------------------------------------------------------------

HEADS = [
    ((4, 12), Shard(1), (4, 3, 4), 2, "3"),
    ((12,), Shard(0), (3, 4), 2, "3"),  # nothing before it
    ((2, 2, 12), Shard(2), (4, 3, 4), 2, "3"),  # the dims before it are joined
    ((4, 12), Shard(1), (4, 1, 3, 4), 2, "3"),  # past a dim of one
    ((4, 12), Shard(1), (4, 6, 2), 4, "2, 3, 6"),
    ((4, 36), Shard(1, groups=3), (4, 3, 3, 4), 2, "3"),  # q, k and v, then the heads of each
    ((4, 12), Shard(1), (4, 4, 3), 2, None),  # two heads for each rank
    ((4, 12), Shard(1), (4, 2, 6), 4, None),  # two ranks for each head: brought together
    ((4, 36), Shard(1, groups=3), (4, 3, 4, 3), 2, None),
    ((4, 12), Shard(1), (4, 12), 5, None),  # the dim itself
    ((4, 12), Shard(1), (48,), 5, None),  # no head
]


@pytest.mark.parametrize(
    ("op", "shapes", "by_dim"),
    [
        (aten.mm.default, [(4, 6), (6, 8)], [0, 1]),
        (aten.bmm.default, [(2, 4, 6), (2, 6, 8)], [None, 0, 1]),
        (aten.addmm.default, [(8,), (4, 6), (6, 8)], [1, 2]),
    ],
    ids=str,
)
def test_the_dim_of_a_product_is_that_of_an_operand(op: Any, shapes: Any, by_dim: list[int | None]) -> None:
    """Of a leaf that a rule cuts: not of another value, nor of a leaf that is whole."""
    draft = Draft()
    operands = [draft.input(*shape) for shape in shapes]
    product = draft.call(op, *operands)
    rows = draft.call(aten.relu.default, product)
    for dim, position in enumerate(by_dim):
        place = Shard(dim)
        have: dict[fx.Node, dict[Any, None]] = {x: {place: None} for x in (*operands, product, rows)}
        leaf = None if position is None else operands[position]
        assert cutting_leaf(product, place, have, {*operands}, 2) is leaf
        assert cutting_leaf(rows, place, have, {*operands}, 2) is leaf
        assert cutting_leaf(rows, place, have, set(), 2) is None
        assert (
            cutting_leaf(rows, place, {**have, **{x: {Replicated(): None} for x in operands}}, {*operands}, 2) is None
        )


@pytest.mark.parametrize(("before", "source", "after", "n", "fits"), HEADS, ids=str)
def test_ranks_that_would_cut_heads_through_are_refused(
    before: tuple[int, ...], source: Shard, after: tuple[int, ...], n: int, fits: str | None
) -> None:
    draft = Draft()
    x = draft.input(*before)
    reader = draft.call(aten.view.default, x, list(after))
    move = Move("all_gather", "x", source, Replicated(), 1536.0, "forward", "view", "model.py:7", False, torch.float32)
    if fits is None:
        check_heads(x, source, reader, move, n, "tp", "layers/qkv")
        return
    heads = fits.split()[-1]
    with pytest.raises(
        SpecError, match=rf"as layers/qkv does, and becomes {heads} heads: {n} ranks would cut"
    ) as error:
        check_heads(x, source, reader, move, n, "tp", "layers/qkv")
    assert str(error.value).startswith(
        f"model.py:7: a dim of {before[source.dim]} lies in parts over {n} ranks of 'tp'"
    )
    assert f"1,536 bytes be gathered. Take as many ranks as divide the heads ({fits})" in str(error.value)
