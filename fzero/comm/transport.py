"""transport: chooses how the ranks of a run move bytes, once, at `init`, alike on all ranks.

CUDA: NCCL. CPU: the ranks of one machine read one another's memory (`shared`); state and arena then lie in memory that
the others can read. Otherwise the ranks send point-to-point messages over gloo (`p2p`). Each gather goes the way that
was measured to be the fastest for its size (`fzero.comm.autotune`). Reductions go a way that adds in rank order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fzero.comm import autotune, heartbeat
from fzero.comm.rendezvous import meet
from fzero.comm.shared_memory import Shared
from fzero.comm.transfers import P2P, Alone, Nccl, gloo
from fzero.cost import choose
from fzero.cost.autotune import Costs
from fzero.cost.rates import Rates
from fzero.errors import SpecError
from fzero.plan.layout import BUCKET_BYTES
from fzero.state import storage

log = logging.getLogger("fzero")


@dataclass(frozen=True)
class Transport:
    """How a run moves bytes. Fixed once it is made.

    comm: runs transfers. name: the transport's name in programs. block: makes memory that it can use, as uint8 of a
    number of bytes. why: the choice in words. rates: the measured rates; None if none were measured.
    """

    comm: Any
    name: str
    block: Callable[[int], torch.Tensor]
    why: str = ""
    rates: Rates | None = None  # where they were measured


def transport_name(device: torch.device, transfers: str) -> str:
    """Returns the transport's name in programs, for callers without ranks that could be asked about shared memory."""
    return "nccl" if device.type == "cuda" else "shared" if transfers == "shared" else "p2p"


def transport_for(
    rank: int, world_size: int, device: torch.device, transfers: str, presence: heartbeat.Presence | None = None
) -> Transport:
    """Returns the transport of this run. Collective if there are several ranks.

    transfers: the field of the spec. presence: that of the group over which ranks agree. Raises SpecError if the spec
    asks for shared memory and the ranks have none.
    """
    block: Callable[[int], torch.Tensor]
    block, name = storage.block_of(device), transport_name(device, transfers)
    if world_size == 1:
        return Transport(Alone(), name, block)
    if device.type == "cuda":
        return Transport(Nccl(rank, world_size, None, presence), name, block, "NCCL")
    p2p = P2P(rank, world_size)
    if transfers == "p2p":
        _, rates = autotune.measured({"p2p": p2p}, world_size)
        return Transport(p2p, name, block, "point-to-point, as Spec(transfers='p2p') says", rates)
    host, why = meet(rank, world_size)
    if host is None:
        if transfers == "shared":
            raise SpecError(f"Spec(transfers='shared'): the ranks share no memory ({why}). Use 'auto' or 'p2p'")
        ways: dict[str, Any] = {"p2p": p2p, "gloo": gloo(rank, world_size)}
        table, rates = autotune.measured(ways, world_size)
        return Transport(autotune.Fastest(ways, table), "p2p", block, _shown(table, f"no shared memory: {why}"), rates)
    ways = {"shared": Shared(host, world_size), "p2p": p2p, "gloo": gloo(rank, world_size)}
    ways = {"shared": ways["shared"]} if transfers == "shared" else ways
    block = host.allocate
    table, rates = autotune.measured(ways, world_size, memory=block)
    return Transport(autotune.Fastest(ways, table), "shared", block, _shown(table, "the ranks share memory"), rates)


def bucket_bytes(transport: str, world_size: int, rank: int = 0, rates: Rates | None = None, store: Any = None) -> int:
    """Returns the bytes at which buckets are cut if the spec does not say: BUCKET_BYTES if nothing was measured.

    The choice rests on the costs of transfers when this machine first had such a world. They are kept, so that all runs
    have one layout, and so one order of sums. `store` makes the choice the same on every rank.
    """
    costs = Costs("buckets", measures=rates is not None, rank=rank, store=store)
    question = f"{transport}, {world_size} ranks"
    measured = costs.find([question], lambda _: choose.bucket_costs(rates) if rates is not None else {})
    known = {size: cost for size, cost in measured.get(question, {}).items() if size in map(str, choose.BUCKETS)}
    if not known:
        return BUCKET_BYTES
    log.info("fzero: buckets by measured seconds a GB (%s): %s", question, known)
    return choose.bucket_bytes(known)


def _shown(table: autotune.Table, first: str) -> str:
    ways = ", ".join(f"{kind} of {size:,} bytes: {way}" for (kind, size), way in table.items())
    log.info("fzero: transfers: %s; by measured cost: %s", first, ways)
    return f"{first}; by measured cost: {ways}"
