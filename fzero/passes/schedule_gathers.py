"""schedule_gathers: a parameter is whole only while a segment uses it.

The naive gather at the top becomes one before each stretch of neighbouring uses; after it the buffer is dead until the
next. A layer is gathered for its forward and again for its backward (3P bytes a step in all); A parameter that
neighbouring segments use, like the head, is gathered once for both. Pieces of a layer between which its values move
over a model axis count as one. Stages 1 and 2 gather once a step and keep it.

    gather p -> p.full; wait; run(p.full) fwd; ...; run(p.full) bwd
    becomes   gather p -> p.full.0; wait; run(p.full.0) fwd; ...; gather p -> p.full.1; wait; run(p.full.1) bwd
"""

from __future__ import annotations

from dataclasses import replace

from fzero.ir import rewrite
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Ref
from fzero.passes.common import run_layers


def schedule_gathers(program: Program) -> Program:
    """The program with each parameter gathered before the stretch of segments that uses it."""
    edits = rewrite.Edits()
    reads = rewrite.reads_of(program.ops)
    turn = _turns(program)
    moved: set[str] = set()
    for op in program.ops:
        if not op.gathers or program.buffers[op.writes[0].name].kind != "gathered":
            continue
        full = op.writes[0].name
        moved.add(full)
        kept = program.buckets[program.buffers[full].bucket or ""].keeps_gathered
        stretches: list[list[int]] = []
        for index in sorted({i for i, _ in reads.get(full, [])}):
            if stretches and (kept or turn[index] - turn[stretches[-1][-1]] <= 1):
                stretches[-1].append(index)
            else:
                stretches.append([index])
        for number, stretch in enumerate(stretches):
            name = f"{full}.{number}"
            edits.buffers[name] = replace(program.buffers[full], name=name)
            why = rewrite.reason_for(program.ops[stretch[0]], program.buffers)
            start = replace(op, writes=(Ref(name),), why=why)
            wait = Op("wait", (Ref(name),), why=why)
            edits.before[stretch[0]] += [start, wait]
            for index in stretch:
                edits.rename[index][full] = name
    edits.instead = {i: () for i, op in enumerate(program.ops) if (op.gathers or op.is_wait) and op.target in moved}
    return edits.apply(program, "schedule_gathers")


def _turns(program: Program) -> list[int]:
    """For each op, how many runs there were up to it: the clock in which uses are neighbours. It does not go on between
    two runs of one layer and phase, if transfers of values are all that parts them."""
    turns, count, moved, last = [], 0, False, None
    layer = run_layers.layers(program)
    for index, op in enumerate(program.ops):
        if op.computes:
            own = layer[index], op.phase
            count += not (moved and own == last)
            moved, last = False, own
        elif op.transfers and program.buffers[op.target].kind == "activation":
            moved = True
        turns.append(count)
    return turns
