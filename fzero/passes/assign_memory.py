"""assign_memory: every buffer that a step makes, and every workspace, gets its place in an arena, kept between steps.

Values that are alive at one moment lie apart (`fzero.ir.offset_assignment`). A transfer's buffers live until its wait;
the batch lives from before the first op. Nothing is allocated or returned to the system while the program runs, so its
memory stays mapped. The device and the host have an arena each; places in the host's, and what a disk reads or writes,
begin at whole pages. On a CPU the page faults of fresh memory cost as much as half of a plain training step.

    buffer grad:b0 f32[1024] grad           becomes      buffer grad:b0 f32[1024] grad at=65536
    run ... workspace=4096                  becomes      run ... workspace=4096 at=131072
"""

from __future__ import annotations

from dataclasses import replace

from fzero.ir import rewrite
from fzero.ir.liveness import intervals
from fzero.ir.offset_assignment import ALIGN_BYTES, PAGE_BYTES, pack
from fzero.ir.program import Level, Program, lane
from fzero.ir.records import DEVICE, DISK, HOST


def assign_memory(program: Program) -> Program:
    """The program with a place in an arena for every buffer that the step makes and for every workspace."""
    lives = intervals(program.ops, program.buffers, program.metrics.values())
    blocks = [i for i, op in enumerate(program.ops) if op.workspace]
    offset_of: dict[str | int, int] = {}
    beside_disk = {ref.name for op in program.ops if DISK in lane(program, op) for ref in (*op.reads, *op.writes)}
    for space in (DEVICE, HOST):
        names = [name for name in lives if program.buffers[name].space == space]
        runs = [i for i in blocks if program.space(program.ops[i]) == space]
        items = [(*lives[name], program.buffers[name].nbytes) for name in names]
        items += [(i, i, program.ops[i].workspace) for i in runs]
        pages = [space == HOST or name in beside_disk for name in (*names, *runs)]
        places, _ = pack(items, [PAGE_BYTES if whole else ALIGN_BYTES for whole in pages])
        offset_of.update(zip([*names, *runs], places, strict=True))
    ops = [op.with_attrs(at=offset_of[i]) if i in offset_of else op for i, op in enumerate(program.ops)]
    buffers = {name: replace(b, at=offset_of.get(name, b.at)) for name, b in program.buffers.items()}
    return rewrite.finish(program, "assign_memory", ops=ops, buffers=buffers, level=Level.PLACED)
