"""transport: chooses how the ranks of a run move bytes, once, at `init`, alike on all ranks.

CUDA: NCCL. CPU: the ranks of one machine read one another's memory (`shared`); state and arena then lie in memory that
the others can read. Otherwise the ranks send point-to-point messages over gloo (`p2p`). A mesh has a comm for
each axis (`by_axis`). Each gather goes the way that
was measured to be the fastest for its size (`fzero.comm.pick_way`), at the first `init` of the ranks. Reductions go a
way that adds in rank order.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero import backend
from fzero.comm import heartbeat, pick_way
from fzero.comm.by_axis import ByAxis
from fzero.comm.group import Line, lines
from fzero.comm.peers import SharedMemoryPeers
from fzero.comm.protocol import Comm
from fzero.comm.rendezvous import meet
from fzero.comm.shared_memory import Shared
from fzero.comm.transfers import P2P, Alone, Nccl, gloo
from fzero.cost.rates import Rates
from fzero.errors import SpecError
from fzero.ir.mesh import DATA, PIPELINE, Mesh
from fzero.state import storage

log = logging.getLogger("fzero")
Measured = tuple[dict[tuple[str, int], str], Rates]
# by the ranks, and by what was asked: a second state of theirs moves bytes as the first one does
_MEASURED: weakref.WeakKeyDictionary[heartbeat.Presence, dict[tuple[Any, ...], Measured]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Transport:
    """How a run moves bytes. Fixed once it is made.

    comm: runs transfers. name: the transport's name in programs. block: makes zeroed memory that it can use, as uint8
    of a number of bytes. why: the choice in words. rates: the measured rates; None if none were measured.
    """

    comm: Any
    name: str
    block: Callable[[int], torch.Tensor]
    why: str = ""
    rates: Rates | None = None  # where they were measured


def transport_name(device: torch.device, transfers: str) -> str:
    """Returns the transport's name in programs, for callers without ranks that could be asked about shared memory."""
    names = backend.of(device).transports or backend.CPU.transports
    return transfers if transfers in names else names[0]


def likely_names(device: torch.device, transfers: str, world_size: int) -> tuple[str, ...]:
    """Returns the names that a run's transport may have, the likeliest first: most ranks that may share memory do.

    >>> cpu = torch.device("cpu")
    >>> likely_names(cpu, "auto", 2), likely_names(cpu, "p2p", 2), likely_names(cpu, "auto", 1)
    (('shared', 'p2p'), ('p2p',), ('p2p',))
    """
    names = backend.of(device).transports or backend.CPU.transports
    return (transport_name(device, transfers),) if transfers in names or world_size == 1 else names[::-1]


def transport_for(
    rank: int,
    mesh: Mesh,
    device: torch.device,
    transfers: str,
    presence: heartbeat.Presence = heartbeat.ALONE,
    *,
    disk: bool = False,
) -> Transport:
    """Returns the transport of this run. Collective if there are several ranks.

    transfers: the field of the spec. presence: that of the group over which ranks agree. disk: whether a disk reads and
    writes the memory. Raises SpecError if the spec asks for shared memory and the ranks have none.
    """
    name, host, why = transport_name(device, transfers), None, ""
    block = storage.block_of(device, disk=disk)
    along = lines(mesh, rank, device, presence)
    if backend.of(device).group == "nccl" and along:
        return Transport(
            _joined(along, {axis: Nccl(line, presence) for axis, line in along.items()}), name, block, "NCCL"
        )
    if not along:
        return Transport(Alone(), name, block)
    if transfers != "p2p":
        host, why = meet(rank, mesh.world_size)
        if host is None and transfers == "shared":
            raise SpecError(f"Spec(transfers='shared'): the ranks share no memory ({why}). Use 'auto' or 'p2p'")
    if host is not None and PIPELINE in along:
        transfers = "shared"  # a rank that waits inside gloo reads no messages, and their senders wait for that
    ways = {axis: _ways(line, lane, host, transfers) for lane, (axis, line) in enumerate(along.items())}
    block = block if host is None else host.allocate
    joint = [axis for axis in along if axis != PIPELINE and axis in mesh.names]
    data = [axis for axis in joint if axis in DATA] or joint
    table: pick_way.Table = {}
    rates = None
    if data:
        known = {} if presence is heartbeat.ALONE else _MEASURED.setdefault(presence, {})
        if (question := (mesh, *ways[data[-1]])) not in known:
            known[question] = pick_way.measured(ways[data[-1]], along[data[-1]].size, mesh.world_size, block, rank)
        table, rates = known[question]
    if transfers == "p2p":
        shown = "point-to-point, as Spec(transfers='p2p') says"
    else:
        shown = _shown(table, "the ranks share memory" if host is not None else f"no shared memory: {why}")
    comms = {axis: pick_way.Fastest(found, table) for axis, found in ways.items()}
    return Transport(_joined(along, comms), "p2p" if host is None else "shared", block, shown, rates)


def _ways(line: Line, lane: int, host: SharedMemoryPeers | None, transfers: str) -> dict[str, Comm]:
    """The comms of one axis that there are to choose from."""
    ways: dict[str, Comm] = {} if host is None else {"shared": Shared(host, line, lane)}
    ways |= {} if transfers == "shared" else {"p2p": P2P(line)}
    return ways | ({"gloo": gloo(line)} if transfers == "auto" else {})


def _joined(along: Mapping[str, Line], comms: Mapping[str, Comm]) -> Comm:
    return ByAxis(comms, {axis: line.size for axis, line in along.items()})


def _shown(table: pick_way.Table, first: str) -> str:
    ways = ", ".join(f"{kind} of {size:,} bytes: {way}" for (kind, size), way in table.items())
    log.info("fzero: transfers: %s; by measured cost: %s", first, ways)
    return f"{first}; by measured cost: {ways}"
