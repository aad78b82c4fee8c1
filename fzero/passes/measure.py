"""measure: writes on every run what it needs beyond the program's buffers while it runs.

`workspace` is the block its own values lie in (packed by their lives), `heap` what kernels ask of the allocator. A
segment with stretches to compile (`how`, see `fzero.fusion`) runs with them or, where that fails, without: it gets what
either needs.

    run seg:ab12 ...      becomes      run seg:ab12 ... heap=4096 workspace=1048576
"""

from __future__ import annotations

from fzero import tape
from fzero.fusion import fuse
from fzero.passes import rewrite
from fzero.program import Program


def measure(program: Program, how: str = "none") -> Program:
    fused, _ = fuse(program, how)
    needs: dict[str, dict[str, int]] = {}
    for key, gm in program.segments.items():
        either = [tape.layout(form) for form in (gm, fused.get(key)) if form is not None]
        sizes = {"workspace": max(x.nbytes for x in either), "heap": max(x.heap for x in either)}
        needs[key] = {name: size for name, size in sizes.items() if size}
    runs = ("run", "update")
    ops = [one.with_attrs(**needs[str(one.get("segment"))]) if one.kind in runs else one for one in program.ops]
    return rewrite.finish(program, "measure", ops=ops)
