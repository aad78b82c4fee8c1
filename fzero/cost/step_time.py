"""step_time: how long a program takes on one rank, by measured rates.

The rank computes, op after op. The wire moves one transfer after the other, in the order they start, and so does each
lane between device, host and disk. While a segment runs, the transfer at the head of the wire advances by `hidden` of
that time, the move at the head of a lane by `lane_hidden`. A wait takes the time that is left of its transfer and of
those before it; meanwhile the others go on.

A segment takes the sum over its nodes. A matmul, a convolution or an attention takes its operations (2 m n k) at
`flops`. Another op takes the bytes that it reads and writes at `memory_bytes` a second, a view nothing.

Left out are ranks that come late, ops too small for any rate (some microseconds each), caches, and that reads and
writes share a disk.
"""

from __future__ import annotations

import torch
from torch import fx

from fzero.cost.rates import Rates
from fzero.ir import fx_nodes, fx_values
from fzero.ir.program import Program, lane, moved_bytes

aten = torch.ops.aten
WIRE = "wire"


def seconds(program: Program, rates: Rates) -> float:
    """The seconds that one rank needs for the program."""
    clock = 0.0
    # by lane, the seconds left of each transfer, by the buffer that it writes, in order
    queues: dict[str, dict[str, float]] = {WIRE: {}}
    by_segment: dict[str, float] = {}
    for op in program.ops:
        if op.computes:
            key = op.segment
            taken = (
                by_segment[key]
                if key in by_segment
                else by_segment.setdefault(key, _compute(program.segments[key], rates))
            )
            clock += taken
            for name, queue in queues.items():
                _advance(queue, (rates.hidden if name == WIRE else rates.lane_hidden) * taken)
        elif op.row.runs is not None:
            moved = sum(program.buffers[ref.name].nbytes for ref in (*op.reads, *op.writes))
            clock += moved / rates.memory_bytes
        elif op.is_collective:
            whole = op.writes[0] if op.gathers else op.reads[0]
            queues[WIRE][op.target] = rates.transfer(op.row.rate, program.buffers[whole.name].nbytes)
        elif way := "→".join(lane(program, op)):
            rate = rates.lanes.get(way)
            queues.setdefault(way, {})[op.target] = moved_bytes(program, op) / rate if rate else 0.0
        elif op.is_wait:
            clock += _waited(queues, op.target)
    return clock


def _waited(queues: dict[str, dict[str, float]], target: str) -> float:
    """The seconds until a transfer is done: of it, and of those before it in its queue. In place."""
    queue = next((queue for queue in queues.values() if target in queue), {})
    names = list(queue)
    taken = sum(queue.pop(name) for name in names[: names.index(target) + 1] if name in queue) if names else 0.0
    for other in queues.values():
        if other is not queue:
            _advance(other, taken)
    return taken


def _advance(wire: dict[str, float], budget: float) -> None:
    """Takes `budget` seconds off the transfers, the first ones first. In place."""
    for name, left in wire.items():
        wire[name] = max(left - budget, 0.0)
        budget = max(budget - left, 0.0)


def _compute(gm: fx.GraphModule, rates: Rates) -> float:
    """The seconds that a segment takes."""
    return sum(_node(node, rates) for node in gm.graph.nodes if fx_nodes.is_compute(node))


def _node(node: fx.Node, rates: Rates) -> float:
    if fx_nodes.is_view(node):
        return 0.0
    work = flops(node)
    if work:
        return work / rates.flops[min(4, max(2, _values(node)[0].dtype.itemsize))]
    moved = sum(x.numel() * x.element_size() for x in (*_values(node), *_operands(node)))
    return moved / rates.memory_bytes


def flops(node: fx.Node) -> int:
    """Floating-point operations of a matmul, a convolution or an attention; 0 for another op."""
    name = fx_nodes.op_name(node)
    if name.removeprefix("onednn_") in ("mm", "bmm", "addmm", "baddbmm"):
        first = _operands(node)[-2 if "out" not in node.kwargs else -3]
        result = node.kwargs["out"].meta["val"] if "out" in node.kwargs else _values(node)[0]  # type: ignore[union-attr]
        return 2 * result.numel() * int(first.shape[-1])
    if name in ("convolution", "convolution_backward"):
        weight = _operands(node)[1 if name == "convolution" else 2]
        result = _values(node)[0] if name == "convolution" else _operands(node)[0]
        return (2 if name == "convolution" else 4) * result.numel() * weight.numel() // max(weight.shape[0], 1)
    if name.startswith("_scaled_dot_product"):
        query, key = _operands(node)[1:3] if "backward" in name else _operands(node)[:2]
        return (10 if "backward" in name else 4) * query.numel() * int(key.shape[-2])
    return 0


def _operands(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of the arguments, in order; an argument that comes twice is there twice."""
    nodes: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), nodes.append)
    return [x for n in nodes for x in fx_values.tensors(n.meta.get("val"))]


def _values(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of the result; of an op that returns nothing, those that it writes to."""
    written = (n.meta.get("val") for n in fx_nodes.mutated(node))
    return fx_values.tensors(node.meta.get("val")) or [x for value in written for x in fx_values.tensors(value)]
