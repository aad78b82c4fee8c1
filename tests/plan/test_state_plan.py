"""state_plan: what a plan says of a rank: its buffers, bytes and chunks."""

from functools import partial

import torch

from fzero import tree
from fzero.ir.decisions import Choice
from fzero.ir.mesh import Mesh
from fzero.ir.records import Ref
from fzero.plan.layout import layout
from fzero.plan.pipeline_cut import cut_layers
from fzero.plan.state_plan import Plan

# three layers of 64, 64 and 128 elements; a count, which every role holds
STATE = {
    "params": {"blocks": [{"w": torch.ones(64)}, {"w": torch.ones(64)}, {"w": torch.ones(128)}]},
    "count": torch.zeros((), dtype=torch.int64),
}


def planned(roles: int = 1, dp: int = 1, zero: int = 0) -> Plan:
    paths, values, _ = tree.flatten(STATE)
    choose = partial(_choose, "blocks/1")
    pipeline = partial(cut_layers, role_of=(0, 1), choose=choose) if roles == 2 else None
    return layout(paths, values, mesh=Mesh((("pp", roles), ("dp", dp))), pipeline=pipeline, zero=zero)


def _choose(start: str, layers: object, last: int, chunks: int) -> Choice[tuple[str, ...]]:
    return Choice((start,))


def test_the_bytes_of_the_state() -> None:
    assert planned().state_bytes == 4 * 256 + 8
    assert planned(dp=2, zero=3).state_bytes == 4 * 3 * 64 + 8  # slices are multiples of 64 elements


def test_the_bytes_of_the_role_that_holds_most() -> None:
    assert planned(roles=2).state_bytes == 4 * 192 + 8


def test_a_role_holds_its_layers_and_what_is_in_no_bucket() -> None:
    plan = planned(roles=2)
    assert sorted(plan.held_by(0)) == ["count", "params:blocks.0"]
    assert sorted(plan.held_by(1)) == ["count", "params:blocks.1", "params:blocks.2"]
    assert plan.chunk_of() == {"blocks.0": 0, "blocks.1": 1, "blocks.2": 1}
    names = ("count", "params:blocks.0", "params:blocks.2")
    assert [plan.role_of(plan.buffers[name]) for name in names] == [None, 0, 1]
    assert planned().chunk_of() == {}


def test_the_ranks_that_hold_a_buffer_once() -> None:
    plan = planned(roles=2, dp=2, zero=3)
    assert plan.owners(plan.buffers["params:blocks.0"]) == [0, 1]
    assert plan.owners(plan.buffers["params:blocks.2"]) == [2, 3]
    assert plan.owners(plan.buffers["count"]) == [0]


def test_padding_is_what_no_leaf_uses() -> None:
    paths, values, _ = tree.flatten({"params": {"w": torch.ones(65)}})
    plan = layout(paths, values, mesh=Mesh((("dp", 2),)), zero=3)
    assert plan.padding_bytes() == {"params:small": 4 * (128 - 65)}
    assert planned().padding_bytes() == {}


def test_axes_of_the_batch_and_the_finest_slices() -> None:
    """The inner axis comes first there: a slice of it lies within a slice along it alone."""
    paths, values, _ = tree.flatten(STATE)
    mesh = Mesh((("pp", 1), ("dp_out", 2), ("dp", 3), ("tp", 1)))
    plan = layout(paths, values, mesh=mesh, zero=3)
    assert (plan.axis, plan.finest, plan.data_ranks, plan.world_size) == ("dp_out.dp", "dp.dp_out", 6, 6)
    buffer = plan.buffers["params:blocks.0"]
    assert plan.column(buffer).axes == buffer.sharded == "dp.dp_out"
    assert plan.owners(buffer) == [0, 3, 1, 4, 2, 5], "in the order of its slices"


def test_what_each_rank_has_of_its_own_is_stacked_by_the_batch() -> None:
    paths, values, _ = tree.flatten(STATE)
    plan = layout(paths, values, mesh=Mesh((("dp", 2),)), per_rank=("count",))
    assert plan.column(plan.buffers["count"]) == plan.batch
    assert plan.owners(plan.buffers["count"]) == [0, 1]


def test_the_reference_to_a_leaf_is_its_slot() -> None:
    plan = planned()
    of = {leaf.path: plan.ref(leaf) for leaf in plan.leaves}
    assert of["count"] == Ref("count")
    assert of["params/blocks/2/w"] == Ref("params:blocks.2", 0, 128, (128,))
