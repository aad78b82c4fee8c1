"""schedule_updates: an update of what is held off the device comes right behind what it needs, amid the backward.

A gradient then lives from its reduction to its update, not until all updates at the step's end. The update waits for
every op before it that writes what it reads, and for every use of what it writes: with clipping by a norm over
all gradients, or a test that all are finite, it stays where it was. A step that holds all on the device keeps its
order: there a loss that fails in its backward leaves the state as it was.

    run bwd1; reduce g1; run bwd0; wait g1; reduce g0; wait g0; update g0 -> p0; update g1 -> p1
    becomes   run bwd1; reduce g1; run bwd0; wait g1; update g1 -> p1; reduce g0; wait g0; update g0 -> p0
"""

from __future__ import annotations

from fzero.ir import rewrite
from fzero.ir.program import Program
from fzero.passes.offload.early import last_of_losses, moved_early
from fzero.passes.offload.to_spaces import copies_of


def schedule_updates(program: Program) -> Program:
    """The program with updates behind the last segment of a loss moved to where their operands are there, and with them
    what only they need; itself where nothing is held off the device."""
    if not copies_of(program):
        return program
    last_loss = last_of_losses(program.ops)
    movable = {i for i, op in enumerate(program.ops) if i > last_loss and op.computes and op.is_flat}
    ops, _ = moved_early(program.ops, movable, lambda op: op.is_update)
    return rewrite.finish(program, "schedule_updates", ops=ops)
