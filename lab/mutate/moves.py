"""moves: edits of what goes from one space to another. Write-backs, tiles, copies filled too early, ranges of the file.

An edit finds no place in a program that moves nothing.
"""

from __future__ import annotations

import random
from dataclasses import replace

from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import DISK, PERSISTENT, Ref
from lab.mutate.edits import (
    drop,
    find,
    move,
    names,
    pick,
    put,
    replaced,
    touching,
    wait_of,
    with_buffers,
    with_ops,
)


def _write_backs(p: Program) -> list[int]:
    """The moves that bring a new value to where it is held."""
    return find(p, lambda op: op.moves and p.buffers[op.target].kind in PERSISTENT)


def _fetches(p: Program) -> list[int]:
    return find(p, lambda op: op.moves and p.buffers[op.target].kind == "staging")


def drop_write_back(rng: random.Random, p: Program) -> Program | None:
    """A new value is not written back: the move is left out, and mostly its wait too."""
    if (index := pick(rng, _write_backs(p))) is None:
        return None
    return drop(p, index, wait_of(p, index) if rng.random() < 0.8 else None)


def swap_tiles(rng: random.Random, p: Program) -> Program | None:
    """A move, an op or two moves take another tile than theirs."""
    tiled = [(i, side, n) for i, op in enumerate(p.ops) for side in ("reads", "writes")
             for n, ref in enumerate(getattr(op, side)) if ref.tile is not None]  # fmt: skip
    place = pick(rng, tiled)
    if place is None:
        return None
    i, side, n = place
    ref = getattr(p.ops[i], side)[n]
    others = {getattr(p.ops[j], s)[m].tile for j, s, m in tiled} - {ref.tile}
    alike = sorted(tile for tile in others if tile[1] == ref.tile[1])
    if not alike:
        return None
    tile = rng.choice(alike)
    way = rng.choice(("one", "op", "exchange"))
    if way == "one":
        return put(p, i, replaced(p.ops[i], side, n, replace(ref, tile=tile)))
    exchanged = {ref.tile: tile, tile: ref.tile}
    ops = [
        _retiled(op, exchanged) if (way == "op" and j == i) or (way == "exchange" and op.moves and j >= i) else op
        for j, op in enumerate(p.ops)
    ]
    return with_ops(p, ops)


def _retiled(op: Op, tiles: dict[tuple[int, int] | None, tuple[int, int] | None]) -> Op:
    def other(ref: Ref) -> Ref:
        return replace(ref, tile=tiles.get(ref.tile, ref.tile))

    return replace(op, reads=tuple(map(other, op.reads)), writes=tuple(map(other, op.writes)))


def refill_early(rng: random.Random, p: Program) -> Program | None:
    """A copy is filled while another that lies there is in use: at its place, or under its name."""
    if (index := pick(rng, _fetches(p))) is None:
        return None
    name = p.ops[index].target
    own = p.buffers[name]
    uses = touching(p, name)
    beside = [
        other for other, b in p.buffers.items()
        if other != name and b.space == own.space and b.kind not in PERSISTENT and b.nbytes
        and (found := touching(p, other)) and found[0] <= uses[-1] and uses[0] <= found[-1]
    ]  # fmt: skip
    if (other := pick(rng, beside)) is None:
        return None
    like = p.buffers[other]
    if rng.random() < 0.5 and like.at is not None:
        return with_buffers(p, replace(own, at=like.at))
    if (like.dtype, like.shape, like.bucket, like.tile) != (own.dtype, own.shape, own.bucket, own.tile):
        return with_buffers(p, replace(own, at=like.at)) if like.at is not None else None
    return with_ops(p, [_renamed(op, name, other) for op in p.ops])


def _renamed(op: Op, name: str, other: str) -> Op:
    def change(ref: Ref) -> Ref:
        return replace(ref, name=other) if ref.name == name else ref

    return replace(op, reads=tuple(map(change, op.reads)), writes=tuple(map(change, op.writes)))


def wait_for_another(rng: random.Random, p: Program) -> Program | None:
    """The wait for a move names another copy, or two waits change places."""
    targets = {p.ops[i].target for i in find(p, lambda op: op.moves)}
    waits = find(p, lambda op: op.is_wait and op.target in targets)
    index = pick(rng, waits)
    if index is None or len(targets) < 2:
        return None
    if rng.random() < 0.5:
        other = rng.choice(sorted(targets - {p.ops[index].target}))
        return put(p, index, replace(p.ops[index], reads=(Ref(other),)))
    second = rng.choice(waits)
    return put(put(p, index, p.ops[second]), second, p.ops[index])


def move_late(rng: random.Random, p: Program) -> Program | None:
    """A move, or a move and its wait, come behind the op that needs what it brings."""
    if (index := pick(rng, find(p, lambda op: op.moves))) is None:
        return None
    target, wait = p.ops[index].target, wait_of(p, index)
    used = [i for i in touching(p, target) if i > index and i != wait and target in names(p.ops[i].reads)]
    if not used or wait is None:
        return None
    if rng.random() < 0.5:
        return move(p, index, used[0])
    start, end = p.ops[index], p.ops[wait]
    rest = drop(p, index, wait)
    at = used[0] - (wait < used[0])
    return with_ops(rest, [*rest.ops[:at], start, end, *rest.ops[at:]])


def update_before_use(rng: random.Random, p: Program) -> Program | None:
    """An update comes before an op that still needs the old value, with its copies on their ways there and back."""
    if (index := pick(rng, find(p, lambda op: op.is_update and op.is_flat))) is None:
        return None
    copies = {name for name in names((*p.ops[index].reads, *p.ops[index].writes)) if p.buffers[name].kind == "staging"}
    onward = find(p, lambda op: op.moves and all(p.buffers[r.name].kind == "staging" for r in (*op.reads, *op.writes)))
    for i in [*onward, *reversed(onward)]:
        ends = {p.ops[i].reads[0].name, p.ops[i].target}
        copies |= ends if ends & copies else set()
    moves = find(p, lambda op: op.moves and not copies.isdisjoint(names((*op.reads, *op.writes))))
    held = {name for i in (*moves, index) for name in names((*p.ops[i].reads, *p.ops[i].writes)) - copies}
    held = {name for name in held if p.buffers[name].kind in PERSISTENT}
    frees = find(p, lambda op: op.is_free and not copies.isdisjoint(names(op.reads)))
    chain = {index, *moves, *(w for i in moves if (w := wait_of(p, i)) is not None), *frees}
    users = [i for i, op in enumerate(p.ops[:index]) if i not in chain and not op.is_mark and held & names(op.reads)]
    if (at := pick(rng, users)) is None:
        return None
    early = [op for i, op in enumerate(p.ops) if i in chain and i > at]
    rest = [op for i, op in enumerate(p.ops) if i > at and i not in chain]
    return with_ops(p, [*p.ops[:at], *early, p.ops[at], *rest])


def alias_disk(rng: random.Random, p: Program) -> Program | None:
    """Two ranges of the rank's file share bytes: all of one, or a page."""
    held = [b for b in p.buffers.values() if b.space == DISK and b.nbytes]
    if len(held) < 2:
        return None
    one, other = rng.sample(held, 2)
    ends = [(other.at or 0), max((other.at or 0) + -(-other.nbytes // 4096) * 4096 - 4096, 0)]
    return with_buffers(p, replace(one, at=rng.choice(ends)))
