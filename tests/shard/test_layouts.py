"""layouts: which part of a value a rank holds over several axes, and the value from all parts."""

from __future__ import annotations

import pytest
import torch

from fzero.errors import SpecError
from fzero.ir.mesh import Mesh
from fzero.shard.layouts import WHOLE, AxisCut, Layout
from fzero.shard.placements import Flat, Partial, Replicated, Shard

MESH = Mesh((("dp_out", 2), ("dp", 3), ("tp", 2), ("mp", 2)))
VALUE = torch.arange(24 * 4).view(24, 4)
ROWS, COLUMNS = AxisCut("tp", 2, Shard(0)), AxisCut("mp", 2, Shard(1))
SLICE, GROUPS = AxisCut("dp", 3, Flat()), AxisCut("mp", 2, Shard(0, 3))
LAYOUTS = [Layout(cuts) for cuts in ((), (ROWS,), (ROWS, COLUMNS), (COLUMNS, ROWS), (ROWS, SLICE), (ROWS, GROUPS))]


@pytest.mark.parametrize("lies", LAYOUTS, ids=str)
def test_the_parts_in_the_order_of_their_places_are_the_value(lies: Layout) -> None:
    parts: dict[int, torch.Tensor] = {}
    for rank in range(MESH.world_size):
        part = lies.own_part(VALUE, MESH, rank)
        assert part.shape == lies.local_shape(VALUE.shape)
        assert torch.equal(parts.setdefault(lies.place(MESH, rank), part), part), "ranks of one place hold one part"
    assert [*sorted(parts)] == [*range(lies.parts)]
    assert sum(part.numel() for part in parts.values()) == VALUE.numel()
    assert torch.equal(lies.join([parts[i] for i in range(lies.parts)]).view(VALUE.shape), VALUE)


def test_a_part_is_cut_from_what_the_outer_axis_leaves() -> None:
    """Rank 2 of a mesh of tp and mp is (1, 0)."""
    mesh = Mesh((("tp", 2), ("mp", 2)))
    assert torch.equal(Layout((ROWS, COLUMNS)).own_part(VALUE, mesh, 2), VALUE[12:, :2])
    assert torch.equal(Layout((ROWS, AxisCut("mp", 2, Shard(0)))).own_part(VALUE, mesh, 2), VALUE[12:18])
    assert torch.equal(Layout((ROWS, AxisCut("mp", 2, Flat()))).own_part(VALUE, mesh, 2), VALUE[12:18].flatten())
    assert torch.equal(Layout((ROWS, GROUPS)).own_part(VALUE, mesh, 3), VALUE[[14, 15, 18, 19, 22, 23]])


def test_what_is_asked_of_a_layout() -> None:
    partial = AxisCut("dp_out", 2, Partial())
    lies = Layout((ROWS, partial, SLICE))
    assert str(lies) == "S0 over tp, P over dp_out, F over dp"
    assert (lies.axes, lies.parts, bool(lies)) == ("tp.dp_out.dp", 12, True)
    assert [lies.on(axis) for axis in ("tp", "mp")] == [Shard(0), Replicated()]
    assert lies.dims == ((ROWS, Shard(0)),)
    assert (lies.partial, lies.flat) == (Layout((partial,)), Layout((SLICE,)))
    assert (WHOLE.axes, WHOLE.parts, bool(WHOLE), str(WHOLE)) == ("", 1, False, "")
    assert WHOLE.place(MESH, 17) == 0
    assert WHOLE.own_part(VALUE, MESH, 17) is VALUE


def test_one_placement_over_several_axes() -> None:
    over = Layout((AxisCut("dp", 3, Flat()), AxisCut("dp_out", 2, Flat())))
    assert Layout.over(MESH, "dp.dp_out", Flat()) == Layout.over(MESH, ("dp", "dp_out"), Flat()) == over
    assert Layout.over(MESH, None, Flat()) == WHOLE
    assert Layout.over(MESH, "tp", Partial()).cuts == (AxisCut("tp", 2, Partial()),)


def test_parts_that_are_unequal_are_refused() -> None:
    with pytest.raises(SpecError, match="S1 on 2 ranks needs dim 1 in 2 equal parts: 3 is no multiple of 2"):
        Layout((ROWS, COLUMNS)).local_shape((4, 3))
    with pytest.raises(SpecError, match="3 ranks need equal stretches: 8 elements"):
        Layout((ROWS, SLICE)).local_shape((4, 4))
