"""narrow: a value is not made whole where only its own slice is read.

A `mine` reference to a gathered column is read from the shard; a gather that nobody else reads is dropped. An
all-reduce of which only the own slice is read becomes a reduce-scatter: half the bytes, 1/N of the memory. Elementwise
ops on whole ranges between them (a cast after the reduction, the sum over microbatches) make and work on the own slice
then.

    all_gather mu -> mu.full;  run mu.full[0:L:mine] ...            becomes   run mu[0:L:mine] ...
    all_reduce g -> r;  run r[0:L:mine] ...           becomes   reduce_scatter g -> r;  run r[0:L:mine] ...

    all_reduce g.low -> r.low;  run r.low[0:L] -> r[0:L] flat;  run r[0:L:mine] ...
    becomes   reduce_scatter g.low -> r.low;  run r.low[0:L:mine] -> r[0:L:mine] flat;  run r[0:L:mine] ...
"""

from __future__ import annotations

from dataclasses import replace

from fzero.ir import rewrite
from fzero.ir.program import Program
from fzero.ir.records import Op, Ref


def narrow(program: Program) -> Program:
    """The program without gathers and all-reduces of values of which only the own slice is read."""
    slim = _slim(program)
    source = {
        op.writes[0].name: op.reads[0].name
        for op in program.ops
        if op.gathers and op.reads[0].name != op.writes[0].name
    }
    buffers = dict(program.buffers)
    for name in slim - source.keys():
        buffer = buffers[name]
        bucket = program.buckets[buffer.bucket or ""]
        shape = (program.slice_length(bucket) // buffer.per,)
        buffers[name] = replace(buffer, sharded=bucket.axis, shape=shape)
    ops: list[Op] = []
    for op in program.ops:
        if (op.gathers or op.is_wait) and op.target in slim & source.keys():
            continue
        if op.row.scattered and op.writes[0].name in slim:
            ops.append(replace(op, kind=op.row.scattered))
            continue
        whole_range = op.is_flat and all(ref.name in slim for ref in op.writes)

        def change(ref: Ref, whole_range: bool = bool(whole_range)) -> Ref:
            flat = whole_range and ref.start is not None and buffers[ref.name].bucket
            if ref.name not in slim and not flat and not ref.mine:
                return ref
            ref = replace(ref, name=source.get(ref.name, ref.name))
            return replace(ref, mine=True) if ref.start is not None and ref.shape is None else ref

        ops.append(rewrite.renamed(op, change))
    return rewrite.finish(program, "narrow", ops=ops, buffers=buffers)


def _slim(program: Program) -> set[str]:
    """The largest set of buffers of which only the own slice is ever read, if all of the set become slices. Its members
    are gathered, reduced, or computed elementwise from other members alone."""
    moved = {
        op.writes[0].name
        for op in program.ops
        if (op.gathers and op.reads[0].name != op.writes[0].name) or op.row.scattered
    }
    makers: dict[str, list[Op]] = {}
    for op in program.ops:
        for ref in op.writes if _whole_range(program, op) else ():
            if ref.name not in moved:
                makers.setdefault(ref.name, []).append(op)
    slim = moved | makers.keys()
    reads = rewrite.reads_of(program.ops)
    while True:
        lost = {name for name in slim if not all(_own(program.ops[i], ref, slim) for i, ref in reads.get(name, []))}
        lost |= {n for n in slim & makers.keys() if any(r.name not in slim for op in makers[n] for r in op.reads)}
        if not lost:
            return slim
        slim -= lost


def _whole_range(program: Program, op: Op) -> bool:
    """Whether an op works elementwise on a whole bucket of gradients. Lowering emits such ops around reductions."""
    return op.is_flat and all(program.buffers[ref.name].kind == "grad" for ref in op.writes)


def _own(op: Op, ref: Ref, slim: set[str]) -> bool:
    return ref.mine or bool(op.is_flat and all(w.name in slim for w in op.writes))
