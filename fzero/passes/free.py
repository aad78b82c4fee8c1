"""free: a buffer that the step made is freed after its last use, and after the transfers that read or write it.

What an update on the host worked on may stay for some runs more: the host works beside the device there, and the next
gradient that comes down has a place of its own.

    run (last use of a)                     becomes      run; free a
"""

from __future__ import annotations

from bisect import bisect_left

from fzero.ir import rewrite
from fzero.ir.liveness import last_uses
from fzero.ir.op import make_op
from fzero.ir.program import Level, Program
from fzero.ir.records import HOST, PERSISTENT, Ref


def free(program: Program, linger: int = 0) -> Program:
    """The program with a `free` after the last use of every buffer that the step made. linger: how many runs later that
    is for what an op on the host uses last."""
    kept = set(program.metrics.values()) | {n for n, b in program.buffers.items() if b.kind in PERSISTENT}
    dying: dict[int, list[str]] = {}
    runs = [index for index, op in enumerate(program.ops) if op.computes]
    for name, index in last_uses(program.ops).items():
        op = program.ops[index]
        if linger > 0 and op.computes and program.space(op) == HOST:
            index = runs[min(bisect_left(runs, index) + linger, len(runs) - 1)]
        if name not in kept:
            dying.setdefault(index, []).append(name)
    edits = rewrite.Edits()
    for index, names in dying.items():
        edits.after[index].append(make_op("free", map(Ref, sorted(names)), why="last use"))
    return edits.apply(program, "free", level=Level.FREED)
