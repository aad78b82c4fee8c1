"""update_place: where elementwise work on offloaded leaves runs, on the device or on the host."""

from __future__ import annotations

from fzero import backend
from fzero.cost.op_price import UPDATES, op_seconds
from fzero.cost.rates import H100, Rates
from fzero.ir.decisions import Choice
from fzero.ir.program import Program, lane_bytes
from fzero.ir.records import HOST
from fzero.passes.offload.place_moves import place_moves


def cheaper_place(program: Program, rates: Rates | None = None) -> Choice[str]:
    """Returns "device" or "cpu": on a CPU world where a step moves fewer bytes, for a CUDA device where moves and
    updates on the host take less time. program: before its moves are placed. rates: of the machine; those of an H100
    where they are not known."""
    placed = {where: place_moves(program, on_host=where == "cpu") for where in ("device", "cpu")}
    timed = backend.of_transport(program.transport).on_streams
    if timed:
        known = rates if rates is not None and rates.lanes and rates.host_bytes else H100
        cost, shown = {where: _seconds(one, known) for where, one in placed.items()}, "{:.3g} s"
        by = f"the time of copies at {max(known.lanes.values()) / 1e9:.3g} GB/s each way, and of updates on the host "
        by += f"at {known.host_bytes / 1e9:.3g} GB/s"
    else:
        cost, shown = {where: sum(lane_bytes(one).values()) for where, one in placed.items()}, "{:,}"
        by = "the bytes that a step moves"
    where = "cpu" if cost["cpu"] < cost["device"] else "device"
    each = ", ".join(f"{name}: {shown.format(value)}" for name, value in cost.items())
    reason = f"update_on={where!r} by {by} ({each}). Spec(update_on=...) chooses otherwise"
    return Choice.least(cost, where, reason, "s" if timed else "bytes")


def _seconds(program: Program, rates: Rates) -> float:
    """The seconds of a step's moves on the busier lane, and of its updates on the host: neither hides the other."""
    spent: dict[str, float] = {}
    for op in program.ops:
        if op.moves or (op.computes and program.space(op) == HOST):
            lane, taken = op_seconds(program, op, rates)
            spent[lane] = spent.get(lane, 0.0) + taken
    return max((spent.get(lane, 0.0) for lane in rates.lanes), default=0.0) + spent.get(UPDATES, 0.0)
