"""free: a buffer that the step made is freed after its last use, and after the transfers that read or write it.

run (last use of a)                     becomes      run; free a
"""

from __future__ import annotations

from fzero.passes import rewrite
from fzero.program import PERSISTENT, Op, Program, Ref, op


def free(program: Program) -> Program:
    kept = set(program.metrics.values()) | {n for n, b in program.buffers.items() if b.kind in PERSISTENT}
    pending: dict[str, tuple[str, ...]] = {}
    last: dict[str, int] = {}
    for index, one in enumerate(program.ops):
        for ref in (*one.reads, *one.writes):
            last[ref.name] = index
        if one.kind in ("gather", "reduce", "send", "recv"):
            pending[(one.writes or one.reads)[0].name] = tuple(r.name for r in (*one.reads, *one.writes))
        if one.kind == "wait":
            for name in pending.pop(one.reads[0].name, ()):
                last[name] = max(last[name], index)
    dying: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in kept:
            dying.setdefault(index, []).append(name)
    ops: list[Op] = []
    for index, one in enumerate(program.ops):
        ops.append(one)
        if index in dying:
            ops.append(op("free", [Ref(name) for name in sorted(dying[index])], why="last use"))
    return rewrite.finish(program, "free", ops=ops)
