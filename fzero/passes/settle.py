"""settle: marks until when a source must stay as it is, where ranks read one another's memory.

A wait ends a transfer for the rank that waits; other ranks may read its source for longer (`transport shared`). The
transfer settles before the first op that writes where the source lies. Freed memory of the arena stays readable until
an op writes there. So a settle comes as late as possible and seldom waits. With the other transports every source has
been sent when the wait returns, and no op is placed.

    wait full; free own; ...; run -> x (in the bytes of own)
    becomes   wait full; free own; ...; settle full; run -> x
"""

from __future__ import annotations

from fzero.ir import rewrite
from fzero.ir.liveness import endangered
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program
from fzero.ir.records import Ref


def settle(program: Program) -> Program:
    """The program with a `settle` for every transfer whose source other ranks read in place."""
    edits = rewrite.Edits()
    if program.transport != "shared":
        return edits.apply(program, "settle")
    started: dict[str, Op] = {}
    lent: dict[str, Op] = {}  # by target: the waited-for transfers whose sources may still be read
    for index, op in enumerate(program.ops):
        due = [target for target, transfer in lent.items() if endangered(op, program.buffers, transfer.sources)]
        due += [op.target] if op.transfers and op.target in lent and op.target not in due else []
        why = f"before {op.kind} {op.why}".rstrip()
        edits.before[index] += [make_op("settle", [Ref(target)], why=why) for target in due]
        for target in due:
            del lent[target]
        if op.is_collective:
            started[op.target] = op
        elif op.is_wait and op.target in started:
            lent[op.target] = started.pop(op.target)
    end = len(program.ops)
    edits.before[end] += [make_op("settle", [Ref(target)], why="the end of the step") for target in lent]
    return edits.apply(program, "settle")
