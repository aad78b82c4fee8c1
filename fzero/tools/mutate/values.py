"""values: edits of what is computed. Microbatches, updates, places and parts of buffers, arithmetic."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import fx

from fzero.ir import segments
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Ref
from fzero.tools.mutate.edits import (
    alike,
    alive,
    drop,
    find,
    form,
    insert,
    move,
    names,
    pick,
    put,
    replaced,
    spots,
    touching,
    wait_of,
    with_buffers,
)

# --- gradients and updates --------------------------------------------------------------------------------------------


def wrong_divisor(rng: random.Random, p: Program) -> Program | None:
    at = pick(rng, find(p, lambda op: op.divisor is not None))
    if at is None:
        return None
    right = int(p.ops[at].divisor)
    wrong = rng.choice([d for d in (1, right * 2, right + 1, p.world_size) if d != right])
    return put(p, at, p.ops[at].with_attrs(divisor=wrong))


def wrong_operation(rng: random.Random, p: Program) -> Program | None:
    at = pick(rng, find(p, lambda op: op.reduction is not None))
    return None if at is None else put(p, at, p.ops[at].with_attrs(op="sum" if p.ops[at].reduction == "max" else "max"))


def skip_microbatch(rng: random.Random, p: Program) -> Program | None:
    """A part's run, reduction or addition is left out, or another part is added in its place."""
    if p.microbatches == 1:
        return None
    adds = find(p, lambda op: op.is_run and len(op.reads) == 2 and op.why.startswith("add "))
    parts = find(p, lambda op: op.microbatch is not None)
    at = pick(rng, rng.choice([found for found in (adds, parts) if found] or [[]]))
    if at is None:
        return None
    op = p.ops[at]
    others = [r for r in alike(p, op.reads[1]) if alive(p, r.name, at)] if at in adds else []
    if others and rng.random() < 0.5:
        return put(p, at, replaced(op, "reads", 1, rng.choice(others)))
    return drop(p, at, wait_of(p, at) if op.transfers else None)


def wrong_microbatch(rng: random.Random, p: Program) -> Program | None:
    """A run is fed another part of the batch than its own."""
    spot = pick(rng, spots(p, "reads", lambda _, ref: p.buffers[ref.name].kind == "batch" and ref.start is not None))
    if spot is None:
        return None
    at, n = spot
    ref = p.ops[at].reads[n]
    size = (ref.stop or 0) - (ref.start or 0)
    start = pick(rng, [s for s in range(0, p.buffers[ref.name].numel, size) if s != ref.start])
    if start is None:
        return None
    return put(p, at, replaced(p.ops[at], "reads", n, replace(ref, start=start, stop=start + size)))


def update_twice(rng: random.Random, p: Program) -> Program | None:
    at = pick(rng, find(p, lambda op: op.is_update))
    return None if at is None else insert(p, at + 1, p.ops[at])


def update_early(rng: random.Random, p: Program) -> Program | None:
    """Before the reduction of its gradients is waited for, or from gradients that are not reduced."""
    source = {op.writes[0].name: op.reads[0].name for op in p.ops if op.reduces}
    spot = pick(rng, spots(p, "reads", lambda op, ref: op.is_update and ref.name in source))
    if spot is None:
        return None
    at, n = spot
    op = p.ops[at]
    ref = op.reads[n]
    before = [i for i in touching(p, ref.name) if i < at and (p.ops[i].reduces or p.ops[i].is_wait)]
    if not before:
        return None
    if rng.random() < 0.5:
        return move(p, at, rng.choice(before))
    return move(put(p, at, replaced(op, "reads", n, replace(ref, name=source[ref.name]))), at, before[0])


def use_donated(rng: random.Random, p: Program) -> Program | None:
    """What reads the state goes after the update, or reads what an update has written in the place of its own."""
    spot = pick(rng, spots(p, "writes", lambda op, _: op.is_update))
    if spot is None:
        return None
    at = spot[0]
    ref = p.ops[at].writes[spot[1]]
    before = [i for i in find(p, lambda op: ref.name in names(op.reads)) if i < at]
    if before and rng.random() < 0.5:
        return move(p, rng.choice(before), at)
    later = spots(p, "reads", lambda op, other: other != ref and form(p, other) == form(p, ref))
    use = pick(rng, [(i, n) for i, n in later if i > at])
    return None if use is None else put(p, use[0], replaced(p.ops[use[0]], "reads", use[1], ref))


# --- places and parts -------------------------------------------------------------------------------------------------


def shrink(rng: random.Random, p: Program) -> Program | None:
    """A transfer's reference, a run's flat range, a buffer or a leaf's place becomes half as long."""
    return rng.choice((_shorter_transfer, _shorter_range, _smaller_buffer, _smaller_slot))(rng, p)


def _shorter_transfer(rng: random.Random, p: Program) -> Program | None:
    side = rng.choice(("reads", "writes"))
    spot = pick(rng, spots(p, side, lambda op, ref: op.transfers and p.extent(p.buffers[ref.name]) > 1))
    if spot is None:
        return None
    at, n = spot
    ref: Ref = getattr(p.ops[at], side)[n]
    buffer = p.buffers[ref.name]
    start, stop = (0, p.extent(buffer)) if ref.start is None else (ref.start, ref.stop or 0)
    shape = buffer.shape if ref.start is None and buffer.bucket is None else ref.shape
    half = replace(ref, start=start, stop=start + (stop - start) // 2, shape=_halved(shape) if shape else shape)
    return put(p, at, replaced(p.ops[at], side, n, half))


def _shorter_range(rng: random.Random, p: Program) -> Program | None:
    at = pick(rng, find(p, lambda op: op.is_flat))
    if at is None:
        return None

    def half(ref: Ref) -> Ref:
        if ref.start is None or ref.shape is not None:
            return ref
        return replace(ref, stop=ref.start + ((ref.stop or 0) - ref.start) // 2)

    op = p.ops[at]
    return put(p, at, replace(op, reads=tuple(map(half, op.reads)), writes=tuple(map(half, op.writes))))


def _smaller_buffer(rng: random.Random, p: Program) -> Program | None:
    buffer = pick(rng, [b for b in p.buffers.values() if b.kind not in PERSISTENT and b.numel > 1])
    return None if buffer is None else with_buffers(p, replace(buffer, shape=_halved(buffer.shape)))


def _smaller_slot(rng: random.Random, p: Program) -> Program | None:
    bucket = pick(rng, p.buckets.values())
    if bucket is None:
        return None
    n = rng.randrange(len(bucket.slots))
    slot = bucket.slots[n]
    half = replace(slot, stop=slot.start + (slot.stop - slot.start) // 2, shape=_halved(slot.shape))
    slots = (*bucket.slots[:n], half, *bucket.slots[n + 1 :])
    return replace(p, buckets={**p.buckets, bucket.name: replace(bucket, slots=slots)})


def _halved(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Half of the first dimension that has more than one element."""
    for i, size in enumerate(shape):
        if size > 1:
            return (*shape[:i], size // 2, *shape[i + 1 :])
    return shape


def wrong_slot(rng: random.Random, p: Program) -> Program | None:
    return _elsewhere(rng, p, "reads")


def wrong_write(rng: random.Random, p: Program) -> Program | None:
    return _elsewhere(rng, p, "writes")


def _elsewhere(rng: random.Random, p: Program, side: str) -> Program | None:
    """A reference becomes one to another leaf, column or buffer of its form, mostly one that is in use."""
    spot = pick(rng, spots(p, side, lambda op, ref: True))
    if spot is None:
        return None
    at, n = spot
    others = alike(p, getattr(p.ops[at], side)[n])
    used = [ref for ref in others if alive(p, ref.name, at)]
    other = pick(rng, used if used and rng.random() < 0.8 else others)
    return None if other is None else put(p, at, replaced(p.ops[at], side, n, other))


def swap_reads(rng: random.Random, p: Program) -> Program | None:
    pairs = [
        (i, a, b)
        for i, op in enumerate(p.ops)
        if op.computes
        for a in range(len(op.reads))
        for b in range(a)
        if op.reads[a] != op.reads[b] and form(p, op.reads[a]) == form(p, op.reads[b])
    ]
    pair = pick(rng, pairs)
    if pair is None:
        return None
    at, a, b = pair
    op = p.ops[at]
    return put(p, at, replaced(replaced(op, "reads", a, op.reads[b]), "reads", b, op.reads[a]))


def drop_op(rng: random.Random, p: Program) -> Program | None:
    at = pick(rng, find(p, lambda op: not op.is_mark))
    return None if at is None else drop(p, at)


# --- arithmetic -------------------------------------------------------------------------------------------------------

INSTEAD = {"add": "sub", "sub": "add", "mul": "div", "div": "mul", "tanh": "sigmoid", "relu": "tanh", "exp": "tanh"}


def wrong_arithmetic(rng: random.Random, p: Program) -> Program | None:
    """One node of a run's segment computes with another number, or another function."""
    at = pick(rng, find(p, lambda op: op.computes))
    if at is None:
        return None
    graph = segments.copied(p.segments[p.ops[at].segment].graph)
    node = pick(rng, [n for n in graph.nodes if n.op == "call_function" and (_numbers(n) or _other(n) is not None)])
    if node is None:
        return None
    numbers = _numbers(node)
    if numbers and rng.random() < 0.5:
        index = rng.choice(numbers)
        node.args = (*node.args[:index], node.args[index] * 1.5 + 0.25, *node.args[index + 1 :])
    else:
        node.target = _other(node) or node.target
    gm = segments.module(graph)
    key = segments.digest(gm)
    return replace(put(p, at, p.ops[at].with_attrs(segment=key)), segments={**p.segments, key: gm})


def _numbers(node: fx.Node) -> list[int]:
    return [i for i, argument in enumerate(node.args) if isinstance(argument, float)]


def _other(node: fx.Node) -> object | None:
    """The same overload of the function to put in its place."""
    packet = getattr(node.target, "overloadpacket", None)
    name = INSTEAD.get(getattr(packet, "__name__", ""))
    overload = getattr(node.target, "_overloadname", "")
    return getattr(getattr(torch.ops.aten, name), overload, None) if name else None
