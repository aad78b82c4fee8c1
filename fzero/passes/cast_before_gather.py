"""cast_before_gather: a cast that a loss makes of a parameter happens once, on the bucket: before the gather, if any.

Every use of a bucket's leaves in the losses must begin with the same cast to a smaller dtype. Then one flat op casts
the shard, and the cast column is gathered: half the bytes for bf16. The gradient still flows through the cast in the
graph. So it is with a codec (`fzero.ir.code_ops`): messages of blocks are made of the shard, leaf by leaf, and
gathered, and each use decodes them.

    gather p -> p.full;  run p.full[w] { c = bf16(w); ... }
    becomes   run p[0:L:mine] -> p.bf16[0:L:mine];  gather p.bf16 -> p.bf16.full;  run p.bf16.full[w] { ... }

A column that is on every rank is cast as flat, if gradients follow: else the backward would make each cast again. It
costs two bytes an element until the last use.

    run p[w] { c = bf16(w); ... }     becomes     run p[0:L] -> p.bf16[0:L];  run p.bf16[w] { ... }
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import zip_longest

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import fx_nodes, rewrite, segments
from fzero.ir.code_ops import CODES, ENCODES, CodeOps, encode_leaves
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program
from fzero.ir.records import DEVICE, DTYPE_NAMES, PERSISTENT, Buffer, Ref

CAST = torch.ops.aten._to_copy.default
Form = torch.dtype | CodeOps  # what a cast gives, or a codec


def cast_before_gather(program: Program) -> Program:
    """The program with casts of parameters moved onto their columns, where every use has the same cast."""
    source = {
        op.writes[0].name: op
        for op in program.ops
        if op.gathers and program.buffers[op.reads[0].name].sharded
        and program.buffers[op.reads[0].name].kind in (*PERSISTENT, "staging")
    }  # fmt: skip
    kept = _kept_whole(program)
    chosen = _common_forms(program, set(source)) | _common_forms(_regions_alone(program), set(kept))
    chosen = {name: form for name, form in chosen.items() if name in source or isinstance(form, torch.dtype)}
    edits = rewrite.Edits()
    waiting = {name for name in kept if name in chosen}
    done: dict[tuple[object, ...], fx.GraphModule] = {}  # segments without their casts
    for index, op in enumerate(program.ops):
        for name in sorted(waiting & {ref.name for ref in op.reads if op.in_region}):
            waiting.remove(name)
            edits.before.setdefault(index, []).append(_whole_cast(program, name, chosen[name], edits))
        name = op.target if op.gathers or op.is_wait else ""
        if name in chosen and op.gathers:
            cast = _narrowed(program, op, chosen[name], edits)
            edits.instead[index] = [cast, replace(op, reads=(Ref(f"{name}.cast"),), writes=(Ref(f"{name}.low"),))]
        elif name in chosen:
            edits.instead[index] = [replace(op, reads=(Ref(f"{name}.low"),))]
        elif op.in_region and any(ref.name in chosen for ref in op.reads):
            edits.instead[index] = [_without_casts(program, op, chosen, edits, done)]
    return edits.apply(program, "cast_before_gather")


def _kept_whole(program: Program) -> list[str]:
    """The columns of parameters that every rank holds on the device, of a program that makes gradients."""
    if not any(buffer.kind == "grad" for buffer in program.buffers.values()):
        return []
    held = (b for b in program.buffers.values() if b.kind in PERSISTENT and b.bucket and b.space == DEVICE)
    return [b.name for b in held if not b.sharded and b.dtype.is_floating_point]


def _regions_alone(program: Program) -> Program:
    """The program with the ops of losses alone: what an update reads of a parameter is not its cast."""
    return replace(program, ops=tuple(op for op in program.ops if op.in_region))


def _common_forms(program: Program, whole: set[str]) -> dict[str, Form]:
    """Of these buffers, those whose leaves every use brings to one smaller form, and that form."""
    forms: dict[str, set[Form | None]] = {name: set() for name in whole}
    for op in program.ops:
        if op.is_mark or whole.isdisjoint(ref.name for ref in op.reads):
            continue
        region = op.in_region
        holders = fx_nodes.placeholders(program.segments[op.segment].graph) if region else []
        for ref, holder in zip_longest(op.reads, holders[: len(op.reads)]):
            if ref.name in forms:
                forms[ref.name] |= {None} if holder is None else {_form(user) for user in holder.users}
    alike = {name: next(iter(found)) for name, found in forms.items() if len(found) == 1}
    return {n: form for n, form in alike.items() if form and _nbytes(form) < program.buffers[n].dtype.itemsize}


def _form(user: fx.Node) -> Form | None:
    """What a node makes of a leaf, if that is a smaller form of it."""
    if user.target in ENCODES:
        return CODES[user.target]
    plain = user.target is CAST and set(user.kwargs) == {"dtype"}
    return user.kwargs["dtype"] if plain else None  # type: ignore[return-value]


def _nbytes(form: Form) -> Fraction:
    """Of an element of a leaf."""
    return 1 / form.per if isinstance(form, CodeOps) else Fraction(form.itemsize)


def _narrowed(program: Program, op: Op, form: Form, edits: rewrite.Edits) -> Op:
    """The op that makes the smaller form of a gather's source, on the shard; adds its buffers and its segment."""
    shard, whole = program.buffers[op.reads[0].name], program.buffers[op.writes[0].name]
    cast, low = f"{whole.name}.cast", f"{whole.name}.low"
    dtype, per = (torch.uint8, form.per) if isinstance(form, CodeOps) else (form, 1)
    for name, like, kind in ((cast, shard, "scratch"), (low, whole, whole.kind)):
        shape = (int(like.numel / per),)
        edits.buffers[name] = replace(like, name=name, dtype=dtype, kind=kind, per=per, shape=shape)
    bucket = program.buckets[shard.bucket or ""]
    own = shard.sharded == bucket.axis
    if isinstance(form, CodeOps):
        leaves = [Ref(shard.name, slot.start, slot.stop, None, own) for slot in bucket.slots]
        blocks = [Ref(cast, *bucket.place(i, form.per)[:2], None, own) for i in range(len(bucket.slots))]
        gm = encode_leaves(form, shard.dtype, [slot.stop - slot.start for slot in bucket.slots])
        run = rewrite.run_op(make_op("run", why=f"{form.codec.name} before the gather"), gm, leaves, blocks, flat=1)
    else:
        span = (0, bucket.length, None, own)
        gm, why = _cast_of(shard, form), f"{DTYPE_NAMES[form]} before the gather"
        run = rewrite.run_op(make_op("run", why=why), gm, [Ref(shard.name, *span)], [Ref(cast, *span)], flat=1)
    edits.segments.setdefault(run.segment, gm)
    return run


def _whole_cast(program: Program, name: str, form: Form, edits: rewrite.Edits) -> Op:
    """The op that casts a column which every rank holds; adds its buffer and its segment."""
    assert isinstance(form, torch.dtype), "codecs are of what is sent"
    column = program.buffers[name]
    low = f"{name}.low"
    edits.buffers[low] = replace(column, name=low, dtype=form, kind="scratch")
    span = (0, program.buckets[column.bucket or ""].length)
    gm, why = _cast_of(column, form), f"{DTYPE_NAMES[form]} once"
    run = rewrite.run_op(make_op("run", why=why), gm, [Ref(name, *span)], [Ref(low, *span)], flat=1)
    edits.segments.setdefault(run.segment, gm)
    return run


def _cast_of(shard: Buffer, dtype: torch.dtype) -> fx.GraphModule:
    """The segment that casts all of a shard."""
    graph = fx.Graph()
    value, into = graph.placeholder("x0"), graph.placeholder("into0")
    result = graph.call_function(CAST, (value,), {"dtype": dtype})
    copied = graph.call_function(torch.ops.aten.copy_.default, (into, result))
    with FakeTensorMode():
        value.meta["val"] = torch.empty(shard.shape, dtype=shard.dtype)
        for node in (into, result, copied):
            node.meta["val"] = torch.empty(shard.shape, dtype=dtype)
    graph.output([])
    return segments.module(graph)


def _without_casts(
    program: Program,
    op: Op,
    chosen: dict[str, Form],
    edits: rewrite.Edits,
    done: dict[tuple[object, ...], fx.GraphModule],
) -> Op:
    """A run of a region that reads the smaller columns, without the nodes in its segment that made them."""
    smaller = [ref.name in chosen for ref in op.reads]
    key = op.segment, *smaller
    if key not in done:
        graph = segments.copied(program.segments[op.segment].graph)
        for holder, cast in zip(fx_nodes.placeholders(graph), smaller, strict=False):
            for user in list(holder.users) if cast else ():
                holder.meta["val"] = user.meta["val"]
                user.replace_all_uses_with(holder)  # and is dead then
        done[key] = segments.module(graph)
    reads = [_smaller(program, ref, chosen[ref.name]) if ref.name in chosen else ref for ref in op.reads]
    without = rewrite.run_op(op, done[key], reads, op.writes)
    edits.segments.setdefault(without.segment, done[key])
    return without


def _smaller(program: Program, ref: Ref, form: Form) -> Ref:
    """A leaf of a gathered bucket, in its smaller form."""
    name = f"{ref.name}.low"
    if not isinstance(form, CodeOps):
        return replace(ref, name=name)
    bucket = program.buckets[program.buffers[ref.name].bucket or ""]
    index = bucket.find((ref.start, ref.stop, ref.shape))
    assert index is not None, f"{ref} is no leaf of {bucket.name}"
    return Ref(name, *bucket.place(index, form.per))
