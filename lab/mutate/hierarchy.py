"""hierarchy: edits of programs with two data axes. Sums, gathers and slices along the wrong one, and the second copy.

An edit finds no place in a program whose mesh has no axis `dp_out`.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import forms, segments
from fzero.ir.mesh import parts_of
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Ref
from lab.mutate.edits import (
    Edit,
    Mutation,
    Programs,
    drop,
    find,
    insert,
    move,
    names,
    on,
    pick,
    places_of,
    put,
    replaced,
    wait_of,
    with_buffers,
    with_ops,
)

OUTER, INNER = "dp_out", "dp"
AXES = (OUTER, INNER, "dp.dp_out", "dp_out.dp")


def on_two_axes(edit: Edit) -> Mutation:
    """The mutation that makes an edit on a program with an outer data axis, on one rank or on all that run it."""
    return on(lambda rng, p: edit(rng, p) if OUTER in p.mesh else None)


def _other_axis(rng: random.Random, axis: str | None) -> str:
    return rng.choice([other for other in AXES if other != axis])


# --- sums -------------------------------------------------------------------------------------------------------------


def _outer_sums(p: Program) -> list[int]:
    return find(p, lambda op: op.reduces and OUTER in parts_of(op.axis))


def leave_outer_out(rng: random.Random, p: Program) -> Program | None:
    """Gradients are not added over the outer axis: their own part is divided, or taken as it is."""
    index = pick(rng, _outer_sums(p))
    if index is None:
        return None
    op, without = p.ops[index], drop(p, index, wait_of(p, index))
    source, target = op.reads[0], op.writes[0]
    if rng.random() < 0.3:
        return without
    if not op.row.scatters and source.start is None and rng.random() < 0.5:
        return with_ops(without, [_reading(other, target.name, source.name) for other in without.ops])
    if p.buffers[source.name].bucket is None or source.start is not None:
        return put(drop(p, wait_of(p, index)), index, replace(_copy(p, op), writes=(target,)))
    return _divided(p, index)


def _reading(op: Op, name: str, other: str) -> Op:
    """An op that reads another buffer; a free of the first one is left as it is."""
    if op.is_mark:
        return op
    return replace(op, reads=tuple(replace(r, name=other) if r.name == name else r for r in op.reads))


def _copy(p: Program, op: Op) -> Op:
    """The op, over an axis of one rank where there is one: no sum at all. Else over the inner axis alone."""
    ones = [name for name, size in p.mesh if size == 1]
    return replace(op, axis=ones[0] if ones else INNER)


def _divided(p: Program, index: int) -> Program:
    """A run divides the own part of the gradients in place of the sum."""
    op = p.ops[index]
    source, target = (p.buffers[ref.name] for ref in (op.reads[0], op.writes[0]))
    length = p.buckets[source.bucket or ""].length
    graph = fx.Graph()
    value, into = graph.placeholder("x0"), graph.placeholder("into0")
    graph.call_function(
        torch.ops.aten.copy_.default, (into, graph.call_function(torch.ops.aten.div.Tensor, (value, op.divisor or 1)))
    )
    graph.output([])
    with FakeTensorMode():
        like = [torch.empty(target.numel, dtype=b.dtype) for b in (source, target)]
        gm = forms.propagate(segments.module(graph), like)
    key, mine = segments.digest(gm), op.row.scatters
    run = make_op("run", [Ref(source.name, 0, length, None, mine)], [Ref(target.name, 0, length, None, mine)],
                  segment=key, flat=1)  # fmt: skip
    return replace(put(drop(p, wait_of(p, index)), index, run), segments={**p.segments, key: gm})


def double_outer(rng: random.Random, p: Program) -> Program | None:
    """Gradients are added over the outer axis twice: before the sum, behind it, or by a second sum of the same."""
    index = pick(rng, _outer_sums(p))
    if index is None:
        return None
    op, wait = p.ops[index], wait_of(p, index)
    if wait is None or rng.random() < 0.2:
        return insert(p, index, op)
    behind = rng.random() < 0.5
    ref = op.writes[0] if behind else op.reads[0]
    kind = op.kind if op.row.small else "all_reduce"
    again = replace(op, kind=kind, reads=(ref,), writes=(ref, *op.writes[1:]), axis=rng.choice((op.axis, OUTER)))
    if rng.random() < 0.5:
        again = again.with_attrs(divisor=1)
    return insert(p, wait + 1 if behind else index, again, make_op("wait", [Ref(ref.name)]))


def sum_over_another(rng: random.Random, p: Program) -> Program | None:
    """A reduction runs over the other data axis, or over both, in either order."""
    index = pick(rng, find(p, lambda op: op.reduces))
    if index is None:
        return None
    return put(p, index, replace(p.ops[index], axis=_other_axis(rng, p.ops[index].axis)))


def exchange_sums(rng: random.Random, p: Program) -> Program | None:
    """The sums over the two axes exchange their axes, for a gradient or for any two."""
    sums = find(p, lambda op: op.reduces and not op.row.small)
    pairs = [(i, j) for i in sums for j in sums if i < j and p.ops[i].axis != p.ops[j].axis]
    near = [(i, j) for i, j in pairs if p.ops[i].target == p.ops[j].reads[0].name]
    if (pair := pick(rng, near if near and rng.random() < 0.6 else pairs)) is None:
        return None
    i, j = pair
    return put(put(p, i, replace(p.ops[i], axis=p.ops[j].axis)), j, replace(p.ops[j], axis=p.ops[i].axis))


def divide_inside(rng: random.Random, p: Program) -> Program | None:
    """The inner sum divides: instead of the outer one, as well as it, or each by its own ranks."""
    sums = find(p, lambda op: op.reduces and not op.row.small)
    inner = [i for i in sums if p.ops[i].axis == INNER]
    outer = [i for i in sums if p.ops[i].axis == OUTER]
    i, j = pick(rng, inner), pick(rng, outer)
    if i is None or j is None:
        return None
    divisor, way = int(p.ops[j].divisor or 1), rng.choice(("instead", "too", "each"))
    within = p.mesh.size(INNER) if way == "each" else divisor
    outside = {"instead": 1, "too": divisor, "each": max(divisor // within, 1)}[way]
    every = rng.random() < 0.5  # microbatches reduced one by one
    bucket = p.buffers[p.ops[j].target].bucket
    chosen = [n for n in inner if p.buffers[p.ops[n].target].bucket == bucket] if every else [i]
    for n in chosen:
        p = put(p, n, p.ops[n].with_attrs(divisor=within))
    return put(p, j, p.ops[j].with_attrs(divisor=outside))


# --- gathers ----------------------------------------------------------------------------------------------------------


def gather_over_another(rng: random.Random, p: Program) -> Program | None:
    """A gather runs over the other axis or over both, or one of the two gathers of a value is left out."""
    gathers = find(p, lambda op: op.gathers)
    pairs = [(i, j) for i in gathers for j in gathers if i < j and p.ops[j].reads[0].name == p.ops[i].target]
    way = rng.choice(("axis", "axis", "exchange", "skip")) if pairs else "axis"
    if way == "axis":
        if (index := pick(rng, gathers)) is None:
            return None
        return put(p, index, replace(p.ops[index], axis=_other_axis(rng, p.ops[index].axis)))
    i, j = rng.choice(pairs)
    if way == "exchange":
        return put(put(p, i, replace(p.ops[i], axis=p.ops[j].axis)), j, replace(p.ops[j], axis=p.ops[i].axis))
    direct = put(p, j, replace(p.ops[j], reads=p.ops[i].reads))
    return direct if rng.random() < 0.5 else drop(direct, i, wait_of(p, i))


def _seconds(p: Program) -> list[str]:
    """The slices along the inner axis that gathers over it start from."""
    outer = {op.target for op in p.ops if op.gathers and op.axis == OUTER}
    return [name for name in outer if any(op.gathers and op.reads[0].name == name for op in p.ops)]


def wrong_copy(rng: random.Random, p: Program) -> Program | None:
    """The second copy is another bucket's or another column's, is taken late, or is that of the step before."""
    if (name := pick(rng, sorted(_seconds(p)))) is None:
        return None
    buffer = p.buffers[name]
    made = find(p, lambda op: op.gathers and op.target == name)[0]
    reads = find(p, lambda op: op.gathers and op.reads[0].name == name)
    way = rng.choice(("another", "target", "source", "late", "kept"))
    if way == "kept":
        return with_buffers(drop(p, made, wait_of(p, made)), replace(buffer, kind="state", at=None))
    if way == "late":
        writes = find(p, lambda op: op.is_update and names(op.writes) & names(p.ops[made].reads))
        return None if not writes else move(p, writes[0], rng.choice((made, *reads)))
    if way == "source":
        source = p.buffers[p.ops[made].reads[0].name]
        like = [n for n, b in p.buffers.items() if n != source.name and (b.shape, b.dtype, b.sharded) ==
                (source.shape, source.dtype, source.sharded)]  # fmt: skip
        other = pick(rng, like)
        return None if other is None else put(p, made, replaced(p.ops[made], "reads", 0, Ref(other)))
    like = [n for n, b in p.buffers.items() if n != name and (b.shape, b.dtype) == (buffer.shape, buffer.dtype)]
    if (other := pick(rng, [n for n in like if n in _seconds(p)] or like)) is None:
        return None
    if way == "target":
        return put(p, made, replaced(p.ops[made], "writes", 0, Ref(other)))
    index = rng.choice(reads)
    return put(p, index, replaced(p.ops[index], "reads", 0, Ref(other)))


# --- slices -----------------------------------------------------------------------------------------------------------


def _cut(p: Program, name: str, axis: str | None, *, fit: bool) -> Program:
    """The program with a buffer that is a slice along this axis; with the shape of one, where it is to `fit`."""
    buffer = p.buffers[name]
    bucket = p.buckets[buffer.bucket or ""]
    length = p.slice_length(bucket, axis) if axis else bucket.length
    shape = (length // buffer.per,) if fit else buffer.shape
    return with_buffers(p, replace(buffer, sharded=axis, shape=shape))


def cut_along_another(rng: random.Random, p: Program) -> Program | None:
    """A buffer is a slice along other axes than it was; of its shape or of theirs."""
    inside = [b for b in p.buffers.values() if b.bucket is not None]
    cut = [b for b in inside if b.sharded]
    buffer = pick(rng, cut if cut and rng.random() < 0.7 else inside)
    if buffer is None:
        return None
    same = [a for a in AXES if buffer.sharded and p.mesh.size(a) == p.mesh.size(buffer.sharded) and a != buffer.sharded]
    axis = rng.choice(same) if same and rng.random() < 0.6 else rng.choice((None, *AXES))
    return _cut(p, buffer.name, axis, fit=rng.random() < 0.8)


def another_slice(rng: random.Random, p: Program) -> Program | None:
    """References take the finest slice for the one that is held, or the other way round: one, an op's, a buffer's."""
    places = [(side, i, n) for side in ("reads", "writes") for i, n in places_of(p, side, lambda _, ref: _flat(p, ref))]
    if (place := pick(rng, places)) is None:
        return None
    side, index, n = place
    name, way = getattr(p.ops[index], side)[n].name, rng.choice(("one", "op", "buffer"))

    def turned(ref: Ref, of: str | None) -> Ref:
        return replace(ref, mine=not ref.mine) if _flat(p, ref) and of in (None, ref.name) else ref

    if way == "one":
        return put(p, index, replaced(p.ops[index], side, n, turned(getattr(p.ops[index], side)[n], None)))
    chosen = {index} if way == "op" else set(find(p, lambda op: name in names((*op.reads, *op.writes))))
    of = None if way == "op" else name
    ops = [
        replace(op, reads=tuple(turned(r, of) for r in op.reads), writes=tuple(turned(r, of) for r in op.writes))
        if i in chosen and not op.is_mark
        else op
        for i, op in enumerate(p.ops)
    ]
    return with_ops(p, ops)


def _flat(p: Program, ref: Ref) -> bool:
    return ref.start is not None and ref.shape is None and p.buffers[ref.name].bucket is not None


def cut_a_bucket_along_another(rng: random.Random, p: Program) -> Program | None:
    """A bucket's owners stand along other axes; its buffers' slices too, or those alone that are not held."""
    if (bucket := pick(rng, p.buckets.values())) is None:
        return None
    axis, way = _other_axis(rng, bucket.axis), rng.choice(("alone", "alone", "temporary"))
    broken = replace(p, buckets={**p.buckets, bucket.name: replace(bucket, axis=axis)})
    if way == "alone":
        return broken
    for name, buffer in p.buffers.items():
        if buffer.bucket == bucket.name and buffer.sharded and buffer.kind not in PERSISTENT:
            broken = _cut(broken, name, axis, fit=True)
    return broken


# --- several axes at once ---------------------------------------------------------------------------------------------


def in_a_circle(rng: random.Random, programs: Programs) -> dict[int, Program] | None:
    """Some ranks start two collectives along different axes, one after the other, the other way round: mostly those
    none of which is next to another on the grid, so that each waits for one that does not."""
    p = programs[rng.choice(sorted(programs))]
    starts = find(p, lambda op: op.is_collective)
    pairs = [(a, b) for a, b in itertools.pairwise(starts) if p.ops[a].axis != p.ops[b].axis]
    pair, sharing = pick(rng, pairs), [r for r, other in programs.items() if other is p]
    if pair is None or len(sharing) < 2:
        return None
    broken = move(p, pair[1], pair[0])
    chosen = {r for r in sharing if sum(p.mesh.coordinate(r, axis) for axis in p.mesh.names) % 2}
    if rng.random() < 0.3:
        chosen = {*rng.sample(sharing, rng.randint(1, len(sharing) - 1))}
    return {r: broken if r in chosen else other for r, other in programs.items()}
