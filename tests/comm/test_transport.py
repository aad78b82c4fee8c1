"""transport: the way that ranks move bytes, by device, spec and machine. What would meet other ranks is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fzero.comm import transport
from fzero.comm.group import Line
from fzero.comm.heartbeat import Presence
from fzero.comm.shared_memory import Shared
from fzero.comm.transfers import P2P, Alone, Nccl, gather_by_gloo
from fzero.comm.transport import transport_for, transport_name
from fzero.errors import SpecError
from fzero.ir.mesh import Mesh

CPU = torch.device("cpu")
RATES = object()


class Host:
    """Memory that ranks share."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 7, dtype=torch.uint8)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ranks of a mesh that meet, and what was measured: `host` (None: they share no memory), `measured` (the calls)."""
    world = SimpleNamespace(host=Host(), why="another machine", measured=[])

    def lines(mesh: Mesh, rank: int, device: Any, presence: Any) -> dict[str, Line]:
        axes = dict.fromkeys([*mesh.names, mesh.data_axes])
        sizes = {axis: mesh.size(axis) for axis in axes if mesh.size(axis) > 1}
        return {axis: Line(mesh.coordinate(rank, axis), tuple(mesh.peers(rank, axis))) for axis in sizes}

    def measured(ways: Any, ranks: int, world_size: int, memory: Any, rank: int) -> Any:
        world.measured.append((ways, ranks, world_size, memory))
        return {("all_gather", 4096): "p2p"}, RATES

    monkeypatch.setattr(transport, "lines", lines)
    monkeypatch.setattr(transport, "meet", lambda rank, size: (world.host, "" if world.host else world.why))
    monkeypatch.setattr(transport.pick_way, "measured", measured)
    return world


def made(mesh: dict[str, int], transfers: str = "auto") -> transport.Transport:
    return transport_for(0, Mesh(tuple(mesh.items())), CPU, transfers, Presence(0, 1))


def ways(found: transport.Transport) -> dict[str, set[str]]:
    """By axis, the names of the ways."""
    return {axis: set(comm.comms) for axis, comm in found.comm.comms.items()}


def test_one_rank_moves_nothing(played: Any) -> None:
    found = made({"dp": 1})
    assert isinstance(found.comm, Alone)
    assert found.rates is None
    assert played.measured == []
    assert not found.block(10).any()


def test_ranks_that_share_memory_read_one_anothers(played: Any) -> None:
    found = made({"dp": 2, "tp": 3})
    assert (found.name, found.rates) == ("shared", RATES)
    assert found.block(3).tolist() == [7, 7, 7], "where others can read it"
    assert ways(found) == {"dp": {"shared", "p2p", "gloo"}, "tp": {"shared", "p2p", "gloo"}}
    lanes = {axis: comm.comms["shared"].lane for axis, comm in found.comm.comms.items()}
    assert lanes == {"dp": 0, "tp": 1}, "of their own, so that transfers of two axes differ"
    assert found.comm.sizes == {"dp": 2, "tp": 3}
    ((first, ranks, world, block),) = played.measured
    assert first["gloo"].all_gather is gather_by_gloo
    assert isinstance(first["shared"], Shared)
    assert type(first["p2p"]) is P2P
    assert first["p2p"].all_gather is not gather_by_gloo
    assert (ranks, world, block) == (2, 6, played.host.allocate)
    assert found.why == "the ranks share memory; by measured cost: all_gather of 4,096 bytes: p2p"
    assert all(comm.table == {("all_gather", 4096): "p2p"} for comm in found.comm.comms.values())


def test_the_data_axis_is_measured_and_where_there_is_none_the_others(played: Any) -> None:
    made({"dp_out": 4, "dp": 2})
    made({"pp": 2, "tp": 3})
    made({"tp": 2, "dp": 3})
    assert [ranks for _, ranks, *_ in played.measured] == [2, 3, 3]
    assert made({"pp": 2}).rates is None, "messages alone"
    assert len(played.measured) == 3


def test_ranks_measure_once(played: Any) -> None:
    """A second state of theirs, over the same mesh and by the same ways, moves bytes as the first one does."""
    here, other = Presence(0, 1), Presence(0, 1)

    def again(mesh: dict[str, int], presence: Presence, transfers: str = "auto") -> transport.Transport:
        return transport_for(0, Mesh(tuple(mesh.items())), CPU, transfers, presence)

    first, second = again({"dp": 2}, here), again({"dp": 2}, here)
    assert len(played.measured) == 1
    assert (second.why, second.rates) == (first.why, first.rates)
    assert second.comm.comms["dp"].table == first.comm.comms["dp"].table
    assert second.comm.comms["dp"] is not first.comm.comms["dp"], "it may swap memory of its own"
    again({"dp": 2}, other)
    again({"dp": 3}, here)
    again({"dp": 2}, here, "p2p")
    assert len(played.measured) == 4, "other ranks, another mesh, other ways"


def test_ranks_of_several_machines_send_messages(played: Any) -> None:
    played.host = None
    found = made({"dp": 2})
    assert (found.name, ways(found)) == ("p2p", {"dp": {"p2p", "gloo"}})
    assert found.why.startswith("no shared memory: another machine; by measured cost")
    assert not found.block(4).any()
    with pytest.raises(SpecError, match=r"the ranks share no memory \(another machine\). Use 'auto' or 'p2p'"):
        made({"dp": 2}, "shared")


def test_messages_if_the_spec_says_so(played: Any) -> None:
    found = made({"dp": 2}, "p2p")
    assert (found.name, ways(found)) == ("p2p", {"dp": {"p2p"}})
    assert found.why == "point-to-point, as Spec(transfers='p2p') says"
    assert played.measured[0][3] is found.block


def test_in_a_pipeline_all_goes_through_memory_if_there_is_some(played: Any) -> None:
    """A rank that waits inside gloo reads no messages."""
    assert ways(made({"pp": 2, "dp": 2})) == {"pp": {"shared"}, "dp": {"shared"}}
    assert ways(made({"dp": 2}, "shared")) == {"dp": {"shared"}}
    played.host = None
    assert ways(made({"pp": 2, "dp": 2}))["pp"] == {"p2p", "gloo"}


def test_on_cuda_all_is_nccls(played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(transport.storage, "block_of", lambda device, *, disk: f"of a disk: {disk}")
    found = transport_for(0, Mesh((("dp", 2), ("tp", 2))), device, "auto", Presence(0, 1))
    assert (found.name, found.block, found.why) == ("nccl", "of a disk: False", "NCCL")
    assert {type(comm) for comm in found.comm.comms.values()} == {Nccl}
    assert found.rates is None
    assert isinstance(transport_for(0, Mesh((("dp", 1),)), device, "auto").comm, Alone)


def test_the_name_of_a_transport_in_programs() -> None:
    assert [transport_name(CPU, transfers) for transfers in ("auto", "p2p", "shared")] == ["p2p", "p2p", "shared"]
    assert transport_name(torch.device("cuda"), "auto") == "nccl"
