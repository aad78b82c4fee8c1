"""varying_buffers: which buffers may differ between the ranks that share a batch."""

from __future__ import annotations

from fzero.ir.program import Program
from fzero.ir.records import VARYING


def varying_buffers(program: Program) -> set[str]:
    """The names of the buffers that may differ between ranks along the axes that cut the batch: the batch, the rank's
    place, what a rank keeps of its own, and what is computed of these before a transfer brings all ranks one result."""
    found = {name for name, b in program.buffers.items() if b.kind in VARYING or b.per_rank}
    for op in program.ops:
        record = op.row.collective
        equal = record is not None and record.target != "slice" and (record.combines or record.source == "slice")
        every = op.axis is not None and program.mesh.in_order(op.axis) == program.mesh.data_axes
        if not (equal and every) and any(ref.name in found for ref in op.reads):
            found.update(ref.name for ref in op.writes)
    return found
