"""room: edits of where memory lies and how much there is. Places in the arena, workspaces, the batch's copy."""

from __future__ import annotations

import random
from dataclasses import replace

from fzero.codegen import inplace, segment_memory
from fzero.ir.liveness import intervals
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Buffer
from lab.mutate.edits import find, pick, put, with_buffers


def _together(p: Program, kinds: tuple[str, ...] = ()) -> list[tuple[Buffer, Buffer]]:
    """Pairs of placed buffers that are alive at one moment; the first is of one of the kinds, if any are given."""
    lives = intervals(p.ops, p.buffers, p.metrics.values())
    placed = [b for n, b in p.buffers.items() if b.at is not None and n in lives and b.nbytes]
    return [
        (a, b) for a in placed if not kinds or a.kind in kinds for b in placed
        if a is not b and lives[a.name][0] <= lives[b.name][1] and lives[b.name][0] <= lives[a.name][1]
    ]  # fmt: skip


def overlap_by_one(rng: random.Random, p: Program) -> Program | None:
    """A buffer begins where another that is in use has its last element, or ends in its first."""
    if (pair := pick(rng, _together(p))) is None:
        return None
    buffer, other = pair
    before, after = (other.at or 0) - buffer.nbytes + other.dtype.itemsize, (other.at or 0) + other.nbytes
    offset = rng.choice((before, after - other.dtype.itemsize, (after - 1) // 64 * 64))
    return with_buffers(p, replace(buffer, at=max(offset, 0)))


def batch_over(rng: random.Random, p: Program) -> Program | None:
    """The step's copy of the batch lies where something else does."""
    pair = pick(rng, _together(p, ("batch",)))
    return None if pair is None else with_buffers(p, replace(pair[0], at=pair[1].at))


def metric_over(rng: random.Random, p: Program) -> Program | None:
    """A metric, which lives to the end, lies where something else does."""
    pair = pick(rng, _together(p, ("metric",)))
    return None if pair is None else with_buffers(p, replace(pair[0], at=pair[1].at))


def exchange_places(rng: random.Random, p: Program) -> Program | None:
    """Two buffers of unlike sizes have each other's place."""
    placed = [b for b in p.buffers.values() if b.at is not None]
    pair = pick(rng, [(a, b) for a in placed for b in placed if a.nbytes < b.nbytes])
    if pair is None:
        return None
    return with_buffers(p, replace(pair[0], at=pair[1].at), replace(pair[1], at=pair[0].at))


def _blocks(p: Program) -> list[int]:
    return find(p, lambda op: op.offset is not None and op.workspace > 0)


def grow_workspace(rng: random.Random, p: Program) -> Program | None:
    """A workspace reaches into what lies behind it."""
    if (index := pick(rng, _blocks(p))) is None:
        return None
    op = p.ops[index]
    end = (op.offset or 0) + op.workspace
    behind = [b.at for b in p.buffers.values() if b.at is not None and b.at >= end]
    to = rng.choice([*behind, p.arena_bytes]) + rng.choice((4, 64, 256))
    return put(p, index, op.with_attrs(workspace=to - (op.offset or 0)))


def small_workspace(rng: random.Random, p: Program) -> Program | None:
    """A workspace has fewer bytes than the segment works in."""
    index = pick(rng, _blocks(p))
    if index is None:
        return None
    need = needed(p, p.ops[index])
    return put(
        p, index, p.ops[index].with_attrs(workspace=rng.choice((0, need // 2, max(need - 64, 0), max(need - 1, 0))))
    )


def lost_workspace(rng: random.Random, p: Program) -> Program | None:
    """A workspace has no place, or lies at the arena's begin, or where a buffer does that the op uses."""
    index = pick(rng, _blocks(p))
    if index is None:
        return None
    op = p.ops[index]
    if rng.random() < 0.3:
        return put(p, index, replace(op, attrs=tuple(a for a in op.attrs if a[0] != "at")))
    used = [p.buffers[ref.name].at for ref in (*op.reads, *op.writes)]
    places = [place for place in used if place is not None and place != op.offset]
    return put(p, index, op.with_attrs(at=rng.choice([*places, 0, (op.offset or 0) + 64])))


def needed(p: Program, op: Op) -> int:
    """Bytes that the executor lays out for a run's own values."""
    return segment_memory.layout(p.segments[op.segment], inplace.apart(op)).nbytes


def lost_place(rng: random.Random, p: Program) -> Program | None:
    """A buffer has no place in the arena, or one behind its end."""
    buffer = pick(rng, [b for b in p.buffers.values() if b.at is not None])
    if buffer is None:
        return None
    return with_buffers(p, replace(buffer, at=rng.choice((None, p.arena_bytes, p.arena_bytes + 64))))
