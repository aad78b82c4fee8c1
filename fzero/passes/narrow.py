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

from collections.abc import Mapping
from dataclasses import replace

from fzero.ir import rewrite
from fzero.ir.mesh import within
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref


def narrow(program: Program) -> Program:
    """The program without gathers and all-reduces of values of which only the own slice is read."""
    slim = _slim(program)
    source = {
        op.writes[0].name: op.reads[0].name
        for op in program.ops
        if op.gathers and op.reads[0].name != op.writes[0].name
    }
    buffers = dict(program.buffers)
    for op in program.ops:
        for ref in op.writes[:1] if op.row.scattered else op.writes:
            if ref.name in slim - source.keys():
                buffers[ref.name] = _sliced(program, buffers, op, buffers[ref.name])
        for scratch in op.writes[1:] if op.row.scattered and op.target in slim else ():
            like, ranks = buffers[op.reads[0].name], program.mesh.size(str(op.axis))
            buffers[scratch.name] = replace(buffers[scratch.name], shape=(ranks - 1, like.numel // ranks))
    ops: list[Op] = []
    for op in program.ops:
        if (op.gathers or op.is_wait) and op.target in slim & source.keys():
            continue
        if op.row.scattered and op.writes[0].name in slim:
            cut = buffers[op.target].sharded != buffers[op.reads[0].name].sharded
            ops.append(replace(op, kind=op.row.scattered if cut else op.kind))
            continue
        whole_range = op.is_flat and all(ref.name in slim for ref in op.writes)

        def change(ref: Ref, whole_range: bool = bool(whole_range)) -> Ref:
            flat = whole_range and ref.start is not None and buffers[ref.name].bucket
            if ref.name not in slim and not flat and not ref.mine:
                return ref
            ref = replace(ref, name=source.get(ref.name, ref.name))
            bucket = program.buckets[buffers[ref.name].bucket or ""]
            finest = buffers[ref.name].sharded in (None, bucket.axis) or ref.mine
            return replace(ref, mine=finest) if ref.start is not None and ref.shape is None else ref

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
    on_slices = op.is_flat and all(w.name in slim for w in op.writes)
    return ref.mine or bool(on_slices) or (op.row.scattered is not None and op.target in slim)


def _sliced(program: Program, buffers: Mapping[str, Buffer], op: Op, buffer: Buffer) -> Buffer:
    """The slice of a gradient's buffer that remains of it: that of the op's sources, cut once more along the axis of a
    reduction, if the bucket's slices are cut along it."""
    bucket = program.buckets[buffer.bucket or ""]
    axis = buffers[op.reads[0].name].sharded
    if (
        op.row.scattered
        and (finer := ".".join(filter(None, (axis, op.axis))))
        and within(bucket.axis, finer) is not None
    ):
        axis = finer
    length = program.slice_length(bucket, axis) if axis else bucket.length
    return replace(buffer, sharded=axis, shape=(length // buffer.per,))
