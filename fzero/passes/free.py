"""free: every buffer that the step made is freed after its last use, and large ones hand their memory on.

A free waits for the transfers that read or write the buffer. Of buffers of one size whose lives do not overlap (the
gather, gradient and receive buffers of equal layers), a later one takes over an earlier one's memory when that is the
last one freed before it starts: double buffers without an allocator.

    run (last use of a)                     becomes      run; free a
    run; free a; gather q -> b              becomes      b reuses a
"""

from __future__ import annotations

from dataclasses import replace

from fzero.passes import rewrite
from fzero.program import PERSISTENT, Buffer, Op, Program, Ref, op

REUSABLE = ("gather", "grad", "scratch")


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
    return rewrite.finish(program, "free", ops=ops, buffers=_handed_on(program, ops))


def _handed_on(program: Program, ops: list[Op]) -> dict[str, Buffer]:
    """`reuses` for gather, gradient and receive buffers: the most recently freed one of the same bytes and kind.

    Memory kept for a later buffer is held in between, so one is handed on only to a buffer that starts within `NEAR`
    ops.
    """
    buffers = dict(program.buffers)
    freed: dict[tuple[str, int], list[tuple[int, str]]] = {}
    alive: set[str] = set()
    for index, one in enumerate(ops):
        for ref in one.writes:
            buffer = buffers[ref.name]
            if buffer.kind not in REUSABLE or ref.name in alive:
                continue
            alive.add(ref.name)
            pool = freed.get((buffer.kind, buffer.nbytes), [])
            if pool and index - pool[-1][0] <= NEAR:
                buffers[ref.name] = replace(buffer, reuses=pool.pop()[1])
        if one.kind == "free":
            for ref in one.reads:
                buffer = buffers[ref.name]
                if buffer.kind in REUSABLE:
                    freed.setdefault((buffer.kind, buffer.nbytes), []).append((index, ref.name))
    return buffers


NEAR = 6  # ops
