"""measure: writes on every run what it needs beyond the program's buffers while it runs.

`workspace` is the block its own values lie in (packed by their lives), `heap` what kernels ask of the allocator. With
`planned=False` a segment is called as a function that allocates what it needs: all of it is heap, but for the outputs.

    run seg:ab12 ...      becomes      run seg:ab12 ... heap=4096 workspace=1048576
"""

from __future__ import annotations

from fzero import segments, tape
from fzero.passes import rewrite
from fzero.plan.workspace import workspace_bytes
from fzero.program import Op, Program


def measure(program: Program, planned: bool = True) -> Program:
    found: dict[str, dict[str, int]] = {}
    ops: list[Op] = []
    for one in program.ops:
        if one.kind in ("run", "update"):
            key = str(one.get("segment"))
            if key not in found:
                found[key] = {name: size for name, size in _needs(program.segments[key], planned).items() if size}
            one = one.with_attrs(**found[key])
        ops.append(one)
    return rewrite.finish(program, "measure", ops=ops)


def _needs(gm: segments.fx.GraphModule, planned: bool) -> dict[str, int]:
    if planned:
        found = tape.layout(gm)
        return {"workspace": found.nbytes, "heap": found.heap}
    fresh, peak = segments.peak_bytes(gm, workspace_bytes)
    return {"heap": max(0, peak - fresh)}
