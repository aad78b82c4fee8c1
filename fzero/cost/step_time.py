"""step_time: how long a program takes on one rank, by measured rates.

Two lanes. The rank computes, op after op; the wire moves one transfer after the other, in the order they start. While a
segment runs, the transfer at the head of the wire advances by `hidden` of that time; a wait takes what is left of its
transfer and of those before it. A segment takes the larger part of what its products and its other ops need:
2 m n k operations at `flops`, and what is read and written at `memory_bytes` a second.

What is left out: ranks that come late, ops too small for any rate (some microseconds each), caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fzero.cost.rates import Rates
from fzero.ir import segments
from fzero.ir.program import Program

aten = torch.ops.aten


def seconds(program: Program, rates: Rates) -> float:
    """What one rank needs for the program."""
    clock = 0.0
    wire: dict[str, float] = {}  # seconds left of each transfer, by what it writes, in order
    known: dict[str, float] = {}  # seconds by segment
    for op in program.ops:
        if op.computes:
            key = op.segment
            taken = known[key] if key in known else known.setdefault(key, _compute(program.segments[key], rates))
            clock += taken
            _advance(wire, rates.hidden * taken)
        elif op.row.runs is not None:
            moved = sum(program.buffers[ref.name].nbytes for ref in (*op.reads, *op.writes))
            clock += moved / rates.memory_bytes
        elif op.is_collective:
            whole = op.writes[0] if op.gathers else op.reads[0]
            wire[op.target] = rates.transfer(op.row.rate, program.buffers[whole.name].nbytes)
        elif op.is_wait and op.reads[0].name in wire:
            names = list(wire)
            for name in names[: names.index(op.reads[0].name) + 1]:
                clock += wire.pop(name)
    return clock


def _advance(wire: dict[str, float], budget: float) -> None:
    for name, left in wire.items():
        wire[name] = max(left - budget, 0.0)
        budget = max(budget - left, 0.0)


def _compute(gm: fx.GraphModule, rates: Rates) -> float:
    """Seconds that a segment runs for."""
    return sum(_node(node, rates) for node in gm.graph.nodes if segments.is_compute(node))


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
