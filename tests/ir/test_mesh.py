"""A mesh is a grid: coordinates, peers and sizes by axis."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fzero.ir.mesh import Mesh

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda sizes: Mesh(tuple(zip(("pp", "dp", "tp"), sizes, strict=False)))
)


@given(meshes)
def test_coordinates_number_the_ranks(mesh: Mesh) -> None:
    """Rank r is the r-th of the grid's points, the last axis fastest: the order of torch's DeviceMesh."""
    points = list(itertools.product(*(range(size) for _, size in mesh)))
    assert len(points) == mesh.world_size
    for rank, point in enumerate(points):
        assert tuple(mesh.coordinate(rank, axis) for axis in mesh.names) == point


@given(meshes)
def test_peers_differ_along_one_axis(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        for axis in mesh.names:
            peers = mesh.peers(rank, axis)
            assert [mesh.coordinate(peer, axis) for peer in peers] == list(range(mesh.size(axis)))
            others = [name for name in mesh.names if name != axis]
            assert all(mesh.coordinate(p, o) == mesh.coordinate(rank, o) for p in peers for o in others)
