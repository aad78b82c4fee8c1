"""free: a buffer that the step made is freed after its last use, and after the transfers that read or write it.

run (last use of a)                     becomes      run; free a
"""

from __future__ import annotations

from fzero.ir import rewrite
from fzero.ir.liveness import last_uses
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Op, Ref, make_op


def free(program: Program) -> Program:
    """The program with a `free` after the last use of every buffer that the step made."""
    kept = set(program.metrics.values()) | {n for n, b in program.buffers.items() if b.kind in PERSISTENT}
    dying: dict[int, list[str]] = {}
    for name, index in last_uses(program.ops).items():
        if name not in kept:
            dying.setdefault(index, []).append(name)
    ops: list[Op] = []
    for index, op in enumerate(program.ops):
        ops.append(op)
        if index in dying:
            ops.append(make_op("free", [Ref(name) for name in sorted(dying[index])], why="last use"))
    return rewrite.finish(program, "free", ops=ops)
