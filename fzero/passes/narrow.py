"""narrow: a value is whole on a rank only where more than the own slice of it is read.

Lowering gathers every column, and every gradient of which a rank keeps a slice, for the rest of the step, which it
writes on whole values; `shard_update` has left of that what works on slices. A `mine` reference to what was gathered is
read from the slice, and a gather that nobody else reads is dropped. Where no rank reads more of a gradient than its
slice its reduction gives no more, whatever the layout says. Where all of it is read the reduction gives it to every
rank at once; but under stages 2 and 3, where no rank keeps all gradients, it is gathered for who reads it.

    all_gather mu -> mu.full;  run mu.full[0:L:mine] ...            becomes   run mu[0:L:mine] ...

    reduce_scatter g -> r;  all_gather r -> r.full;  run r.full[0:L:8x8] ...
    becomes   all_reduce g -> r;  run r[0:L:8x8] ...
"""

from __future__ import annotations

from dataclasses import replace

from fzero.ir import rewrite
from fzero.ir.mesh import parts_of, within
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref


def narrow(program: Program) -> Program:
    """The program without gathers of values of which only the own slice is read, or that a reduction can give."""
    needed = _needed(program)
    gathers = {op.target: op.reads[0].name for op in program.ops if op.gathers and op.reads[0].name != op.target}
    coded = {op.target for op in program.ops if _decodes(program, op)}
    dropped = {n for n, of in gathers.items() if n not in needed or (of not in coded and _comes_whole(program, n))}
    buffers = dict(program.buffers)

    def lies(ref: Ref) -> Ref:
        """A range of a gradient, of the part of it that the rank holds."""
        buffer = buffers[ref.name]
        return replace(ref, mine=buffer.sharded == program.buckets[buffer.bucket or ""].axis)

    def change(ref: Ref) -> Ref:
        return replace(ref, name=gathers.get(ref.name, ref.name)) if ref.mine or ref.name in dropped else ref

    ops: list[Op] = []
    for op in program.ops:
        if (op.gathers or op.is_wait) and op.target in dropped:
            continue
        if _on_gradients(program, op) and op.target not in coded:
            source = buffers[op.reads[0].name]
            held = None if op.target in needed else _part(program, source, op)
            buffers[op.target] = _along(program, buffers[op.target], held)
            if op.is_flat:
                op = rewrite.renamed(op, lies)
            else:
                op = replace(op, kind="all_reduce" if held == source.sharded else "reduce_scatter")
                n = program.mesh.size(str(op.axis))
                for scratch in op.writes[1:]:
                    buffers[scratch.name] = replace(buffers[scratch.name], shape=(n - 1, source.numel // n))
        ops.append(rewrite.renamed(op, change))
    return rewrite.finish(program, "narrow", ops=ops, buffers=buffers)


def _on_gradients(program: Program, op: Op) -> bool:
    """Whether an op makes a bucket of gradients from others: elementwise, all from all or a slice from a slice, or
    as their sum over ranks. Not as messages of blocks."""
    gradients = all(_is_gradient(program, ref.name) for ref in op.writes[:1])
    gradients = gradients and all(program.buffers[ref.name].per == 1 for ref in (*op.reads, *op.writes))
    return gradients and (op.is_flat or (op.reduces and program.buffers[op.target].bucket is not None))


def _is_gradient(program: Program, name: str) -> bool:
    return program.buffers[name].kind == "grad"


def _comes_whole(program: Program, name: str) -> bool:
    """Whether a buffer is for a gradient of which every rank may keep all."""
    bucket = program.buckets[program.buffers[name].bucket or ""] if _is_gradient(program, name) else None
    return bucket is not None and not (bucket.updates_slices and bucket.reduce_when == "produced")


def _decodes(program: Program, op: Op) -> bool:
    """Whether an op makes gradients of messages. Of a sum that is coded a rank adds up its own slice, and no more."""
    apart = any(program.buffers[ref.name].per != 1 for ref in op.reads)
    return op.is_flat and apart and _is_gradient(program, op.target) and program.buffers[op.target].per == 1


def _needed(program: Program) -> set[str]:
    """The buffers of which something needs more than the own slice: what reads it, or what is made of it."""
    needed: set[str] = set()
    for op in reversed(program.ops):
        if op.gathers and _is_gradient(program, op.target) and not _comes_whole(program, op.target):
            continue  # of slices
        passes_on = op.gathers or _on_gradients(program, op)
        if not op.is_mark and not (passes_on and op.target not in needed):
            needed |= {ref.name for ref in op.reads if not ref.mine or passes_on}
    return needed


def _part(program: Program, source: Buffer, op: Op) -> str | None:
    """The axis along which what an op makes of gradients may be slices: that of its source, cut once more along that of
    a reduction, if the slices of the bucket are cut along it."""
    if not op.reduces:
        return source.sharded
    finer = ".".join((*parts_of(source.sharded), str(op.axis)))
    cut = within(program.buckets[source.bucket or ""].axis, finer)
    return source.sharded if cut is None else finer


def _along(program: Program, buffer: Buffer, axis: str | None) -> Buffer:
    """A buffer of gradients as slices along an axis, or whole."""
    bucket = program.buckets[buffer.bucket or ""]
    length = program.slice_length(bucket, axis) if axis else bucket.length
    return replace(buffer, sharded=axis, shape=(length,))
