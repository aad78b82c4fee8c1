"""values: edits of what is computed. Microbatches, updates, places and parts of buffers, arithmetic."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import fx

from fzero.ir import segments
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Ref
from lab.mutate.edits import (
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
    touching,
    wait_of,
    with_buffers,
)

# --- gradients and updates --------------------------------------------------------------------------------------------


def wrong_divisor(rng: random.Random, p: Program) -> Program | None:
    """A reduction divides by another number."""
    index = pick(rng, find(p, lambda op: op.divisor is not None))
    if index is None:
        return None
    right = int(p.ops[index].divisor)
    wrong = rng.choice([d for d in (1, right * 2, right + 1, p.world_size) if d != right])
    return put(p, index, p.ops[index].with_attrs(divisor=wrong))


def wrong_operation(rng: random.Random, p: Program) -> Program | None:
    """A reduction takes the largest instead of the sum, or the other way round."""
    index = pick(rng, find(p, lambda op: op.reduction is not None))
    return (
        None
        if index is None
        else put(p, index, p.ops[index].with_attrs(op="sum" if p.ops[index].reduction == "max" else "max"))
    )


def skip_microbatch(rng: random.Random, p: Program) -> Program | None:
    """A part's run, reduction or addition is left out, or another part is added in its place."""
    if p.microbatches == 1:
        return None
    adds = find(p, lambda op: op.is_run and len(op.reads) == 2 and " add " in f" {op.why}")
    parts = find(p, lambda op: op.microbatch is not None)
    index = pick(rng, rng.choice([group for group in (adds, parts) if group] or [[]]))
    if index is None:
        return None
    op = p.ops[index]
    others = [r for r in alike(p, op.reads[1]) if alive(p, r.name, index)] if index in adds else []
    if others and rng.random() < 0.5:
        return put(p, index, replaced(op, "reads", 1, rng.choice(others)))
    return drop(p, index, wait_of(p, index) if op.transfers else None)


def wrong_microbatch(rng: random.Random, p: Program) -> Program | None:
    """A run is fed another part of the batch than its own."""
    place = pick(
        rng, places_of(p, "reads", lambda _, ref: p.buffers[ref.name].kind == "batch" and ref.start is not None)
    )
    if place is None:
        return None
    index, n = place
    ref = p.ops[index].reads[n]
    size = (ref.stop or 0) - (ref.start or 0)
    start = pick(rng, [s for s in range(0, p.buffers[ref.name].numel, size) if s != ref.start])
    if start is None:
        return None
    return put(p, index, replaced(p.ops[index], "reads", n, replace(ref, start=start, stop=start + size)))


def update_twice(rng: random.Random, p: Program) -> Program | None:
    """An update runs twice."""
    index = pick(rng, find(p, lambda op: op.is_update))
    return None if index is None else insert(p, index + 1, p.ops[index])


def update_early(rng: random.Random, p: Program) -> Program | None:
    """An update runs before the wait for the reduction of its gradients, or reads gradients that are not reduced."""
    source = {op.writes[0].name: op.reads[0].name for op in p.ops if op.reduces}
    place = pick(rng, places_of(p, "reads", lambda op, ref: op.is_update and ref.name in source))
    if place is None:
        return None
    index, n = place
    op = p.ops[index]
    ref = op.reads[n]
    before = [i for i in touching(p, ref.name) if i < index and (p.ops[i].reduces or p.ops[i].is_wait)]
    if not before:
        return None
    if rng.random() < 0.5:
        return move(p, index, rng.choice(before))
    return move(put(p, index, replaced(op, "reads", n, replace(ref, name=source[ref.name]))), index, before[0])


def use_donated(rng: random.Random, p: Program) -> Program | None:
    """An op that reads the state moves behind the update, or reads a value that an update wrote in place of its own
    operand."""
    place = pick(rng, places_of(p, "writes", lambda op, _: op.is_update))
    if place is None:
        return None
    index = place[0]
    ref = p.ops[index].writes[place[1]]
    before = [i for i in find(p, lambda op: ref.name in names(op.reads)) if i < index]
    if before and rng.random() < 0.5:
        return move(p, rng.choice(before), index)
    later = places_of(p, "reads", lambda op, other: other != ref and form(p, other) == form(p, ref))
    use = pick(rng, [(i, n) for i, n in later if i > index])
    return None if use is None else put(p, use[0], replaced(p.ops[use[0]], "reads", use[1], ref))


# --- places and parts -------------------------------------------------------------------------------------------------


def shrink(rng: random.Random, p: Program) -> Program | None:
    """A transfer's reference, a run's flat range, a buffer or a leaf's place becomes half as long."""
    return rng.choice((_shorter_transfer, _shorter_range, _smaller_buffer, _smaller_slot))(rng, p)


def _shorter_transfer(rng: random.Random, p: Program) -> Program | None:
    side = rng.choice(("reads", "writes"))
    place = pick(rng, places_of(p, side, lambda op, ref: op.transfers and p.extent(p.buffers[ref.name]) > 1))
    if place is None:
        return None
    index, n = place
    ref: Ref = getattr(p.ops[index], side)[n]
    buffer = p.buffers[ref.name]
    start, stop = (0, p.extent(buffer)) if ref.start is None else (ref.start, ref.stop or 0)
    shape = buffer.shape if ref.start is None and buffer.bucket is None else ref.shape
    half = replace(ref, start=start, stop=start + (stop - start) // 2, shape=_halved(shape) if shape else shape)
    return put(p, index, replaced(p.ops[index], side, n, half))


def _shorter_range(rng: random.Random, p: Program) -> Program | None:
    index = pick(rng, find(p, lambda op: op.is_flat))
    if index is None:
        return None

    def half(ref: Ref) -> Ref:
        if ref.start is None or ref.shape is not None:
            return ref
        return replace(ref, stop=ref.start + ((ref.stop or 0) - ref.start) // 2)

    op = p.ops[index]
    return put(p, index, replace(op, reads=tuple(map(half, op.reads)), writes=tuple(map(half, op.writes))))


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
    """A read is of another leaf, column or buffer."""
    return _elsewhere(rng, p, "reads")


def wrong_write(rng: random.Random, p: Program) -> Program | None:
    """A write is to another leaf, column or buffer."""
    return _elsewhere(rng, p, "writes")


def _elsewhere(rng: random.Random, p: Program, side: str) -> Program | None:
    """A reference becomes one to another leaf, column or buffer of its form, mostly one that is in use."""
    place = pick(rng, places_of(p, side, lambda op, ref: True))
    if place is None:
        return None
    index, n = place
    others = alike(p, getattr(p.ops[index], side)[n])
    used = [ref for ref in others if alive(p, ref.name, index)]
    other = pick(rng, used if used and rng.random() < 0.8 else others)
    return None if other is None else put(p, index, replaced(p.ops[index], side, n, other))


def swap_reads(rng: random.Random, p: Program) -> Program | None:
    """A run reads two of its operands in each other's place."""
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
    index, a, b = pair
    op = p.ops[index]
    return put(p, index, replaced(replaced(op, "reads", a, op.reads[b]), "reads", b, op.reads[a]))


def drop_op(rng: random.Random, p: Program) -> Program | None:
    """An op is left out."""
    index = pick(rng, find(p, lambda op: not op.is_mark))
    return None if index is None else drop(p, index)


# --- arithmetic -------------------------------------------------------------------------------------------------------

INSTEAD = {"add": "sub", "sub": "add", "mul": "div", "div": "mul", "tanh": "sigmoid", "relu": "tanh", "exp": "tanh"}


def wrong_arithmetic(rng: random.Random, p: Program) -> Program | None:
    """One node of a run's segment computes with another number, or another function."""
    op_index = pick(rng, find(p, lambda op: op.computes))
    if op_index is None:
        return None
    graph = segments.copied(p.segments[p.ops[op_index].segment].graph)
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
    return replace(put(p, op_index, p.ops[op_index].with_attrs(segment=key)), segments={**p.segments, key: gm})


def _numbers(node: fx.Node) -> list[int]:
    return [i for i, argument in enumerate(node.args) if isinstance(argument, float)]


def _other(node: fx.Node) -> object | None:
    """The same overload of the function to put in its place."""
    packet = getattr(node.target, "overloadpacket", None)
    name = INSTEAD.get(getattr(packet, "__name__", ""))
    overload = getattr(node.target, "_overloadname", "")
    return getattr(getattr(torch.ops.aten, name), overload, None) if name else None
