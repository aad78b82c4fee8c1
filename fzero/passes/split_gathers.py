"""split_gathers: a gather over several axes becomes one over each, the outermost first.

The slice along `dp.dp_out` lies within the slice along `dp`. So a gather over `dp_out` makes that larger slice, and one
over `dp` the whole. Few bytes cross the outer axis, whose link is the slow one. The outer gather starts where the one
before it started, if its source is there by then. A bucket with `copy` keeps its larger slices: later gathers of a step
cross the inner axis alone (hpZ).

    all_gather p -> p.full  axis=dp.dp_out      becomes
    all_gather p -> p.full.near  axis=dp_out; wait; all_gather p.full.near -> p.full  axis=dp
"""

from __future__ import annotations

from dataclasses import replace

from fzero.ir import rewrite
from fzero.ir.liveness import gathered_bytes
from fzero.ir.mesh import parts_of
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Buffer, Ref
from fzero.passes.free import free


def split_gathers(program: Program, ahead: bool = True) -> Program:
    """The program with every gather over one axis alone. Unless `ahead`, each is waited for at its start."""
    buffers = dict(program.buffers)
    copies: dict[str, str] = {}  # by source, the larger slice that is kept
    ops: list[Op] = []
    last = 0  # where the outer gather before is waited for, in `ops`
    for op in program.ops:
        for ref in op.writes:
            copies.pop(ref.name, None)
        value = not op.gathers or program.buffers[op.target].bucket is None  # which has no slices along one axis
        if value or len(parts_of(op.axis)) < 2:
            ops.append(op)
            continue
        source, target = op.reads[0], program.buffers[op.target]
        inner, outer = parts_of(op.axis)
        near = copies.get(source.name)
        if near is None:
            near = f"{op.target}.near"
            buffers[near] = _near(program, target, inner, near)
            start = _start(ops, source.name, last) if ahead else len(ops)
            ops.insert(start, make_op("all_gather", [source], [Ref(near)], axis=outer, why=f"{op.why} over {outer}"))
            last = len(ops)
            ops.append(make_op("wait", [Ref(near)], why=f"{op.why} over {outer}"))
            if program.buckets[target.bucket or ""].copy is not None:
                copies[source.name] = near
        ops.append(replace(op, reads=(Ref(near),), axis=inner))
    done = rewrite.finish(program, "split_gathers", ops=ops, buffers=buffers)
    # a larger slice is held until the gather from it is there, which shows where it is freed
    return replace(done, gather_cap_bytes=max(gathered_bytes(free(done).ops, done.buffers), default=0))


def _near(program: Program, target: Buffer, inner: str, name: str) -> Buffer:
    """The slice along the inner axis, on its way to a gather's target."""
    bucket = program.buckets[target.bucket or ""]
    length = program.slice_length(bucket, inner) // target.per
    kind = "scratch" if target.kind in PERSISTENT else target.kind
    return Buffer(name, target.dtype, (length,), kind, target.bucket, inner, per=target.per, entry=target.entry)


def _start(ops: list[Op], source: str, last: int) -> int:
    """Where an outer gather starts: behind the last write to its source, and at `last` or later."""
    behind = range(len(ops) - 1, last - 1, -1)
    waits = (
        i
        for i in behind
        if any(r.name == source for r in ops[i].writes) or (ops[i].is_wait and ops[i].target == source)
    )
    return next((i + 1 for i in waits), last)
