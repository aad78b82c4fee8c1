"""narrow: a value is gathered only where more than the own slice of it is read.

Lowering gathers every column, and every gradient of which a rank keeps a slice, for the rest of the step, which it
writes on whole values; `shard_update` has left of that what works on slices. A `mine` reference to what was gathered is
read from the slice, and a gather that nobody else reads is dropped. Where all of a gradient is read its reduction gives
all of it to every rank at once: an all-reduce is the reduce-scatter and the gather.

    all_gather mu -> mu.full;  run mu.full[0:L:mine] ...            becomes   run mu[0:L:mine] ...

    reduce_scatter g -> r;  all_gather r -> r.full;  run r.full[0:L:8x8] ...
    becomes   all_reduce g -> r;  run r[0:L:8x8] ...
"""

from __future__ import annotations

from dataclasses import replace

from fzero.ir import rewrite
from fzero.ir.program import Program
from fzero.ir.records import Ref


def narrow(program: Program) -> Program:
    """The program without gathers of values of which only the own slice is read, or that a reduction can give."""
    gathers = {op.target: op.reads[0].name for op in program.ops if op.gathers and op.reads[0].name != op.target}
    reads = rewrite.reads_of(program.ops)
    kept = {name for name in gathers if not all(ref.mine for _, ref in reads.get(name, []))}
    whole = _whole(program, {gathers[name] for name in kept if program.buffers[name].kind == "grad"})
    dropped = gathers.keys() - {name for name in kept if gathers[name] not in whole}
    buffers = dict(program.buffers)
    for name in whole:
        bucket = program.buckets[buffers[name].bucket or ""]
        buffers[name] = replace(buffers[name], sharded=None, shape=(bucket.length,))
    ops = []
    for op in program.ops:
        if (op.gathers or op.is_wait) and op.target in dropped:
            continue
        on_whole = op.is_flat and op.target in whole

        def change(ref: Ref, on_whole: bool = on_whole) -> Ref:
            if ref.mine or ref.name in dropped:
                ref = replace(ref, name=gathers.get(ref.name, ref.name))
            return replace(ref, mine=False) if on_whole and ref.name in whole else ref

        if op.reduces and op.target in whole:
            op = replace(op, kind="all_reduce")
            ranks, numel = program.mesh.size(str(op.axis)), buffers[op.reads[0].name].numel
            for ref in op.writes[1:]:
                buffers[ref.name] = replace(buffers[ref.name], shape=(ranks - 1, numel // ranks))
        ops.append(rewrite.renamed(op, change))
    return rewrite.finish(program, "narrow", ops=ops, buffers=buffers)


def _whole(program: Program, names: set[str]) -> set[str]:
    """Of slices of gradients, with these, those that must be whole for these to be: what they are computed from element
    by element, and what is summed into them."""
    whole = set(names)
    for op in reversed(program.ops):
        if (op.reduces or op.is_flat) and op.writes[0].name in whole:
            whole |= {ref.name for ref in op.reads if program.buffers[ref.name].sharded}
    return whole
