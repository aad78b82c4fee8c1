"""pick_way: measures each way of a transfer, and chooses the fastest way by size.

At set-up every way moves buffers of SIZES bytes a few times, which takes some 100 ms in all over loopback. What rank 0
has kept of its machine is taken, while that is near it; else ranks also compute, alone and beside the largest gather.
Rank 0 picks the fastest way for each kind and size, and sends its choice and its figures to the others. So all ranks go
the same way and expect the same costs (`fzero.cost.rates.Rates`). A transfer goes the way of the nearest measured size.

The candidates for a reduction are the ways that add in rank order: they give the same bits. gloo's own reduction does
not, so it is no candidate.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fzero.comm.agree import tell
from fzero.comm.protocol import Comm
from fzero.comm.routed import Routed
from fzero.cost import kept_costs
from fzero.cost.coding import nanoseconds
from fzero.cost.rates import Rates, fitted
from fzero.ir import kinds
from fzero.ir.op import Op, make_op
from fzero.ir.records import Ref
from fzero.kernels.codecs import CODECS

SIZES = (1 << 12, 1 << 18, 1 << 22)  # bytes of the whole buffer
TIMES = dict(zip(SIZES, (20, 10, 4), strict=True))  # alike on every rank
LONG = 0.01  # seconds of a product that is not run again
WAYS = {"all_gather": ("shared", "p2p", "gloo"), "reduce_scatter": ("shared", "p2p")}

CODING = ("encode", "decode")
SPEEDS = ("bf16", "f32", "memory")
FIGURES = (
    *(f"{kind} {size}" for kind in WAYS for size in SIZES),
    *(f"{codec} {way}" for codec in CODECS for way in CODING),
    *SPEEDS,
    "hidden",
)  # that are kept, and what rates are made of

Table = Mapping[tuple[str, int], str]


def _bytes(number: int) -> torch.Tensor:
    return torch.zeros(number, dtype=torch.uint8)


def measured(
    comms: Mapping[str, Comm],
    ranks: int,
    world_size: int,
    memory: Callable[[int], torch.Tensor] = _bytes,
    rank: int = 0,
) -> tuple[dict[tuple[str, int], str], Rates]:
    """Returns ({(kind, bytes): the fastest way}, rates), both as rank 0 measured them; the rates as it did first on its
    machine, while they are near what they were. Collective.

    comms: a comm by name, of the names in WAYS. ranks: how many each is among. memory: makes the buffers that are
    moved, as uint8 of a number of bytes; it is `SharedMemoryPeers.allocate` if steps run in shared arenas. rank: this
    one, of all.
    """
    keys = [(kind, size) for kind in WAYS for size in SIZES]
    moves = {key: _Move(*key, ranks, memory) for key in keys}
    costs = {
        key: {
            way: fastest_of(partial(moves[key].run, comms[way]), TIMES[key[1]]) for way in WAYS[key[0]] if way in comms
        }
        for key in keys
    }
    fastest = [min(costs[key], key=costs[key].__getitem__) for key in keys]
    table = dict(zip(keys, _from_rank_0(fastest, world_size), strict=True))
    spent = {f"{kind} {size}": _rounded(costs[kind, size][table[kind, size]]) for kind, size in keys}
    judged = {f"{kind} {SIZES[-1]}": spent[f"{kind} {SIZES[-1]}"] for kind in WAYS}
    question = f"{', '.join(comms)} among {ranks} of {world_size} ranks"
    kept = kept_costs.steady("transfers", question, FIGURES, judged) if rank == 0 else {}
    told: list[float] = _from_rank_0([kept[x] for x in FIGURES] if _possible(kept) else [], world_size)
    if not told:  # then it is measured, by all ranks: they move bytes for it together
        largest = ("all_gather", SIZES[-1])
        new = {**spent, **_computing(), "hidden": _rounded(_hidden(moves[largest], comms[table[largest]]))}
        if rank == 0:
            kept_costs.remember("transfers", {question: new}, anew=True)
        told = _from_rank_0([new[x] for x in FIGURES], world_size)
    figures = dict(zip(FIGURES, told, strict=True))
    fits = {kind: fitted({size: figures[f"{kind} {size}"] for size in SIZES}) for kind in WAYS}
    rates = Rates(
        latency={kind: fit[0] for kind, fit in fits.items()},
        wire_bytes={kind: fit[1] for kind, fit in fits.items()},
        hidden=figures["hidden"],
        flops={2: figures["bf16"], 4: figures["f32"]},
        memory_bytes=figures["memory"],
        ranks=ranks,
        coding={codec: (figures[f"{codec} encode"], figures[f"{codec} decode"]) for codec in CODECS},
    )
    return table, rates


def _from_rank_0(local: Sequence[Any], world_size: int) -> list[Any]:
    """Rank 0's list, on every rank."""
    values: list[Any] = json.loads(tell(json.dumps(local).encode(), world_size, None)[0])
    return values


def _computing() -> dict[str, float]:
    """What of the rates does not depend on transfers, by name."""
    coded = {f"{codec} {way}": x * 1e-9 for codec in CODECS for way, x in zip(CODING, nanoseconds(codec), strict=True)}
    speeds = dict(zip(SPEEDS, (_flops(torch.bfloat16), _flops(torch.float32), _memory()), strict=True))
    return {name: _rounded(value) for name, value in {**coded, **speeds}.items()}


def _possible(kept: Mapping[str, float]) -> bool:
    """Whether there are figures that a machine may have: a file may hold any."""
    return bool(kept) and all(kept[x] > 0 for x in SPEEDS) and kept["hidden"] <= 1


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


class _Move:
    """One transfer of `size` bytes, to be run over a comm. Nothing in it changes after it is made."""

    def __init__(self, kind: str, size: int, world_size: int, memory: Callable[[int], torch.Tensor]) -> None:
        part = size // world_size // 4
        whole, own, scratch = (memory(4 * n).view(torch.float32) for n in (part * world_size, part, part * world_size))
        if kinds.of(kind).gathers:
            self.op, self.tensors = make_op(kind, [Ref("own")], [Ref("whole")]), [own, whole]
        else:
            self.op = make_op(kind, [Ref("whole")], [Ref("own"), Ref("scratch")], op="sum")
            self.tensors = [whole, own, scratch.view(world_size, -1)]

    def run(self, comm: Comm, meanwhile: Callable[[], object] = lambda: None) -> None:
        comm.start("measured", self.op, self.tensors)
        meanwhile()
        comm.wait("measured")
        comm.settle("measured")


def _hidden(move: _Move, comm: Comm) -> float:
    """The fraction of a transfer that passes while this rank computes for as long as the transfer takes."""
    a, b, out = (torch.ones(256, 256, dtype=torch.float32) for _ in range(3))
    product = fastest_of(lambda: torch.mm(a, b, out=out))
    alone = fastest_of(lambda: move.run(comm))
    # every rank issues the same transfers; how much it computes beside them is its own affair
    times = min(max(1, round(alone / product)), 1000)

    def compute() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    compute_alone = fastest_of(compute)
    both = fastest_of(lambda: move.run(comm, compute))
    return min(max((alone + compute_alone - both) / min(alone, compute_alone), 0.0), 1.0)


def _flops(dtype: torch.dtype) -> float:
    """Of one product where that takes `LONG`: a processor without 16-bit products needs 50 ms for one."""
    a = torch.ones(384, 384, dtype=dtype)
    product = partial(torch.mm, a, a)
    first = fastest_of(product, 1)
    return 2 * 384**3 / (first if first > LONG else fastest_of(product))


def _memory() -> float:
    """Bytes per second of an elementwise op that reads two values and writes one; the tensors exceed most caches."""
    a, b = (torch.ones(1 << 22, dtype=torch.float32) for _ in range(2))
    return 3 * a.numel() * 4 / fastest_of(lambda: torch.add(a, b, out=a))


def fastest_of(run: Callable[[], object], times: int = 4) -> float:
    """Seconds of the fastest of a few runs."""
    least = math.inf
    for _ in range(times):
        began = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - began)
    return max(least, 1e-9)


class Fastest(Routed):
    """`Comm` that sends each transfer the way that a `measured` table names. `number` counts the starts; only `start`
    writes it."""

    def __init__(self, comms: Mapping[str, Comm], table: Table) -> None:
        super().__init__(comms)
        self.table, self.number = dict(table), 0

    def way(self, op: Op, tensors: list[torch.Tensor]) -> str:
        """The name of the comm for this transfer."""
        record = op.row.collective
        if record is None:
            return "shared" if "shared" in self.comms else "p2p"
        if record.combines and len(op.writes) == 1:
            return "shared"  # the program has no receive buffer for another
        source, target = (tensor.numel() * tensor.element_size() for tensor in (tensors[0], tensors[len(op.reads)]))
        size = max(record.whole_bytes(source, target), 1)
        return self.table[record.rate, min(SIZES, key=lambda known: abs(math.log(known / size)))]

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a transfer on its way's comm; see `Routed.start`."""
        self.number += 1
        super().start(name, op, tensors)
