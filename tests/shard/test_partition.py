"""partition and layouts: how a leaf is cut as a user says it, by what each rank holds of it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from fzero.errors import SpecError
from fzero.ir.mesh import Mesh
from fzero.shard.layouts import WHOLE, AxisCut, Layout
from fzero.shard.partition import P, groups
from fzero.shard.placements import Flat, Partial, Shard

MESH = Mesh((("dp", 2), ("tp", 2), ("mp", 3), ("one", 1)))
LEAF = torch.arange(12 * 6).view(12, 6)


@pytest.mark.parametrize(
    ("dims", "text", "shape"),
    [
        (P(), "", (12, 6)), (P("tp"), "S0 over tp", (6, 6)), (P(None, "mp"), "S1 over mp", (12, 2)),
        (P("mp", "tp"), "S1 over tp, S0 over mp", (4, 3)), (P(("tp", "mp"), None), "S0 over tp, S0 over mp", (2, 6)),
        (P(groups("tp", 3)), "S0/3 over tp", (6, 6)),
        (P(groups(("tp", "mp"), 2)), "S0/2 over tp, S0/2 over mp", (2, 6)),
        (P("one", "tp"), "S1 over tp", (12, 3)),
    ],
)  # fmt: skip
def test_each_rank_has_its_part_and_all_parts_are_the_leaf(dims: P, text: str, shape: tuple[int, ...]) -> None:
    lies = dims.layout("w", LEAF.shape, MESH)
    assert str(lies) == text
    assert lies.local_shape(LEAF.shape) == shape
    parts: dict[int, torch.Tensor] = {}
    for rank in range(MESH.world_size):
        part = lies.own_part(LEAF, MESH, rank)
        assert part.shape == shape
        place = lies.place(MESH, rank)
        assert 0 <= place < lies.parts
        assert torch.equal(parts.setdefault(place, part), part), "ranks of one place hold one part"
    assert torch.equal(lies.join([parts[place] for place in range(lies.parts)]), LEAF)
    assert bool(lies) == bool(text)


def test_groups_of_a_fused_dim_are_cut_each() -> None:
    """Of q, k and v each rank has its half of every one."""
    lies = P(groups("tp", 3)).layout("qkv", (12,), MESH)
    fused = torch.arange(12)
    assert lies.own_part(fused, MESH, 0).tolist() == [0, 1, 4, 5, 8, 9]
    assert lies.own_part(fused, MESH, 3).tolist() == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize(
    ("dims", "shape", "message"),
    [
        (P("tp", None, None), (12, 6), "P('tp', None, None) names 3 dims; w has shape (12, 6)"),
        (P(("mp", "tp")), (12, 6), "the mesh has these axes in the order ['tp', 'mp']: name them so"),
        (P(("tp", "mp")), (10, 6), "dim 0 over tp=2 x mp=3 needs 6 equal parts: 10 is no multiple of 6; the next"),
        (P(groups(("tp", "mp"), 2)), (18,), "needs 12 equal parts: 18 is no multiple of 12; the next that is: 24"),
        (P(None, "tp"), (12, 5), "shard: w of shape (12, 5) as P(None, 'tp'): S1 on 2 ranks needs dim 1"),
    ],
)  # fmt: skip
def test_a_leaf_that_cannot_be_cut_so_is_named(dims: P, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecError) as error:
        dims.layout("w", shape, MESH)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: P("tp", 3), "3 is none of an axis"),
        (lambda: P(()), "() is none of an axis"),
        (lambda: P(("tp", 3)), "('tp', 3) is none of an axis"),
        (lambda: P("t p"), "'t p' is no name of an axis"),
        (lambda: P("tp", ("mp", "tp")), "axis 'tp' cuts two dims"),
        (lambda: groups("tp", 0), "groups('tp', 0): needed a mesh axis and a positive int"),
        (lambda: groups("tp", True), "groups('tp', True)"),
        (lambda: groups((), 2), "groups((), 2)"),
        (lambda: groups(3, 2), "groups(3, 2)"),
    ],
)
def test_what_is_no_partition(make: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        make()
    assert message in str(error.value)


def test_a_partition_as_text_and_as_a_copy() -> None:
    dims = P(("tp", "mp"), None, groups("cp", 2))
    assert repr(dims) == str(dims) == "P(('tp', 'mp'), None, groups('cp', 2))"
    assert dims.axes == ("tp", "mp", "cp")
    assert dims.cuts == (("tp", Shard(0)), ("mp", Shard(0)), ("cp", Shard(2, 2)))
    assert copy.deepcopy(dims) == pickle.loads(pickle.dumps(dims)) == dims
    assert groups("tp", 1).count == 1


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_what_a_layout_says_of_its_axes() -> None:
    lies = Layout((AxisCut("tp", 2, Shard(1)), AxisCut("mp", 3, Partial()), AxisCut("dp", 2, Flat())))
    assert (lies.axes, lies.parts) == ("tp.mp.dp", 12)
    assert str(lies) == "S1 over tp, P over mp, F over dp"
    assert [str(part) for part in (lies.partial, lies.flat)] == ["P over mp", "F over dp"]
    assert lies.dims == ((lies.cuts[0], Shard(1)),)
    assert [str(lies.on(axis)) for axis in ("tp", "mp", "dp", "pp")] == ["S1", "P", "F", "R"]
    assert not WHOLE
    assert (WHOLE.axes, WHOLE.parts, WHOLE.place(MESH, 5)) == ("", 1, 0)
    assert torch.equal(WHOLE.own_part(LEAF, MESH, 5), LEAF)
    assert torch.equal(WHOLE.join([LEAF]), LEAF)


def test_one_placement_over_several_axes() -> None:
    wanted = Layout((AxisCut("mp", 3, Flat()), AxisCut("dp", 2, Flat())))
    assert Layout.over(MESH, "mp.dp", Flat()) == Layout.over(MESH, ["mp", "dp"], Flat()) == wanted
    assert Layout.over(MESH, None, Flat()) == Layout.over(MESH, "", Flat()) == WHOLE
