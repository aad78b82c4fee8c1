"""Groups of real processes: every mesh that a test names opens its own, as the interpreter's ranks need none."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import gloo, values

from fzero.comm import heartbeat
from fzero.comm.group import lines, open_world
from fzero.ir.mesh import Mesh

AXES = {"pp", "dp_out", "dp", "tp"}
MORE = ({"dp_out": 2}, {"dp_out": 2, "dp": 1}, {"dp_out": 1, "dp": 2}, {"dp_out": 2, "tp": 2}, {"dp_out": 1, "tp": 2})


def named() -> dict[int, list[dict[str, int]]]:
    """By their number of ranks, the meshes that the tests name, and `MORE`."""
    found: dict[tuple[tuple[str, int], ...], None] = {}
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Dict) or not node.keys:
                continue
            pairs = [(k.value, v.value) for k, v in zip(node.keys, node.values, strict=True)
                     if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)]  # fmt: skip
            sizes = [size for axis, size in pairs if axis in AXES and type(size) is int and size > 0]
            if len(sizes) == len(node.keys):
                found[tuple(pairs)] = None
    by_size: dict[int, list[dict[str, int]]] = defaultdict(list)
    for mesh in [*map(dict, found), *MORE]:
        by_size[math.prod(mesh.values())].append(mesh)
    return by_size


def opened(meshes: list[dict[str, int]]) -> list[dict[str, list[int]]]:
    """Of each mesh, by axis, the ranks that this one meets over the group of its line."""
    torch.set_num_threads(1)
    rank, world = open_world("cpu")
    presence = heartbeat.of()
    found = []
    for axes in meshes:
        mesh = Mesh.of({**axes, "dp": axes.get("dp", 1)}, world)
        met: dict[str, list[int]] = {}
        for axis, line in lines(mesh, rank, torch.device("cpu"), presence).items():
            given = [torch.zeros((), dtype=torch.int64) for _ in line.ranks]
            dist.all_gather(given, torch.tensor(rank), group=line.group)
            met[axis] = [int(one) for one in given]
        found.append(met)
    return found


OTHERS = [pytest.param(world, marks=pytest.mark.acceptance) for world in (2, 3, 6, 8)]


@pytest.mark.parametrize("world", [4, *OTHERS])
def test_every_mesh_opens_its_groups(world: int) -> None:
    """A line for each axis that a program may name: those with several ranks, and the data axes as one."""
    meshes = named()[world]
    assert meshes
    for rank, found in enumerate(values(gloo(world, opened, meshes))):
        for axes, met in zip(meshes, found, strict=True):
            mesh = Mesh.of({**axes, "dp": axes.get("dp", 1)})
            wanted = {axis for axis, size in mesh if size > 1} | ({mesh.data_axes} if mesh.data_ranks > 1 else set())
            assert met.keys() == wanted, axes
            for axis, ranks in met.items():
                assert sorted(ranks) == sorted(mesh.peers(rank, axis)), (axes, axis)
