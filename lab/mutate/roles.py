"""roles: edits of a pipeline's programs. Messages, microbatches, actions of the schedule, groups, lent leaves, owners.

An edit of one role finds no place in a program without roles. The last ones break two roles at once.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import torch

from fzero.ir import fx_nodes, segments
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import PERSISTENT, Ref
from fzero.ir.rewrite import renamed
from lab.mutate.edits import (
    Edit,
    Mutation,
    Programs,
    alike,
    drop,
    find,
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

MICROBATCH = re.compile(r"^(?P<stem>.*)\.(?P<number>\d+)(?P<half>\.w\d+)?$")
ACTION = re.compile(r"^[FBIW]\d+\.\d+ ")


def in_a_role(edit: Edit) -> Mutation:
    """The mutation that makes an edit on the program of one role, on one rank or on all of them."""
    return on(lambda rng, p: None if p.role is None else edit(rng, p))


# --- messages ---------------------------------------------------------------------------------------------------------


def _message_form(p: Program, op: Op) -> object:
    buffer = p.buffers[op.target]
    return op.is_send, buffer.shape, buffer.dtype


def swap_tags(rng: random.Random, p: Program) -> Program | None:
    """Two messages of one form exchange their tags."""
    found = find(p, lambda op: op.is_message)
    pairs = [(i, j) for i in found for j in found if i < j and _message_form(p, p.ops[i]) == _message_form(p, p.ops[j])]
    if (chosen := pick(rng, pairs)) is None:
        return None
    i, j = chosen
    own, other = p.ops[i], p.ops[j]
    return put(put(p, i, own.with_attrs(tag=other.tag)), j, other.with_attrs(tag=own.tag))


def lose_message(rng: random.Random, p: Program) -> Program | None:
    """A send or a receive is left out, with its wait or without."""
    index = pick(rng, find(p, lambda op: op.is_message))
    return None if index is None else drop(p, index, wait_of(p, index) if rng.random() < 0.7 else None)


def other_form(rng: random.Random, p: Program) -> Program | None:
    """What is received is of another dtype or another size than what is sent."""
    index = pick(rng, find(p, lambda op: op.is_recv))
    if index is None:
        return None
    buffer = p.buffers[p.ops[index].target]
    dtypes = (torch.float32, torch.bfloat16, torch.int32, torch.float64)
    if rng.random() < 0.5:
        return with_buffers(p, replace(buffer, dtype=rng.choice([d for d in dtypes if d is not buffer.dtype])))
    shape = buffer.shape or (1,)
    return with_buffers(p, replace(buffer, shape=(rng.choice((2 * shape[0], shape[0] + 1)), *shape[1:])))


def exchange_messages(rng: random.Random, p: Program) -> Program | None:
    """Two messages in one direction between the same roles start in the other order."""
    found = find(p, lambda op: op.is_message)
    pairs = [(i, j) for i in found for j in found if i < j and
             (p.ops[i].kind, p.ops[i].peer) == (p.ops[j].kind, p.ops[j].peer)]  # fmt: skip
    if (chosen := pick(rng, pairs)) is None:
        return None
    i, j = chosen
    return put(put(p, i, p.ops[j]), j, p.ops[i])


# --- segments and microbatches ----------------------------------------------------------------------------------------


def leave_segment_out(rng: random.Random, p: Program) -> Program | None:
    """A run of a region is left out."""
    index = pick(rng, find(p, lambda op: op.in_region))
    return None if index is None else drop(p, index)


def _sums(p: Program) -> list[tuple[int, int]]:
    """(op, write) of what adds a microbatch's gradients to those before: a flat op, or a segment of a region."""
    return [
        (i, n)
        for i, op in enumerate(p.ops)
        if op.is_run and (op.is_flat or op.in_region) and len(op.reads) > 1
        for n, ref in enumerate(op.writes)
        if ref in op.reads and p.buffers[ref.name].kind == "grad"
    ]


def _times(p: Program, place: tuple[int, int], factor: int) -> Program:
    """The program with what is added to the sum at a place taken `factor` times."""
    index, n = place
    op = p.ops[index]
    graph = segments.copied(p.segments[op.segment].graph)
    into = fx_nodes.placeholders(graph)[len(op.reads) + n - op.num_outputs]
    added = next(node for node in graph.nodes if node.kwargs.get("out") is into)
    added.update_kwarg("alpha", factor)
    gm = segments.module(graph)
    key = segments.digest(gm)
    return replace(put(p, index, op.with_attrs(segment=key)), segments={**p.segments, key: gm})


def leave_gradient_out(rng: random.Random, p: Program) -> Program | None:
    """A microbatch's gradients are not added."""
    place = pick(rng, _sums(p))
    return None if place is None else _times(p, place, 0)


def add_gradient_twice(rng: random.Random, p: Program) -> Program | None:
    """A microbatch's gradients are added twice."""
    place = pick(rng, _sums(p))
    return None if place is None else _times(p, place, 2)


def add_gradient_elsewhere(rng: random.Random, p: Program) -> Program | None:
    """A leaf's gradient is added to another leaf's sum."""
    sums = _sums(p)
    if (place := pick(rng, sums)) is None:
        return None
    op, ref = p.ops[place[0]], p.ops[place[0]].writes[place[1]]
    others = {p.ops[i].writes[n] for i, n in sums} & set(alike(p, ref)) - {*op.reads, *op.writes}
    other = pick(rng, sorted(others, key=str))
    return None if other is None else put(p, place[0], renamed(op, lambda one: other if one == ref else one))


def another_microbatch(rng: random.Random, p: Program) -> Program | None:
    """A run reads another microbatch's activation, or a message carries it."""
    places = places_of(p, "reads", lambda op, ref: (op.computes or op.is_send) and _others(p, ref))
    sends = [place for place in places if p.ops[place[0]].is_send]
    if (place := pick(rng, sends if sends and rng.random() < 0.5 else places)) is None:
        return None
    index, n = place
    ref = p.ops[index].reads[n]
    other = replace(ref, name=rng.choice(_others(p, ref)))
    broken = put(p, index, replaced(p.ops[index], "reads", n, other))
    wait = wait_of(p, index) if p.ops[index].is_send else None
    return broken if wait is None else put(broken, wait, replaced(p.ops[wait], "reads", 0, Ref(other.name)))


def _others(p: Program, ref: Ref) -> list[str]:
    """The buffers that hold for other microbatches what a reference's holds for its own."""
    own = MICROBATCH.match(ref.name)
    buffer = p.buffers[ref.name]
    if own is None or buffer.bucket is not None or buffer.kind != "activation":
        return []
    found = []
    for number in range(p.microbatches):
        name = f"{own['stem']}.{number}{own['half'] or ''}"
        if name in p.buffers and name != ref.name and p.buffers[name].shape == buffer.shape:
            found.append(name)
    return found


# --- actions of the schedule ------------------------------------------------------------------------------------------


def _blocks(p: Program) -> list[tuple[int, int]]:
    """(start, stop) of the ops of each action, one after another."""
    blocks: list[tuple[str, int, int]] = []
    for i, op in enumerate(p.ops):
        label = ACTION.match(op.why)
        if label is None:
            continue
        if blocks and blocks[-1][0] == label[0]:
            blocks[-1] = (label[0], blocks[-1][1], i + 1)
        else:
            blocks.append((label[0], i, i + 1))
    return [(start, stop) for _, start, stop in blocks]


def action_early(rng: random.Random, p: Program) -> Program | None:
    """An action runs before the wait for its input, or before actions that come ahead of it."""
    if rng.random() < 0.5:
        waits = find(p, lambda op: op.is_wait and "from role" in op.why)
        places = [(w, r) for w in waits for r in range(w + 1, min(w + 6, len(p.ops))) if p.ops[r].computes
                  and p.ops[w].target in names(p.ops[r].reads)]  # fmt: skip
        return None if (place := pick(rng, places)) is None else move(p, place[1], place[0])
    blocks = _blocks(p)
    pairs = [(a, b) for n, b in enumerate(blocks) for a in blocks[max(0, n - 4) : n]]
    if (pair := pick(rng, pairs)) is None:
        return None
    (to, _), (start, stop) = pair
    return with_ops(p, [*p.ops[:to], *p.ops[start:stop], *p.ops[to:start], *p.ops[stop:]])


# --- groups and coordinates -------------------------------------------------------------------------------------------


def wrong_group(rng: random.Random, p: Program) -> Program | None:
    """A transfer runs in the group of another axis of the mesh."""
    collectives = find(p, lambda op: op.is_collective)
    index = pick(rng, collectives if collectives and rng.random() < 0.5 else find(p, lambda op: op.transfers))
    if index is None:
        return None
    return put(p, index, replace(p.ops[index], axis=rng.choice([n for n in p.mesh.names if n != p.ops[index].axis])))


def wrong_coordinate(rng: random.Random, p: Program) -> Program | None:
    """A message goes to another coordinate, or a run uses another coordinate's slice, or another part of a packet."""
    tried = (edit(rng, p) for edit in rng.sample((_wrong_peer, _wrong_slice, _wrong_part), 3))
    return next((broken for broken in tried if broken is not None and broken != p), None)


def _wrong_peer(rng: random.Random, p: Program) -> Program | None:
    index = pick(rng, find(p, lambda op: op.is_message))
    if index is None:
        return None
    others = [peer for peer in range(p.mesh.roles) if peer != p.ops[index].peer]
    return put(p, index, p.ops[index].with_attrs(peer=rng.choice(others)))


def _wrong_slice(rng: random.Random, p: Program) -> Program | None:
    """An op's own slices become those of one coordinate, whichever rank runs it."""
    index = pick(rng, find(p, lambda op: any(ref.mine for ref in (*op.reads, *op.writes))))
    if index is None:
        return None
    place = rng.randrange(p.mesh.data_ranks)

    def of_place(ref: Ref) -> Ref:
        buffer = p.buffers[ref.name]
        if not ref.mine or buffer.bucket is None:
            return ref
        bucket = p.buckets[buffer.bucket]
        size = p.slice_length(bucket) // buffer.per
        start = place % p.mesh.size(bucket.axis) * size
        return replace(ref, start=start, stop=start + size, mine=False)

    op = p.ops[index]
    return put(p, index, replace(op, reads=tuple(map(of_place, op.reads)), writes=tuple(map(of_place, op.writes))))


def _wrong_part(rng: random.Random, p: Program) -> Program | None:
    def packed(op: Op, ref: Ref) -> bool:
        buffer = p.buffers[ref.name]
        return op.computes and ref.start is not None and buffer.bucket is None and buffer.kind == "scratch"

    side = rng.choice(("reads", "writes"))
    place = pick(rng, places_of(p, side, packed))
    if place is None:
        return None
    refs = list(getattr(p.ops[place[0]], side))
    like = [m for m, ref in enumerate(refs) if ref.name == refs[place[1]].name and ref != refs[place[1]]]
    if (other := pick(rng, like)) is None:
        return None
    refs[place[1]], refs[other] = refs[other], refs[place[1]]
    op = p.ops[place[0]]
    return put(p, place[0], replace(op, reads=tuple(refs)) if side == "reads" else replace(op, writes=tuple(refs)))


# --- leaves of two roles ----------------------------------------------------------------------------------------------


def stale_lent(rng: random.Random, programs: Programs) -> dict[int, Program] | None:
    """A leaf that another role uses is not sent to it, or is another leaf, or its gradient does not come back."""
    ranks = rng.sample(sorted(programs), len(programs))
    for edit in rng.sample(LENT, len(LENT)):
        for rank in ranks:
            broken = edit(rng, programs[rank])
            if broken is not None:
                return {r: broken if p is programs[rank] else p for r, p in programs.items()}
    return None


def _stale_value(rng: random.Random, p: Program) -> Program | None:
    """The role keeps its copy between steps, and receives none."""
    index = pick(rng, find(p, lambda op: op.is_recv and p.buffers[op.target].lent is not None))
    if index is None:
        return None
    kept = replace(p.buffers[p.ops[index].target], kind="state", at=None)
    return with_buffers(drop(p, index, wait_of(p, index)), kept)


def _lent_late(rng: random.Random, p: Program) -> Program | None:
    """The copy for the other role is made after an update."""
    copies = find(p, lambda op: op.computes and any(p.buffers[name].lent for name in names(op.writes)))
    updates = find(p, lambda op: op.is_update)
    index = pick(rng, copies)
    return None if index is None or not updates else move(p, index, rng.choice(updates))


def _wrong_lent(rng: random.Random, p: Program) -> Program | None:
    """The copy for the other role is of another leaf, or is not made."""
    copies = find(p, lambda op: op.computes and any(p.buffers[name].lent for name in names(op.writes)))
    index = pick(rng, copies)
    if index is None:
        return None
    others = [ref for ref in alike(p, p.ops[index].reads[0]) if ref.name != p.ops[index].writes[0].name]
    if not others or rng.random() < 0.3:
        return drop(p, index)
    return put(p, index, replaced(p.ops[index], "reads", 0, rng.choice(others)))


def _lost_back(rng: random.Random, p: Program) -> Program | None:
    """A gradient that came back from another role is not copied into its bucket."""
    index = pick(rng, find(p, lambda op: op.computes and any(".back" in name for name in names(op.reads))))
    return None if index is None else drop(p, index)


LENT: tuple[Edit, ...] = (_stale_value, _lent_late, _wrong_lent, _lost_back)


def without_a_message(rng: random.Random, programs: Programs) -> dict[int, Program] | None:
    """A message is neither sent nor received, nor waited for."""
    tags = {op.tag for p in programs.values() if p.role is not None for op in p.ops if op.is_message}
    if (tag := pick(rng, sorted(tags))) is None:
        return None
    made: dict[int, Program] = {}
    for p in programs.values():
        gone = find(p, lambda op: op.is_message and op.tag == tag)
        made[id(p)] = drop(p, *gone, *(wait_of(p, index) for index in gone)) if gone else p
    return {rank: made[id(p)] for rank, p in programs.items()}


def owned_twice(rng: random.Random, programs: Programs) -> dict[int, Program] | None:
    """A role keeps the leaves of a bucket that another role owns, and may run the owner's update of them too."""
    pairs = [(a, b) for a in programs for b in programs if programs[a].role != programs[b].role]
    if (pair := pick(rng, pairs)) is None:
        return None
    owner, other = (programs[rank] for rank in pair)
    update = pick(rng, [op for op in owner.ops if op.is_update and _foreign(owner, other, op.writes[0])])
    if update is None:
        return None
    bucket = owner.buffers[update.writes[0].name].bucket
    needed = {n for n, b in owner.buffers.items() if b.bucket == bucket and b.kind in PERSISTENT}
    ops: list[Op] = []
    if rng.random() < 0.7:
        sources = [op for op in owner.ops if op.computes and names(op.writes) & names(update.reads)]
        ops = [*(sources if rng.random() < 0.5 else ()), update]
        needed |= {ref.name for op in ops for ref in (*op.reads, *op.writes)}
    broken = replace(
        other,
        ops=(*other.ops, *ops),
        buckets={**owner.buckets, **other.buckets},
        buffers={**{n: replace(owner.buffers[n], at=None) for n in owner.buffers if n in needed}, **other.buffers},
        segments={**owner.segments, **other.segments},
    )
    return {rank: broken if p is other else p for rank, p in programs.items()}


def _foreign(owner: Program, other: Program, ref: Ref) -> bool:
    """Whether a reference is to a bucket that the other role does not keep."""
    return owner.buffers[ref.name].bucket is not None and ref.name not in other.buffers
