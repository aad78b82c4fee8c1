"""inserted: edits that put one more op into a program: of any kind, on operands in any place.

The op is well formed: its references exist, are as many as the kind wants, and fit in dtype, space and size. A transfer
is waited for at once. So what remains to be judged is what the op does to the values.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from fzero.ir.kinds import OPS, OpKind
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program, route
from fzero.ir.records import DEVICE, PERSISTENT, Buffer, Ref
from lab.mutate.edits import insert, pick, touching, with_buffers

TRIES = 40
ROOM = "one.more"  # the scratch of an inserted reduction


def insert_op(rng: random.Random, p: Program) -> Program | None:
    """One more op of a random kind, on random operands, at a random point."""
    for _ in range(TRIES):
        name = pick(rng, p.buffers)
        broken = None if name is None else with_one_more(rng, p, rng.choice(list(OPS.values())), name)
        if broken is not None:
            return broken
    return None


def with_one_more(rng: random.Random, p: Program, kind: OpKind, name: str) -> Program | None:
    """The program with an op of a kind whose source, or target if it has no source, is in a buffer; None where the
    kind has no such op."""
    axis = pick(rng, [axis for axis, size in p.mesh if size > 1]) if kind.transfers and not kind.moves else None
    if axis is None and kind.transfers and not kind.moves:
        return None
    source = rng.choice(list(references(p, name)))
    target = pick(rng, targets(p, kind, source, axis)) if kind.num_reads[1] and kind.num_writes[1] else source
    op = None if target is None else _made(rng, p, kind, source, target, axis)
    if op is None:
        return None
    ops, at = [op], _point(rng, p, op)
    n, part = p.mesh.size(str(axis)) if axis else 1, _size(p, source)
    if op.row.scratch(p.transport, part, n):
        room = Buffer(ROOM, p.buffers[name].dtype, ((n - 1) * part,), "scratch")
        p, ops = with_buffers(p, room), [replace(op, writes=(*op.writes, Ref(ROOM)))]
    ops += [make_op("wait", [Ref(op.target)])] if op.transfers else []
    ops += [make_op("free", [Ref(ROOM)])] if ROOM in p.buffers else []
    return insert(p, at, *ops)


def _made(rng: random.Random, p: Program, kind: OpKind, source: Ref, target: Ref, axis: str | None) -> Op | None:
    """An op of a kind. One that computes is another op of the program, with these operands in the place of its own."""
    if kind.computes:
        like = pick(rng, [op for op in p.ops if op.kind == kind.name and op.reads and op.writes])
        return None if like is None else replace(like, reads=(source, *like.reads[1:]),
                                                 writes=(*like.writes[:-1], target))  # fmt: skip
    attrs: dict[str, int | str] = {}
    if kind.reduces:
        attrs = {"op": rng.choice(("sum", "max")), "divisor": rng.choice((1, 2))}
    elif kind.transfers and not kind.collective and not kind.moves:
        attrs = {"peer": rng.randrange(p.mesh.size(str(axis))), "tag": 10_000}
    elif not kind.num_writes[1]:
        source = Ref(source.name)  # a mark
    reads = [source] if kind.num_reads[1] else []
    return make_op(kind.name, reads, [target] if kind.num_writes[1] else [], axis=axis, why="one more", **attrs)


def _point(rng: random.Random, p: Program, op: Op) -> int:
    """Where to put an op: mostly where its operands hold something."""
    first, last = -1, len(p.ops)
    for name in {ref.name for ref in (*op.reads, *op.writes)}:
        uses = touching(p, name)
        if p.buffers[name].kind not in PERSISTENT and uses:
            first, last = max(first, uses[0]), min(last, uses[-1])
    alive = first < last and rng.random() < 0.8
    return rng.randint(first + 1, last) if alive else rng.randint(0, len(p.ops))


def references(p: Program, name: str) -> Iterator[Ref]:
    """References of every form to a buffer: all of it; of a bucket one leaf, flat ranges and the own slice of them; of
    anything else a part."""
    yield Ref(name)
    b = p.buffers[name]
    if b.bucket is None:
        if b.numel > 1:
            yield Ref(name, 0, b.numel // 2, (b.numel // 2,))
        return
    bucket = p.buckets[b.bucket]
    yield Ref(name, *bucket.place(0, b.per))
    for mine in (False, True):
        yield Ref(name, 0, bucket.length, None, mine)
        yield Ref(name, bucket.slots[-1].start, bucket.length, None, mine)


def targets(p: Program, kind: OpKind, source: Ref, axis: str | None) -> Iterator[Ref]:
    """What an op of the kind may write from this source: of its dtype, in a space and of a size that fit."""
    held = p.buffers[source.name]
    n = p.mesh.size(axis) if axis else 1
    grows, shrinks = n if kind.gathers else 1, n if kind.scatters else 1
    for name, buffer in p.buffers.items():
        apart = buffer.space != held.space
        fits = apart == kind.moves and (not apart or len(route(p, held.space, buffer.space)) == 1)
        if buffer.dtype is not held.dtype or not fits:
            continue
        for ref in references(p, name):
            if kind.computes or _size(p, source) * grows == _size(p, ref) * shrinks:
                yield ref


def _size(p: Program, ref: Ref) -> int:
    start, stop = p.local_range(ref, 0)
    return stop - start


def place_of(p: Program, name: str) -> str:
    """Where a buffer is: its kind, whether it is a bucket's or a slice of one, and its space if that is not the
    device's."""
    b = p.buffers[name]
    lies = "slice" if b.sharded else "bucket" if b.bucket is not None else "value"
    return f"{b.kind} {lies}{'' if b.space == DEVICE else f' on the {b.space}'}"
