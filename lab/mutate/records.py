"""records: edits of the fields of ops and buffers: references, segments, attributes, names, forms of buffers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import forms, fx_nodes, segments
from fzero.ir.kinds import OPS
from fzero.ir.mesh import Mesh
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program
from fzero.ir.records import ALIGN, KINDS, Bucket, Ref
from lab.mutate.edits import (
    Programs,
    alike,
    alive,
    drop,
    find,
    form,
    insert,
    move,
    names,
    pick,
    places_of,
    put,
    replaced,
    with_buffers,
)

# --- which segment, and its references --------------------------------------------------------------------------------


def _signature(p: Program, op: Op) -> object:
    """The facts that must agree for one segment to stand for another: the forms of its inputs and outputs."""
    gm = p.segments[op.segment]
    vals = [n.meta["val"] for n in (*fx_nodes.placeholders(gm.graph), *fx_nodes.outputs(gm.graph))]
    return len(fx_nodes.placeholders(gm.graph)), tuple((v.dtype, tuple(v.shape)) for v in vals)


def wrong_segment(rng: random.Random, p: Program) -> Program | None:
    """A run works with another one's segment of equal signature, or the two exchange theirs."""
    runs = [(i, _signature(p, p.ops[i])) for i in find(p, lambda op: op.computes)]
    pairs = [(i, j) for i, a in runs for j, b in runs if a == b and p.ops[i].segment != p.ops[j].segment]
    if (chosen := pick(rng, pairs)) is None:
        return None
    i, j = chosen
    own, other = (p.ops[index].segment for index in chosen)
    broken = put(p, i, p.ops[i].with_attrs(segment=other))
    return broken if rng.random() < 0.5 else put(broken, j, p.ops[j].with_attrs(segment=own))


def exchange_writes(rng: random.Random, p: Program) -> Program | None:
    """Two results of a run go to each other's place."""
    places = [(i, a, b) for i, op in enumerate(p.ops) if op.computes for a in range(len(op.writes))
              for b in range(a) if form(p, op.writes[a]) == form(p, op.writes[b])]  # fmt: skip
    if (chosen := pick(rng, places)) is None:
        return None
    index, a, b = chosen
    op = p.ops[index]
    return put(p, index, replaced(replaced(op, "writes", a, op.writes[b]), "writes", b, op.writes[a]))


def exchange_reads_of_two(rng: random.Random, p: Program) -> Program | None:
    """Two ops of a kind exchange a reference that they read."""
    pairs = [(i, j, n) for i, a in enumerate(p.ops) for j, b in enumerate(p.ops[:i]) if a.kind == b.kind
             and not a.is_mark for n in range(min(len(a.reads), len(b.reads)))
             if a.reads[n] != b.reads[n] and form(p, a.reads[n]) == form(p, b.reads[n])]  # fmt: skip
    if (chosen := pick(rng, pairs)) is None:
        return None
    i, j, n = chosen
    op, other = p.ops[i], p.ops[j]
    return put(put(p, i, replaced(op, "reads", n, other.reads[n])), j, replaced(other, "reads", n, op.reads[n]))


def drop_reference(rng: random.Random, p: Program) -> Program | None:
    """An op has a read or a write less, or one twice."""
    side = rng.choice(("reads", "writes"))
    if (place := pick(rng, places_of(p, side, lambda op, ref: True))) is None:
        return None
    index, n = place
    refs = list(getattr(p.ops[index], side))
    refs[n : n + 1] = [] if rng.random() < 0.5 else [refs[n], refs[n]]
    op = p.ops[index]
    return put(p, index, replace(op, reads=tuple(refs)) if side == "reads" else replace(op, writes=tuple(refs)))


# --- ranges -----------------------------------------------------------------------------------------------------------


def batch_bounds(rng: random.Random, p: Program) -> Program | None:
    """A microbatch begins or ends some rows, or elements, elsewhere."""
    place = pick(
        rng, places_of(p, "reads", lambda _, ref: p.buffers[ref.name].kind == "batch" and ref.start is not None)
    )
    if place is None:
        return None
    ref = p.ops[place[0]].reads[place[1]]
    row = max((ref.stop or 0) - (ref.start or 0), 1) // max((ref.shape or (1,))[0], 1) or 1
    by = rng.choice((-row, row, -1, 1))
    ends = rng.choice(((by, by), (by, by), (0, by), (by, 0)))
    moved = replace(ref, start=max((ref.start or 0) + ends[0], 0), stop=max((ref.stop or 0) + ends[1], 0))
    return put(p, place[0], replaced(p.ops[place[0]], "reads", place[1], moved))


def shift_range(rng: random.Random, p: Program) -> Program | None:
    """A flat range, or a leaf's, lies some elements beside its place."""
    side = rng.choice(("reads", "writes"))
    if (place := pick(rng, places_of(p, side, lambda _, ref: ref.start is not None))) is None:
        return None
    ref: Ref = getattr(p.ops[place[0]], side)[place[1]]
    by = rng.choice((-ALIGN, ALIGN, -1, 1))
    if (ref.start or 0) + by < 0:
        return None
    moved = replace(ref, start=(ref.start or 0) + by, stop=(ref.stop or 0) + by)
    return put(p, place[0], replaced(p.ops[place[0]], side, place[1], moved))


def cut_padding(rng: random.Random, p: Program) -> Program | None:
    """A flat run ends with its last leaf instead of the padding behind it, or the other way round."""

    def ends(op: Op) -> tuple[int, int] | None:
        bucket = p.buckets.get(p.buffers[op.writes[0].name].bucket or "") if op.writes else None
        stop = op.writes[0].stop if op.writes else None
        for i, slot in enumerate(bucket.slots if bucket else ()):
            assert isinstance(bucket, Bucket)
            if slot.stop != bucket.end(i) and stop in (slot.stop, bucket.end(i)):
                return slot.stop, bucket.end(i)
        return None

    index = pick(rng, find(p, lambda op: op.is_flat and ends(op)))
    if index is None:
        return None
    op, both = p.ops[index], ends(p.ops[index])
    assert both is not None

    def other(ref: Ref) -> Ref:
        return replace(ref, stop=both[both[0] == ref.stop]) if ref.stop in both and ref.shape is None else ref

    return put(p, index, replace(op, reads=tuple(map(other, op.reads)), writes=tuple(map(other, op.writes))))


def cut_leaf(rng: random.Random, p: Program) -> Program | None:
    """All of a flat run ends within a leaf, some elements before or behind its end."""
    index = pick(rng, find(p, lambda op: op.is_flat))
    if index is None:
        return None
    by = rng.choice((-ALIGN, ALIGN, -1, -8, 1))

    def other(ref: Ref) -> Ref:
        flat = ref.start is not None and ref.shape is None
        return replace(ref, stop=max((ref.stop or 0) + by, ref.start or 0)) if flat else ref

    op = p.ops[index]
    return put(p, index, replace(op, reads=tuple(map(other, op.reads)), writes=tuple(map(other, op.writes))))


def toggle_mine(rng: random.Random, p: Program) -> Program | None:
    """The own slice for the whole range, or the whole for the own slice."""
    side = rng.choice(("reads", "writes"))
    flat = places_of(p, side, lambda _, ref: ref.start is not None and ref.shape is None)
    if (place := pick(rng, flat)) is None:
        return None
    ref: Ref = getattr(p.ops[place[0]], side)[place[1]]
    return put(p, place[0], replaced(p.ops[place[0]], side, place[1], replace(ref, mine=not ref.mine)))


def other_shape(rng: random.Random, p: Program) -> Program | None:
    """A leaf, a buffer or a part is seen as another shape of as many elements."""
    shaped = places_of(p, "reads", lambda _, ref: len(ref.shape or ()) > 1)
    if (place := pick(rng, shaped)) is not None and rng.random() < 0.6:
        ref = p.ops[place[0]].reads[place[1]]
        shape = tuple(reversed(ref.shape or ())) if rng.random() < 0.5 else ((ref.stop or 0) - (ref.start or 0),)
        return put(p, place[0], replaced(p.ops[place[0]], "reads", place[1], replace(ref, shape=shape)))
    buffer = pick(rng, [b for b in p.buffers.values() if len(b.shape) > 1])
    return None if buffer is None else with_buffers(p, replace(buffer, shape=tuple(reversed(buffer.shape))))


# --- transfers --------------------------------------------------------------------------------------------------------


def gather_another(rng: random.Random, p: Program) -> Program | None:
    """A gather brings another bucket of equal length, or brings it to another one's place."""
    index = pick(rng, find(p, lambda op: op.gathers))
    if index is None:
        return None
    side = rng.choice(("reads", "writes"))
    ref: Ref = getattr(p.ops[index], side)[0]
    current = p.buffers[ref.name]
    like = [b.name for b in p.buffers.values() if b.name != ref.name and b.numel == current.numel]
    chosen = pick(rng, [n for n in like if p.buffers[n].dtype is current.dtype and p.buffers[n].bucket is not None])
    return None if chosen is None else put(p, index, replaced(p.ops[index], side, 0, replace(ref, name=chosen)))


def gather_varying(rng: random.Random, p: Program) -> Program | None:
    """Own slices of gradients that are not reduced yet are gathered."""
    n = p.world_size
    reduced = find(p, lambda op: op.reduces and p.buffers[op.reads[0].name].bucket is not None)
    index = pick(rng, reduced) if n > 1 else None
    if index is None:
        return None
    grad = p.buffers[p.ops[index].reads[0].name]
    if grad.sharded:
        return None
    own = Ref(grad.name, 0, p.extent(grad), None, True)
    gather = make_op("all_gather", [own], [Ref(grad.name)], axis=p.buckets[grad.bucket or ""].axis)
    return insert(p, index, gather, make_op("wait", [Ref(grad.name)]))


def wrong_mode(rng: random.Random, p: Program) -> Program | None:
    """A reduction becomes one of another kind."""
    index = pick(rng, find(p, lambda op: op.reduces))
    if index is None:
        return None
    others = [kind.name for kind in OPS.values() if kind.reduces and kind.name != p.ops[index].kind]
    return put(p, index, replace(p.ops[index], kind=rng.choice(others)))


def reduce_another(rng: random.Random, p: Program) -> Program | None:
    """A reduction reads, or writes, another buffer of the form."""
    index = pick(rng, find(p, lambda op: op.reduces))
    if index is None:
        return None
    side = rng.choice(("reads", "writes"))
    ref: Ref = getattr(p.ops[index], side)[0]
    current = p.buffers[ref.name]
    like = [
        b.name
        for b in p.buffers.values()
        if b.name != ref.name and (b.shape, b.dtype) == (current.shape, current.dtype)
    ]
    name = pick(rng, [n for n in like if alive(p, n, index)] or like)
    return None if name is None else put(p, index, replaced(p.ops[index], side, 0, replace(ref, name=name)))


# --- order ------------------------------------------------------------------------------------------------------------


def norm_late(rng: random.Random, p: Program) -> Program | None:
    """An op that reads updated state, or gradients for a norm, moves behind an update."""
    updates = find(p, lambda op: op.is_update)
    reads = [i for i in find(p, lambda op: op.computes or op.gathers) if updates and i < updates[-1]]
    index = pick(rng, reads)
    return None if index is None else move(p, index, rng.choice([u for u in updates if u > index]))


def exchange_ops(rng: random.Random, p: Program) -> Program | None:
    """Two ops near each other change places."""
    if len(p.ops) < 2:
        return None
    index = rng.randrange(len(p.ops) - 1)
    other = min(index + rng.choice((1, 1, 2, 3)), len(p.ops) - 1)
    return put(put(p, index, p.ops[other]), other, p.ops[index])


def move_op(rng: random.Random, p: Program) -> Program | None:
    """An op runs much earlier or later."""
    index, to = rng.randrange(len(p.ops)), rng.randrange(len(p.ops))
    return move(p, index, to)


def wrong_free(rng: random.Random, p: Program) -> Program | None:
    """A free, or a wait, is of another buffer."""
    index = pick(rng, find(p, lambda op: op.is_mark))
    if index is None:
        return None
    n = rng.randrange(len(p.ops[index].reads))
    name = rng.choice([b for b in p.buffers if b != p.ops[index].reads[n].name])
    return put(p, index, replaced(p.ops[index], "reads", n, Ref(name)))


# --- names, attributes and forms --------------------------------------------------------------------------------------


def wrong_metric(rng: random.Random, p: Program) -> Program | None:
    """A metric has another name or another buffer, two exchange theirs, or one is left out."""
    name = pick(rng, p.metrics)
    if name is None:
        return None
    rest = {n: b for n, b in p.metrics.items() if n != name}
    way = rng.choice(("name", "buffer", "exchange", "drop"))
    if way == "buffer":
        like = [r.name for r in alike(p, Ref(p.metrics[name])) if r.start is None]
        other = pick(rng, like)
        return None if other is None else replace(p, metrics={**p.metrics, name: other})
    if way == "exchange":
        other = pick(rng, rest)
        return (
            None if other is None else replace(p, metrics={**p.metrics, name: p.metrics[other], other: p.metrics[name]})
        )
    return replace(p, metrics={**rest, f"{name}2": p.metrics[name]} if way == "name" else rest)


def wrong_attribute(rng: random.Random, p: Program) -> Program | None:
    """`fresh`, `microbatch`, `peer`, `tag` or `divisor` is one more or less, or missing."""
    keys = ("fresh", "divisor", "peer", "tag", "microbatch")
    places = [(i, key) for i, op in enumerate(p.ops) for key in keys if op.get(key) is not None]
    if (chosen := pick(rng, places)) is None:
        return None
    index, key = chosen
    op = p.ops[index]
    if rng.random() < 0.3:
        return put(p, index, replace(op, attrs=tuple(a for a in op.attrs if a[0] != key)))
    return put(p, index, op.with_attrs(**{key: int(op.get(key)) + rng.choice((-1, 1))}))


def wrong_dtype(rng: random.Random, p: Program) -> Program | None:
    """A buffer holds another dtype, of as many bytes or not."""
    buffer = pick(rng, p.buffers.values())
    if buffer is None:
        return None
    dtypes = (torch.float32, torch.bfloat16, torch.int32, torch.float64, torch.int64)
    return with_buffers(p, replace(buffer, dtype=rng.choice([d for d in dtypes if d is not buffer.dtype])))


def wrong_kind(rng: random.Random, p: Program) -> Program | None:
    """A buffer is of another kind: held between steps or not, the user's or not."""
    buffer = pick(rng, p.buffers.values())
    return None if buffer is None else with_buffers(p, replace(buffer, kind=rng.choice(KINDS)))


def toggle_shard(rng: random.Random, p: Program) -> Program | None:
    """A shard is said to be whole, something whole to be a shard, or of another bucket, or of blocks."""
    buffer = pick(rng, p.buffers.values())
    if buffer is None:
        return None
    way = rng.choice(("shard", "bucket", "per"))
    if way == "bucket":
        return with_buffers(p, replace(buffer, bucket=rng.choice([None, *p.buckets])))
    if way == "per":
        return with_buffers(p, replace(buffer, per=1 if buffer.per != 1 else ALIGN))
    return with_buffers(p, replace(buffer, sharded=None if buffer.sharded else rng.choice(p.mesh.names)))


def wrong_world(rng: random.Random, p: Program) -> Program | None:
    """The mesh has another size, or another axis."""
    (axis, size), *rest = p.mesh.axes
    return replace(p, mesh=Mesh(((rng.choice((axis, "tp")), max(size + rng.choice((-1, 0, 1)), 1)), *rest)))


# --- ranks ------------------------------------------------------------------------------------------------------------


def another_ranks_program(rng: random.Random, programs: Programs) -> dict[int, Program] | None:
    """One rank runs another one's program."""
    pairs = [(r, s) for r in programs for s in programs if programs[r] != programs[s]]
    if (chosen := pick(rng, pairs)) is None:
        return None
    return {**programs, chosen[0]: programs[chosen[1]]}


# --- overwriting ------------------------------------------------------------------------------------------------------


def overwrite_part(rng: random.Random, p: Program) -> Program | None:
    """A run writes zeros over a part of a buffer that is in use."""
    index = rng.randrange(1, len(p.ops))
    kinds = ("activation", "grad", "metric", "scratch", "gathered", "param", "optimizer")
    floats = [b for b in p.buffers.values() if b.dtype is torch.float32 and b.kind in kinds and b.numel > 1]
    buffer = pick(rng, [b for b in floats if alive(p, b.name, index)])
    if buffer is None:
        return None
    size = rng.randint(1, min(buffer.numel - 1, 64))
    start = rng.randrange(buffer.numel - size + 1)
    gm = _zeroing(size)
    key = segments.digest(gm)
    over = make_op("run", [], [Ref(buffer.name, start, start + size, (size,))], segment=key)
    return replace(insert(p, index, over), segments={**p.segments, key: gm})


def _zeroing(size: int) -> fx.GraphModule:
    graph = fx.Graph()
    into = graph.placeholder("into0")
    graph.call_function(
        torch.ops.aten.copy_.default, (into, graph.call_function(torch.ops.aten.zeros.default, ([size],)))
    )
    graph.output([])
    with FakeTensorMode():
        return forms.propagate(segments.module(graph), [torch.empty(size)])


def drop_buffer(rng: random.Random, p: Program) -> Program | None:
    """The record of a buffer, or of a bucket, is missing."""
    name = pick(rng, [*p.buffers, *p.buckets])
    if name in p.buckets:
        return replace(p, buckets={n: b for n, b in p.buckets.items() if n != name})
    return replace(p, buffers={n: b for n, b in p.buffers.items() if n != name})


def drop_chain(rng: random.Random, p: Program) -> Program | None:
    """The op that makes a buffer and all ops that read it are left out."""
    index = pick(rng, find(p, lambda op: op.is_run and op.writes))
    if index is None:
        return None
    written: Any = names(p.ops[index].writes)
    return drop(p, index, *find(p, lambda op: op.computes and names(op.reads) & written))
