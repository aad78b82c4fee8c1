"""to_spaces: what is held off the device is brought there at the top of a step, and back at its end.

Until here nothing looks at where leaves are held; in a pipeline each role brings its own. From here on every op works
on the device's copies, and the passes in between see nothing of homes. It is right and slow: all copies are held for
the whole step. `place_moves` brings each to its uses alone. To a CUDA device, what lies on disk goes through the host.

    run mu -> mu      becomes      move mu -> mu.in; wait mu.in; run mu.in -> mu.in; move mu.in -> mu; wait mu
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from fzero.ir import rewrite
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program, route
from fzero.ir.records import DEVICE, PERSISTENT, Buffer, Ref


def to_spaces(program: Program) -> Program:
    """The program with a copy on the device of all that is held elsewhere and named; itself where there is nothing."""
    away = {name: b for name, b in program.buffers.items() if b.kind in PERSISTENT and b.space != DEVICE}
    named = {ref.name for op in program.ops for ref in (*op.reads, *op.writes)} & away.keys()
    if not named:
        return program
    written = {ref.name for op in program.ops for ref in op.writes} & named
    here = {n: replace(b, space=DEVICE) for n, b in program.buffers.items() if n not in away}  # as casts of leaves
    edits, end = rewrite.Edits(buffers=here), len(program.ops)
    copies = {name: f"{name}.in" for name in named}
    for name in (name for name in away if name in named):
        copy, space = f"{name}.in", away[name].space
        on_the_way = route(program, space, DEVICE)[:-1]
        up, down = [*(f"{name}.up" for _ in on_the_way), copy], [copy, *(f"{name}.down" for _ in on_the_way)]
        for passed in (up[:-1], down[1:]):
            edits.buffers.update({n: staging(away[name], n, via) for n, via in zip(passed, on_the_way, strict=True)})
        edits.buffers[copy] = staging(away[name], copy, DEVICE)
        edits.before[0] += chain([Ref(n) for n in (name, *up)], f"{name} at the top")
        edits.before[end] += chain([Ref(n) for n in (*down, name)], f"keep {name}") if name in written else ()
    edits.rename = dict.fromkeys(range(end), copies)
    return edits.apply(program, "to_spaces")


def staging(like: Buffer, name: str, space: str) -> Buffer:
    """A buffer that a step moves `like` through, in a space."""
    return replace(like, name=name, kind="staging", space=space, at=None, note="")


def chain(refs: list[Ref], why: str) -> Iterator[Op]:
    """Moves from each reference to the next, each waited for at once."""
    for source, target in pairwise(refs):
        yield make_op("move", [source], [target], why=why)
        yield make_op("wait", [Ref(target.name)], why=why)


def copies_of(program: Program) -> dict[str, str]:
    """By the name of a copy of what is held, on the device or on the way there or back, the name of that. A gradient
    that waits on the host or on disk is held there."""
    home: dict[str, str] = {}
    for op in program.ops:
        if op.moves and program.buffers[op.target].kind == "staging":
            source = home.get(op.reads[0].name, op.reads[0].name)
            held = program.buffers[source]
            if held.kind in PERSISTENT or (held.kind == "grad" and held.space != DEVICE):
                home[op.target] = source
    return home
