"""One table says how the values of a bucket lie: stages of ZeRO, layouts by column, on one data axis or two."""

from __future__ import annotations

from typing import Any

import cases
import pytest

from fzero.ir.mesh import DATA, Mesh
from fzero.plan.stages import BucketLayout, batch_layout, gradient, row_of
from fzero.shard.layouts import AxisCut, Layout
from fzero.shard.placements import Partial, Shard

MESH = Mesh((("dp_out", 2), ("dp", 2), ("tp", 2)))
BOTH = {"dp_out": 2, "dp": 2}
TABLE = {  # zero: (parameters, what a rank updates, along which ranks own slices, the second copy, when it is reduced)
    0: ("", "", "dp.dp_out", "", "produced"),
    1: ("", "dp.dp_out", "dp.dp_out", "", "end"),
    2: ("", "dp.dp_out", "dp.dp_out", "", "produced"),
    3: ("dp.dp_out", "dp.dp_out", "dp.dp_out", "", "produced"),
    "hsdp": ("dp", "dp", "dp", "", "produced"),
    "hpz": ("dp.dp_out", "dp.dp_out", "dp.dp_out", "dp", "produced"),
}


def row(zero: Any, mesh: dict[str, int]) -> BucketLayout:
    """The row that a spec asks for."""
    stage = cases.spec(zero=zero, mesh=mesh).parallel.stages(".".join(axis for axis in mesh if axis in DATA))
    return row_of(stage, batch_layout(Mesh(tuple(mesh.items()))))  # type: ignore[arg-type]


@pytest.mark.parametrize("zero", TABLE)
def test_every_way_to_place_the_state_is_a_row(zero: Any) -> None:
    found = row(zero, BOTH)
    assert (found.params.axes, found.rest.axes, found.cut.axes, found.copy.axes, found.reduce_when) == TABLE[zero]
    assert found.params.flat == found.params
    assert found.rest.flat == found.rest


@pytest.mark.parametrize("zero", TABLE)
def test_a_gradient_is_summed_over_the_axes_on_which_it_is_partial(zero: Any) -> None:
    """Those that cut the batch, the inner one first; not tp, whose ranks are given the same batch."""
    grad = row(zero, BOTH).grad
    assert grad == grad.partial == Layout((AxisCut("dp", 2, Partial()), AxisCut("dp_out", 2, Partial())))


def test_an_axis_of_one_rank_sums_nothing() -> None:
    assert str(row(1, {"dp_out": 2, "dp": 1}).grad) == "P over dp_out"
    assert str(row(1, {"dp": 1}).grad) == ""
    assert row(1, {"dp": 1}).cut.axes == "dp"


def test_a_batch_cut_by_another_dim_over_another_axis_adds_to_the_sum() -> None:
    """What context parallelism asks: no other rule changes."""
    batch = Layout((*batch_layout(MESH).cuts, AxisCut("cp", 2, Shard(1))))
    assert str(gradient(batch)) == "P over cp, P over dp, P over dp_out"


@pytest.mark.parametrize("zero", [0, 1, 2, 3, "hsdp", "hpz"])
def test_a_plan_has_the_row_of_every_bucket(zero: Any) -> None:
    """Buffers and buckets say the same as the layouts that they are made from."""
    plan = cases.lowered(4, zero=zero, mesh=BOTH).plan
    assert plan.batch == batch_layout(plan.mesh)
    assert plan.bucket_layouts.keys() == plan.buckets.keys()
    for name, bucket in plan.buckets.items():
        lies = plan.bucket_layouts[name]
        assert (bucket.axis, bucket.updates_slices) == (lies.cut.axes, bool(lies.rest))
        columns = {b.kind: plan.column(b) for b in plan.buffers.values() if b.bucket == name}
        assert columns == {"param": lies.params, "optimizer": lies.rest}
