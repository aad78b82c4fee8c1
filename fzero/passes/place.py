"""place: every buffer that a step makes, and every workspace, gets its place in one arena, reused from step to step.

What is alive at one moment lies apart (`fzero.plan.pack`); a transfer's buffers live until it is waited for, the batch
from before the first op. Nothing is allocated or returned to the system while the program runs, so that its memory
stays mapped: on a CPU the page faults of fresh memory cost as much as half of a plain training step.

    buffer grad:b0 f32[1024] grad           becomes      buffer grad:b0 f32[1024] grad at=65536
    run ... workspace=4096                  becomes      run ... workspace=4096 at=131072
"""

from __future__ import annotations

from dataclasses import replace

from fzero.passes import rewrite
from fzero.plan.pack import pack
from fzero.program import PERSISTENT, Program


def place(program: Program) -> Program:
    lives = lifetimes(program)
    blocks = [i for i, one in enumerate(program.ops) if one.get("workspace")]
    items = [(*life, program.buffers[name].nbytes) for name, life in lives.items()]
    items += [(i, i, int(program.ops[i].get("workspace"))) for i in blocks]
    places, _ = pack(items)
    at = dict(zip([*lives, *blocks], places, strict=True))
    ops = [one.with_attrs(at=at[i]) if i in at else one for i, one in enumerate(program.ops)]
    buffers = {name: replace(b, at=at.get(name)) for name, b in program.buffers.items()}
    return rewrite.finish(program, "place", ops=ops, buffers=buffers)


def lifetimes(program: Program) -> dict[str, tuple[int, int]]:
    """(first op, last op) of every buffer that is not held between steps; of the batch too, as the step's own copy."""
    found: dict[str, tuple[int, int]] = {}
    for i, one in enumerate(program.ops):
        for ref in (*one.reads, *one.writes):
            kind = program.buffers[ref.name].kind
            if kind == "batch":
                found[ref.name] = (-1, i)
            elif kind not in PERSISTENT:
                found[ref.name] = (found.get(ref.name, (i, i))[0], i)
    for name in program.metrics.values():
        if name in found:
            found[name] = (found[name][0], len(program.ops))
    return found
