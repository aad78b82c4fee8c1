"""place_gathers: a parameter is whole only while a segment uses it.

The naive gather at the top becomes one before each stretch of neighbouring uses; after it the buffer is dead until the
next. A layer is gathered for its forward and again for its backward (3P bytes a step in all); what is used by
neighbouring segments, like the head, is gathered once for both. Stages 1 and 2 gather once a step and keep it.

    gather p -> p.full; wait; run(p.full) fwd; ...; run(p.full) bwd
    becomes   gather p -> p.full.0; wait; run(p.full.0) fwd; ...; gather p -> p.full.1; wait; run(p.full.1) bwd
"""

from __future__ import annotations

from dataclasses import replace

from fzero.passes import rewrite
from fzero.program import Op, Program, Ref


def place_gathers(program: Program) -> Program:
    buffers = dict(program.buffers)
    reads = rewrite.reads_of(program.ops)
    turn = _turns(program.ops)
    before: dict[int, list[Op]] = {}
    names: dict[tuple[int, str], str] = {}
    moved: set[str] = set()
    for one in program.ops:
        if one.kind != "gather" or program.buffers[one.writes[0].name].kind != "gather":
            continue
        full = one.writes[0].name
        moved.add(full)
        kept = program.buckets[program.buffers[full].bucket or ""].stage < 3
        stretches: list[list[int]] = []
        for index in sorted({i for i, _ in reads.get(full, [])}):
            if stretches and (kept or turn[index] - turn[stretches[-1][-1]] <= 1):
                stretches[-1].append(index)
            else:
                stretches.append([index])
        for number, stretch in enumerate(stretches):
            name = f"{full}.{number}"
            buffers[name] = replace(buffers[full], name=name)
            why = f"for {program.ops[stretch[0]].why}"
            start = replace(one, writes=(Ref(name),), why=why)
            wait = Op("wait", (Ref(name),), why=why)
            before.setdefault(stretch[0], []).extend([start, wait])
            names.update({(index, full): name for index in stretch})
    ops: list[Op] = []
    for index, one in enumerate(program.ops):
        target = (*one.writes, *one.reads)[0].name if one.kind in ("gather", "wait") else ""
        if target in moved:
            continue
        ops += before.get(index, [])
        own = {ref.name: names[index, ref.name] for ref in one.reads if (index, ref.name) in names}
        ops.append(rewrite.moved(one, own))
    return rewrite.finish(program, "place_gathers", ops=ops, buffers=buffers)


def _turns(ops: tuple[Op, ...]) -> list[int]:
    """For each op, how many runs came before it: the clock in which uses are neighbours."""
    turns, count = [], 0
    for one in ops:
        turns.append(count)
        count += one.kind in ("run", "update")
    return turns
