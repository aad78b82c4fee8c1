"""measure: writes on every run what it needs beyond the program's buffers while it runs.

`workspace` is the segment's own peak (values that live and die inside it, by liveness, and what kernels allocate) less
the fresh outputs, which are buffers. With it the text alone gives the peak.

    run seg:ab12 ...      becomes      run seg:ab12 ... workspace=1048576
"""

from __future__ import annotations

from fzero import segments
from fzero.passes import rewrite
from fzero.plan.workspace import workspace_bytes
from fzero.program import Op, Program


def measure(program: Program) -> Program:
    found: dict[str, int] = {}
    ops: list[Op] = []
    for one in program.ops:
        if one.kind in ("run", "update"):
            key = str(one.get("segment"))
            if key not in found:
                fresh, peak = segments.peak_bytes(program.segments[key], workspace_bytes)
                found[key] = max(0, peak - fresh)
            if found[key]:
                one = one.with_attrs(workspace=found[key])
        ops.append(one)
    return rewrite.finish(program, "measure", ops=ops)
