"""update_place: where elementwise work on offloaded leaves runs, on the device or on the host."""

from __future__ import annotations

from fzero.cost.choose import Choice
from fzero.ir.program import Program, lane_bytes
from fzero.ir.records import DISK, HOST
from fzero.passes.offload.place_moves import place_moves

# Bytes a second of a CUDA device's host, by trial on an H100 (PCIe 5, 16 cores): copies of page-locked memory with both
# lanes busy, and aten's fused AdamW beside such copies, by the bytes that it reads and writes.
LANE_RATE, UPDATE_RATE = 45e9, 85e9


def update_place(program: Program) -> Choice[str]:
    """Returns "device" or "cpu": on a CPU world where a step moves fewer bytes, for a CUDA device where moves and
    updates on the host take less time. program: before its moves are placed."""
    placed = {where: place_moves(program, on_host=where == "cpu") for where in ("device", "cpu")}
    if program.transport == "nccl":
        cost, shown = {where: _seconds(one) for where, one in placed.items()}, "{:.3g} s"
        by = f"the time of copies at {LANE_RATE / 1e9:.0f} GB/s each way, and of updates on the host at "
        by += f"{UPDATE_RATE / 1e9:.0f} GB/s"
    else:
        cost, shown = {where: sum(lane_bytes(one).values()) for where, one in placed.items()}, "{:,}"
        by = "the bytes that a step moves"
    where = "cpu" if cost["cpu"] < cost["device"] else "device"
    each = ", ".join(f"{name}: {shown.format(value)}" for name, value in cost.items())
    return Choice(where, f"update_on={where!r} by {by} ({each}). Spec(update_on=...) chooses otherwise")


def _seconds(program: Program) -> float:
    """The seconds of a step's moves on the busier lane, and of its updates on the host: neither hides the other."""
    lanes = lane_bytes(program)
    busier = max((nbytes for name, nbytes in lanes.items() if DISK not in name), default=0)
    updated = 0
    for op in program.ops:
        if op.computes and program.space(op) == HOST:
            updated += sum(program.buffers[ref.name].nbytes for ref in (*op.reads, *op.writes))
    return busier / LANE_RATE + updated / UPDATE_RATE
