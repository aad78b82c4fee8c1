"""choice: which of several ways each transfer goes, by measured cost.

At set-up every way moves SIZES bytes a few times (some 60 ms in all); rank 0 picks the fastest for each kind and size
and tells the others, so that all ranks go the same way. A transfer goes the way of the nearest size measured.
Candidates for a reduction are the ways that add in rank order, which give one another's bits; gloo's is none of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fzero.program import Op, Ref, op
from fzero.runtime.collectives import tell
from fzero.runtime.handlers import Comm

SIZES = (1 << 12, 1 << 18, 1 << 22)  # bytes of the whole buffer
TIMES = 3
WAYS = {"gather": ("shared", "p2p", "gloo"), "reduce": ("shared", "p2p")}

Table = Mapping[tuple[str, int], str]


def _bytes(number: int) -> torch.Tensor:
    return torch.zeros(number, dtype=torch.uint8)


def measured(
    comms: Mapping[str, Comm], world_size: int, group: Any = None, memory: Callable[[int], torch.Tensor] = _bytes
) -> dict[tuple[str, int], str]:
    """{(kind, size): the way that rank 0 found fastest}. Collective; `comms` are by the names in WAYS.

    `memory` makes the buffers (uint8) that are moved: `Host.allocate` where steps run in arenas.
    """
    keys = [(kind, size) for kind in WAYS for size in SIZES]
    found = [_fastest(comms, kind, size, world_size, memory) for kind, size in keys]
    told = tell(" ".join(found).encode(), world_size, group)[0]
    return dict(zip(keys, told.decode().split(), strict=True))


def _fastest(
    comms: Mapping[str, Comm], kind: str, size: int, world_size: int, memory: Callable[[int], torch.Tensor]
) -> str:
    ways = [way for way in WAYS[kind] if way in comms]
    if len(ways) == 1:
        return ways[0]
    part = size // world_size // 4
    whole, own, scratch = (memory(4 * n).view(torch.float32) for n in (part * world_size, part, part * world_size))
    if kind == "gather":
        one, tensors = op("gather", [Ref("own")], [Ref("whole")]), [own, whole]
    else:
        one = op("reduce", [Ref("whole")], [Ref("own"), Ref("scratch")], mode="scatter", op="sum")
        tensors = [whole, own, scratch.view(world_size, -1)]
    costs: dict[str, float] = {}
    for way in ways:
        for _ in range(TIMES):
            began = time.perf_counter()
            comms[way].start("measured", one, tensors)
            comms[way].wait("measured")
            comms[way].settle("measured")
            costs[way] = min(costs.get(way, math.inf), time.perf_counter() - began)
    return min(costs, key=lambda way: costs[way])


class Fastest:
    """`handlers.Comm` that sends each transfer the way of a `measured` table."""

    def __init__(self, comms: Mapping[str, Comm], table: Table) -> None:
        self.comms, self.table = dict(comms), dict(table)
        self.by_name: dict[str, Comm] = {}
        self.number = 0

    def way(self, one: Op, tensors: list[torch.Tensor]) -> str:
        """The name of the comm for this transfer."""
        if one.kind not in WAYS:
            return "p2p"
        if one.kind == "reduce" and len(one.writes) == 1:
            return "shared"  # the program has no receive buffer for another
        whole = tensors[-1] if one.kind == "gather" else tensors[0]
        size = max(whole.numel() * whole.element_size(), 1)
        return self.table[one.kind, min(SIZES, key=lambda known: abs(math.log(known / size)))]

    def start(self, name: str, one: Op, tensors: list[torch.Tensor]) -> None:
        self.settle(name)
        self.number += 1
        self.by_name[name] = self.comms[self.way(one, tensors)]
        self.by_name[name].start(name, one, tensors)

    def ready(self, name: str) -> bool:
        return name not in self.by_name or self.by_name[name].ready(name)

    def wait(self, name: str) -> None:
        self.by_name[name].wait(name)

    def settle(self, name: str) -> None:
        if name in self.by_name:
            self.by_name[name].settle(name)

    def drain(self) -> None:
        for comm in self.comms.values():
            comm.drain()
