"""The process group of a run, and those of the axes of a mesh: played, and of real processes for every mesh that a
test names, as the interpreter's ranks need none."""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import gloo, values

from fzero.comm import group, heartbeat
from fzero.comm.group import Line, lines, open_world
from fzero.errors import HangError, LimitError, SpecError
from fzero.ir.mesh import Mesh

# --- played -----------------------------------------------------------------------------------------------------------


class Group(SimpleNamespace):
    """A process group that was asked for."""

    __hash__ = object.__hash__


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that are made, in order."""
    groups: list[Group] = []

    def new_group(ranks: list[int], backend: str, timeout: timedelta) -> Group:
        groups.append(Group(ranks=tuple(ranks), backend=backend, timeout=timeout))
        return groups[-1]

    monkeypatch.setattr(group.dist, "new_group", new_group)
    return groups


MESH = Mesh((("pp", 2), ("dp_out", 2), ("dp", 1), ("tp", 2)))


def test_every_rank_makes_the_groups_of_all_lines_and_waits_in_its_own(made: list[Group]) -> None:
    presence = heartbeat.Presence(5, 8, timeout=7.0)
    found = lines(MESH, 5, torch.device("cpu"), presence)
    assert {axis: (line.place, line.ranks, line.size) for axis, line in found.items()} == {
        "pp": (1, (1, 5), 2), "dp_out": (0, (5, 7), 2), "tp": (1, (4, 5), 2)
    }  # fmt: skip
    assert len(made) == 3 * 4, "four lines of each axis"
    assert {one.backend for one in made} == {"gloo"}
    assert {one.timeout for one in made} == {timedelta(seconds=7)}
    assert all(line.back is None for line in found.values())
    own = {axis: line.group for axis, line in found.items()}
    assert {axis: one.ranks for axis, one in own.items()} == {axis: line.ranks for axis, line in found.items()}
    joined = [weak() for weak in presence.heartbeat.groups[1:]]
    assert joined == [*own.values()], "a wait there is one of this presence"


def test_each_line_has_one_group(made: list[Group]) -> None:
    lines(Mesh((("dp_out", 3), ("dp", 2))), 0, torch.device("cpu"), heartbeat.Presence(0, 6))
    assert [one.ranks for one in made] == [(0, 2, 4), (1, 3, 5), (0, 1), (2, 3), (4, 5)]


def test_the_line_of_one_rank() -> None:
    assert Line() == Line.whole(0, 1) == Line(0, (0,), None, None)
    assert Line().size == 1
    assert Line.whole(2, 3) == Line(2, (0, 1, 2))


def test_an_axis_of_all_ranks_needs_no_group_of_its_own(made: list[Group]) -> None:
    found = lines(Mesh((("dp", 3),)), 1, torch.device("cpu"), heartbeat.Presence(1, 3))
    assert found == {"dp": Line(1, (0, 1, 2), None, None)} == {"dp": Line.whole(1, 3)}
    assert made == []


def test_on_cuda_messages_to_lower_roles_have_a_group(made: list[Group]) -> None:
    found = lines(Mesh((("pp", 2), ("dp", 2))), 0, torch.device("cuda"), heartbeat.Presence(0, 4))
    assert found["pp"].back is not found["pp"].group is not None
    assert found["pp"].back.ranks == (0, 2)
    assert found["dp"].back is None
    assert {one.backend for one in made} == {"nccl"}


@pytest.mark.parametrize(("held", "fits"), [(90 - 48 - 4, True), (91 - 48 - 4, False)])
def test_a_limit_of_open_files_that_is_too_low_is_told(monkeypatch: pytest.MonkeyPatch, held: int, fits: bool) -> None:
    limit = [90]
    monkeypatch.setattr(group.resource, "getrlimit", lambda _: (limit[0], 1 << 20))
    monkeypatch.setattr(group.os, "listdir", lambda _: ["x"] * held)
    if fits:
        group._check_files(4)
    else:
        with pytest.raises(LimitError, match=r"open and has 39; 4 ranks need 52 more at least.*ulimit -n 4096"):
            group._check_files(4)
    limit[0] = group.resource.RLIM_INFINITY
    group._check_files(1 << 30)
    limit[0] = 10
    monkeypatch.setattr(group.os.path, "isdir", lambda _: False)
    group._check_files(4)


def test_a_group_that_is_there_is_used_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"is_available": lambda: True, "is_initialized": lambda: True, "get_rank": lambda: 2}
    for name, value in {**there, "get_world_size": lambda: 5, "get_backend": lambda: "mpi"}.items():
        monkeypatch.setattr(group.dist, name, value)
    assert open_world("cpu") == open_world("cuda") == (2, 5)
    monkeypatch.setattr(group.dist, "get_backend", lambda: "gloo")
    with pytest.raises(SpecError, match="the default process group is gloo, a state on cuda needs nccl"):
        open_world("cuda")
    seen: list[Any] = []
    monkeypatch.setattr(heartbeat, "of", lambda: seen.append(1))
    assert open_world("cpu") == (2, 5)
    assert seen == [1], "the presence is made at the same call on all ranks"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torchrun's variables of rank 1 of 2; the groups that are started."""
    started: list[Any] = []
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(group.AGENT, raising=False)
    monkeypatch.setattr(group.dist, "init_process_group", lambda *given, **named: started.append((given, named)))
    monkeypatch.setattr(group, "_store", lambda *given: dist.HashStore())
    monkeypatch.setattr(group.store_prefix, "prefixed", lambda store, *given: store)
    monkeypatch.setattr(group, "_here", lambda: (1, 2))
    monkeypatch.setattr(group.heartbeat, "ANSWER_SECONDS", 0.05)
    return started


def test_under_torchrun_a_group_is_started(ranks: list[Any]) -> None:
    assert open_world("cpu", 9.0) == (1, 2)
    assert open_world("cuda") == (1, 2)
    (((library,), first), ((other,), second)) = ranks
    assert (library, other) == ("gloo", "nccl")
    assert (first["rank"], first["world_size"], first["timeout"]) == (1, 2, timedelta(seconds=9))
    assert second["timeout"] == timedelta(seconds=group.TIMEOUT_SECONDS)
    assert first["store"].check(["came/1"])


def test_files_are_counted_before_a_group_is_started(ranks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group.resource, "getrlimit", lambda _: (10, 10))
    with pytest.raises(LimitError, match="2 ranks need 50 more at least"):
        open_world("cpu")
    assert ranks == []


def test_a_world_of_one_starts_none(ranks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert open_world("cpu") == (0, 1)
    assert ranks == []


@pytest.mark.parametrize("came", [[0], [2], []])
def test_who_does_not_come_is_named(ranks: list[Any], monkeypatch: pytest.MonkeyPatch, came: list[int]) -> None:
    store = dist.HashStore()
    for rank in came:
        store.set(f"came/{rank}", "")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(group, "_store", lambda *given: store)

    def fails(*given: Any, **named: Any) -> None:
        raise RuntimeError("[c10d.cc:5] connection refused.\nMore")

    monkeypatch.setattr(group.dist, "init_process_group", fails)
    with pytest.raises(HangError, match=r"did not come within 9 s .*\(connection refused\)") as error:
        open_world("cpu", 9.0)
    assert error.value.missing == tuple(rank for rank in (0, 2) if rank not in came)
    assert store.check(["told/1"])
    monkeypatch.setattr(group, "_store", fails)
    with pytest.raises(HangError) as error:
        open_world("cpu", 9.0)
    assert error.value.missing == (0,), "whose process holds the store"
    monkeypatch.setenv(group.AGENT, "True")
    with pytest.raises(HangError) as error:
        open_world("cpu", 9.0)
    assert error.value.missing == (), "torchrun's agent does"


def test_rank_0_lets_the_others_read_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group.heartbeat, "ANSWER_SECONDS", 0.05)
    asked: list[list[str]] = []

    def wait_for_keys(store: Any, keys: list[str], seconds: float) -> list[str]:
        asked.append(keys)
        return ["came/2"] if "came/2" in keys else []

    monkeypatch.setattr(group.store_prefix, "wait_for_keys", wait_for_keys)
    assert group._missing(dist.HashStore(), 0, 3, [0]) == [2]
    assert asked == [["came/0", "came/1", "came/2"], ["told/0", "told/1"]]
    asked.clear()
    assert group._missing(dist.HashStore(), 1, 3, [0]) == [2]
    assert len(asked) == 1


def test_variables_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(group.AGENT, raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(SpecError, match="RANK and WORLD_SIZE are set, MASTER_PORT not: start the ranks with torchrun"):
        group._store(0, 2, timedelta(seconds=1))


def test_rank_0_holds_the_store_if_there_is_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for nobody: who is missing is found in it."""
    monkeypatch.delenv(group.AGENT, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "77")
    asked: list[Any] = []
    monkeypatch.setattr(group.dist, "TCPStore", lambda *given, **named: asked.append((given, named)) or "store")
    patience = timedelta(seconds=3)
    assert [group._store(rank, 2, patience) for rank in range(2)] == ["store"] * 2
    options = {"wait_for_workers": False, "multi_tenant": True}
    assert asked == [(("host", 77, 2, rank == 0, patience), options) for rank in range(2)]
    monkeypatch.setenv(group.AGENT, "True")
    monkeypatch.setattr(group.dist, "rendezvous", lambda url, timeout: iter([((url, timeout), 0, 2)]))
    assert group._store(1, 2, patience) == ("env://", patience), "torchrun's"


def test_a_store_that_is_gone_names_its_holder() -> None:
    class Gone:
        def set(self, *given: Any) -> None:
            raise RuntimeError("closed")

    assert group._missing(Gone(), 1, 3, [0]) == [0]
    assert group._missing(Gone(), 1, 3, []) == []


def test_a_torch_without_distributed_cannot_start_ranks(ranks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group.dist, "is_available", lambda: False)
    with pytest.raises(SpecError, match=r"built without torch\.distributed"):
        open_world("cpu")
    assert ranks == []


# --- of real processes ------------------------------------------------------------------------------------------------

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
