"""simulate: how long a program takes on one rank, by measured rates.

Two lanes. The rank computes, op after op; the wire moves one transfer after the other, in the order they start. While a
segment runs, the transfer at the head of the wire advances by `hidden` of that time; a wait takes what is left of its
transfer and of those before it. A segment takes the larger part of what its products and its other ops need:
2 m n k operations at `flops`, and what is read and written at `memory_bytes` a second.

What is left out: ranks that come late, ops too small for any rate (some microseconds each), caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fzero import segments
from fzero.program import Op, Program

aten = torch.ops.aten


@dataclass(frozen=True)
class Rates:
    """What was measured. `latency` in seconds and `wire_bytes` a second of the whole buffer, by kind ("gather",
    "reduce"); `hidden`: the part of a transfer that passes beside compute, 0..1; `flops` of products of two and of four
    bytes an element, and `memory_bytes` of other ops, a second."""

    latency: Mapping[str, float]
    wire_bytes: Mapping[str, float]
    hidden: float
    flops: Mapping[int, float]
    memory_bytes: float
    known: dict[str, float] = field(default_factory=dict, compare=False)  # seconds by segment

    def transfer(self, kind: str, nbytes: int) -> float:
        """Seconds that a transfer of a whole buffer takes alone."""
        return self.latency[kind] + nbytes / self.wire_bytes[kind]


def seconds(program: Program, rates: Rates) -> float:
    """What one rank needs for the program."""
    clock = 0.0
    wire: dict[str, float] = {}  # seconds left of each transfer, by what it writes, in order
    for one in program.ops:
        if one.kind in ("run", "update"):
            taken = _compute(program, one, rates)
            clock += taken
            _advance(wire, rates.hidden * taken)
        elif one.kind in ("gather", "reduce"):
            whole = one.writes[0] if one.kind == "gather" else one.reads[0]
            wire[one.writes[0].name] = rates.transfer(one.kind, program.buffers[whole.name].nbytes)
        elif one.kind == "wait" and one.reads[0].name in wire:
            names = list(wire)
            for name in names[: names.index(one.reads[0].name) + 1]:
                clock += wire.pop(name)
    return clock


def _advance(wire: dict[str, float], budget: float) -> None:
    for name, left in wire.items():
        wire[name] = max(left - budget, 0.0)
        budget = max(budget - left, 0.0)


def _compute(program: Program, one: Op, rates: Rates) -> float:
    key = str(one.get("segment"))
    if key not in rates.known:
        nodes = [node for node in program.segments[key].graph.nodes if segments.is_compute(node)]
        rates.known[key] = sum(_node(node, rates) for node in nodes)
    return rates.known[key]


def _node(node: fx.Node, rates: Rates) -> float:
    if segments.is_view(node):
        return 0.0
    work = flops(node)
    if work:
        return work / rates.flops[min(4, max(2, _values(node)[0].dtype.itemsize))]
    moved = sum(x.numel() * x.element_size() for x in (*_values(node), *_operands(node)))
    return moved / rates.memory_bytes


def flops(node: fx.Node) -> int:
    """Operations of a matrix product, a convolution or an attention; 0 for another op."""
    name = segments.op_name(node)
    if name.removeprefix("onednn_") in ("mm", "bmm", "addmm", "baddbmm"):
        first = _operands(node)[-2 if "out" not in node.kwargs else -3]
        made = node.kwargs["out"].meta["val"] if "out" in node.kwargs else _values(node)[0]  # type: ignore[union-attr]
        return 2 * made.numel() * int(first.shape[-1])
    if name in ("convolution", "convolution_backward"):
        weight = _operands(node)[1 if name == "convolution" else 2]
        made = _values(node)[0] if name == "convolution" else _operands(node)[0]
        return (2 if name == "convolution" else 4) * made.numel() * weight.numel() // max(weight.shape[0], 1)
    if name.startswith("_scaled_dot_product"):
        query, key = _operands(node)[1:3] if "backward" in name else _operands(node)[:2]
        return (10 if "backward" in name else 4) * query.numel() * int(key.shape[-2])
    return 0


def _operands(node: fx.Node) -> list[torch.Tensor]:
    """What the arguments are, in order, one that is given twice twice."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return [x for n in found for x in _tensors(n.meta.get("val"))]


def _values(node: fx.Node) -> list[torch.Tensor]:
    return _tensors(node.meta.get("val")) or [x for n in segments.mutated(node) for x in _tensors(n.meta.get("val"))]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [x for x in value or () if isinstance(x, torch.Tensor)]


# --- choices by these seconds -----------------------------------------------------------------------------------------

DEPTHS = (0, 1, 2, 4)
GAIN = 0.005  # a choice other than the rule's must be predicted to save this part of a step
BUCKETS = tuple(n << 20 for n in (8, 16, 32, 64, 128))
LATENCY_SHARE = 0.02


def prefetch_depth(programs: Mapping[int, Program], rule: int, rates: Rates) -> tuple[int, str]:
    """(how many segments ahead gathers start, the reason): the fastest of these programs by depth, `rule`'s unless
    another saves `GAIN`."""
    found = {depth: seconds(program, rates) for depth, program in programs.items()}
    best = min(found, key=lambda depth: (found[depth], depth))
    depth = best if found[best] < (1 - GAIN) * found[rule] else rule
    shown = ", ".join(f"{n}: {s:.3g} s" for n, s in found.items())
    return depth, f"prefetch={depth} by predicted seconds of a step ({shown}). Spec(prefetch=...) chooses otherwise"


def bucket_costs(rates: Rates) -> dict[str, float]:
    """Seconds a GB of transfers of each of `BUCKETS`, of the kind for which that is most."""
    return {str(size): max(rates.transfer(kind, size) for kind in rates.latency) / size * 1e9 for size in BUCKETS}


def bucket_bytes(costs: Mapping[str, float]) -> int:
    """The smallest bucket that costs at most `LATENCY_SHARE` more a byte than the cheapest: larger ones gain nothing,
    smaller ones start earlier and are freed sooner.

    >>> bucket_bytes({"8388608": 0.5, "33554432": 0.301, "134217728": 0.3})
    33554432
    """
    least = min(costs.values())
    return min(int(size) for size, cost in costs.items() if cost <= (1 + LATENCY_SHARE) * least)


def fitted(seconds_by_bytes: Mapping[int, float]) -> tuple[float, float]:
    """(latency in seconds, bytes a second) of transfers that took so long: what the smallest took, and what the largest
    took more; on a busy machine the smallest may have taken as long."""
    small, large = min(seconds_by_bytes), max(seconds_by_bytes)
    latency = seconds_by_bytes[small]
    return latency, large / max(seconds_by_bytes[large] - latency, seconds_by_bytes[large] / 10)
