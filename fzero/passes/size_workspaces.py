"""size_workspaces: writes on every run the bytes that it needs beside the program's buffers.

`workspace` is the block that its own values lie in, packed by their lives. `heap` is the memory that kernels ask the
allocator for.

A segment with stretches to compile (`how`, see `fzero.codegen.fusion`) runs with them or, where that fails, without: on
the processor it gets the larger of both needs. On a device it always runs with them, which the op says (`compile=`): a
stretch that does not compile is then aten's ops, in memory of the allocator's.

    run seg:ab12 ...      becomes      run seg:ab12 ... heap=4096 workspace=1048576
"""

from __future__ import annotations

from fzero import backend
from fzero.codegen import inplace, segment_memory
from fzero.codegen.fusion import device_of, fuse, how_of
from fzero.ir import rewrite
from fzero.ir.op import Op
from fzero.ir.program import Level, Program


def size_workspaces(program: Program, how: str | None = "none") -> Program:
    """The program with `workspace` and `heap` bytes on every run; `how` is `Options.compile`."""
    fused, _ = fuse(program, how)

    def measured(op: Op) -> Op:
        key = op.segment
        always = key in fused and backend.of(device_of(program.segments[key])).on_streams
        forms = (gm for gm in (None if always else program.segments[key], fused.get(key)) if gm is not None)
        either = [segment_memory.layout(gm, inplace.apart(op)) for gm in forms]
        sizes = {"workspace": max(x.nbytes for x in either), "heap": max(x.heap for x in either)}
        form = {"compile": how_of(program.segments[key], how)} if always else {}
        return op.with_attrs(**form, **{name: size for name, size in sizes.items() if size})

    ops = [measured(op) if op.computes else op for op in program.ops]
    return rewrite.finish(program, "size_workspaces", ops=ops, level=Level.SIZED)
