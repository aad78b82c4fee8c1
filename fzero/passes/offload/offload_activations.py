"""offload_activations: what a layer's forward keeps for its backward waits on the host.

A rule may match a parameter that a forward segment reads. Then each value of that segment that a backward segment reads
moves down after its last use in the forward, and up again `ahead` runs before its first in the backward. In between the
device holds none of it. A value that is used again at once stays. The bits are the same, for a move changes nothing.

    run x0 w0 -> x1 a1;  run x1 w1 -> x2 a2;  ...;  run g1 a1 w0 -> g0
    becomes   run x0 w0 -> x1 a1;  move a1 -> a1.host;  run x1 w1 -> x2 a2;  wait a1.host;  ...;
              move a1.host -> a1.back;  run ...;  wait a1.back;  run g1 a1.back w0 -> g0
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from fzero.ir import rewrite
from fzero.ir.op import StepPhase, make_op
from fzero.ir.program import Program
from fzero.ir.records import DEVICE, HOST, Ref
from fzero.passes.common.run_layers import read_leaves
from fzero.passes.offload.to_spaces import staging
from fzero.passes.recompute import says

APART = 2  # runs from one use to the next that a move needs more than: beside one it goes down, beside one up


def offload_activations(program: Program, rules: Mapping[str, str], ahead: int = 1) -> Program:
    """The program with the values that `rules` say "offload" for on the host between forward and backward; itself where
    none does. `rules` map path rules of parameters to "offload" or another word; the first match wins."""
    if "offload" not in rules.values():
        return program
    runs = [i for i, op in enumerate(program.ops) if op.computes]
    phase = {i: op.phase for i in runs if (op := program.ops[i]).in_region}
    reads, writes = rewrite.reads_of(program.ops), rewrite.writes_of(program.ops)
    edits = rewrite.Edits()
    for index, (op, leaves) in enumerate(read_leaves(program)):
        if phase.get(index) is not StepPhase.FORWARD or not says(leaves, rules, "offload"):
            continue
        for ref in (r for r in op.writes if r.start is None and len(writes[r.name]) == 1):
            uses = [i for i, _ in reads.get(ref.name, ())]
            late = [i for i in uses if phase.get(i) is StepPhase.BACKWARD]
            last = max((i for i in uses if i not in late), default=index)
            first = min(late, default=0)
            gap = bisect_left(runs, first) - bisect_left(runs, last)
            if program.buffers[ref.name].kind != "activation" or last < index or gap <= APART:
                continue
            down, up = f"{ref.name}.host", f"{ref.name}.back"
            edits.buffers |= {n: staging(program.buffers[ref.name], n, to) for n, to in ((down, HOST), (up, DEVICE))}
            why = f"activations of {op.why}"
            settled = runs[bisect_left(runs, last) + 1] + 1
            start = max(runs[max(bisect_left(runs, first) - ahead, 0)], settled)
            edits.before[last + 1].append(make_op("move", [ref], [Ref(down)], why=why))
            edits.before[settled].append(make_op("wait", [Ref(down)], why=why))
            edits.before[start].append(make_op("move", [Ref(down)], [Ref(up)], why=why))
            edits.before[first].append(make_op("wait", [Ref(up)], why=why))
            for i in late:
                edits.rename[i][ref.name] = up
    return edits.apply(program, "offload_activations")
