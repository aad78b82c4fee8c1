"""measure: writes on every run what it needs beyond the program's buffers while it runs.

`workspace` is the block its own values lie in (packed by their lives), `heap` what kernels ask of the allocator. A
segment with stretches to compile (`how`, see `fzero.fusion`) runs with them or, where that fails, without: it gets what
either needs.

    run seg:ab12 ...      becomes      run seg:ab12 ... heap=4096 workspace=1048576
"""

from __future__ import annotations

from fzero import reuse, tape
from fzero.fusion import fuse
from fzero.passes import rewrite
from fzero.program import Op, Program


def measure(program: Program, how: str = "none") -> Program:
    fused, _ = fuse(program, how)

    def measured(one: Op) -> Op:
        key = str(one.get("segment"))
        forms = (gm for gm in (program.segments[key], fused.get(key)) if gm is not None)
        either = [tape.layout(gm, reuse.apart(one)) for gm in forms]
        sizes = {"workspace": max(x.nbytes for x in either), "heap": max(x.heap for x in either)}
        return one.with_attrs(**{name: size for name, size in sizes.items() if size})

    ops = [measured(one) if one.kind in ("run", "update") else one for one in program.ops]
    return rewrite.finish(program, "measure", ops=ops)
