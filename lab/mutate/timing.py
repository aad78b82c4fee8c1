"""timing: edits of when things happen and whose memory they use. Waits, frees, transfers, the cap, messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from fzero.ir.op import Op, make_op
from fzero.ir.program import Program
from fzero.ir.records import Ref
from lab.mutate.edits import (
    alive,
    drop,
    find,
    insert,
    move,
    names,
    never_freed,
    pick,
    put,
    replaced,
    touching,
    unfreed,
    wait_of,
    with_buffers,
    with_ops,
)

# --- waits and frees --------------------------------------------------------------------------------------------------


def drop_wait(rng: random.Random, p: Program) -> Program | None:
    """A wait is left out."""
    index = pick(rng, find(p, lambda op: op.is_wait))
    return None if index is None else drop(p, index)


def repeat_wait(rng: random.Random, p: Program) -> Program | None:
    """A wait comes once more, a few ops later."""
    index = pick(rng, find(p, lambda op: op.is_wait))
    return None if index is None else insert(p, min(index + rng.randint(1, 6), len(p.ops)), p.ops[index])


def wait_late(rng: random.Random, p: Program) -> Program | None:
    """A wait moves behind the first use of the buffer that it waits for."""
    index = pick(rng, find(p, lambda op: op.is_wait))
    if index is None:
        return None
    used = next((i for i in touching(p, p.ops[index].reads[0].name) if i > index), None)
    return None if used is None else move(p, index, used)


def settle_late(rng: random.Random, p: Program) -> Program | None:
    """A settle moves behind the op that writes over a source which other ranks may still read, or later."""
    index = pick(rng, find(p, lambda op: op.is_settle))
    return None if index is None or index + 1 >= len(p.ops) else move(p, index, rng.randint(index + 1, len(p.ops) - 1))


def exchange_settles(rng: random.Random, p: Program) -> Program | None:
    """Two settles change places."""
    found = find(p, lambda op: op.is_settle)
    if len(found) < 2:
        return None
    first, second = rng.sample(found, 2)
    return put(put(p, first, p.ops[second]), second, p.ops[first])


def _freed(rng: random.Random, p: Program) -> tuple[int, str] | None:
    return pick(rng, [(i, ref.name) for i, op in enumerate(p.ops) if op.is_free for ref in op.reads])


def free_early(rng: random.Random, p: Program) -> Program | None:
    """A buffer is freed before its last use, or some uses before that."""
    freed = _freed(rng, p)
    if freed is None:
        return None
    first, *_, last = (*touching(p, freed[1]), len(p.ops))
    last = touching(p, freed[1])[-1] if last == len(p.ops) else last
    index = last if rng.random() < 0.5 else rng.randint(min(first + 1, last), last)
    return insert(unfreed(p, *freed), index, make_op("free", [Ref(freed[1])]))


def free_never(rng: random.Random, p: Program) -> Program | None:
    """A buffer is never freed."""
    freed = _freed(rng, p)
    return None if freed is None else unfreed(p, *freed)


def free_twice(rng: random.Random, p: Program) -> Program | None:
    """A buffer is freed once more, later."""
    freed = _freed(rng, p)
    return None if freed is None else insert(p, rng.randint(freed[0], len(p.ops)), make_op("free", [Ref(freed[1])]))


def wrong_place(rng: random.Random, p: Program) -> Program | None:
    """A buffer, or a run's workspace, lies where something else does, or a little beside its place."""
    placed = [b for b in p.buffers.values() if b.at is not None]
    blocks = find(p, lambda op: op.offset is not None)
    target, other = pick(rng, range(len(placed) + len(blocks))), pick(rng, placed)
    if target is None or other is None:
        return None
    offset = max((other.at or 0) + rng.choice((0, 0, 64, -64)), 0)
    if target < len(placed):
        return with_buffers(p, replace(placed[target], at=offset))
    block = blocks[target - len(placed)]
    return put(p, block, p.ops[block].with_attrs(at=offset))


# --- transfers --------------------------------------------------------------------------------------------------------


def swap_collectives(rng: random.Random, p: Program) -> Program | None:
    """Of two collectives one after the other the later starts first, or they change places."""
    starts = find(p, lambda op: op.is_collective)
    number = pick(rng, range(len(starts) - 1))
    if number is None:
        return None
    early, late = starts[number], starts[number + 1]
    if rng.random() < 0.7:
        return move(p, late, early)
    return put(put(p, early, p.ops[late]), late, p.ops[early])


def wrong_axis(rng: random.Random, p: Program) -> Program | None:
    """A transfer runs over another axis, or over none."""
    index = pick(rng, find(p, lambda op: op.transfers))
    return None if index is None else put(p, index, replace(p.ops[index], axis=rng.choice(("tp", "pp", None))))


def again(rng: random.Random, p: Program, wanted: Callable[[Op], bool]) -> Program | None:
    """A transfer and its wait once more, right after it."""
    index = pick(rng, find(p, wanted))
    wait = None if index is None else wait_of(p, index)
    return None if index is None or wait is None else insert(p, wait + 1, p.ops[index], p.ops[wait])


def gather_twice(rng: random.Random, p: Program) -> Program | None:
    """A gather runs twice."""
    return again(rng, p, lambda op: op.gathers)


def exceed_cap(rng: random.Random, p: Program) -> Program | None:
    """A gather starts some segments earlier, into the place that was meant for it or into memory of its own."""
    starts = find(p, lambda op: op.gathers and p.buffers[op.writes[0].name].kind == "gathered")
    index = pick(rng, [i for i in starts if any(op.is_run for op in p.ops[:i])])
    if index is None:
        return None
    moved = move(p, index, rng.choice([i for i in range(index) if p.ops[i].is_run]))
    buffer = p.buffers[p.ops[index].writes[0].name]
    return moved if rng.random() < 0.3 else with_buffers(moved, replace(buffer, at=None))


def busy_scratch(rng: random.Random, p: Program) -> Program | None:
    """A reduction receives into memory that holds something else."""
    index = pick(rng, find(p, lambda op: op.reduces and len(op.writes) > 1))
    if index is None:
        return None
    op = p.ops[index]
    room = p.buffers[op.writes[1].name]
    fitting = [b.name for b in p.buffers.values() if b.nbytes >= room.nbytes and b.dtype is room.dtype]
    name = pick(rng, [n for n in fitting if n not in names((*op.reads, *op.writes)) and alive(p, n, index)])
    return None if name is None else never_freed(put(p, index, replaced(op, "writes", 1, Ref(name))), room.name)


def unmatched_message(rng: random.Random, p: Program) -> Program | None:
    """A send or a receive is dropped, or goes to another rank or under another tag."""
    index = pick(rng, find(p, lambda op: op.is_message))
    if index is None:
        return None
    op, way = p.ops[index], rng.choice(("drop", "peer", "tag"))
    if way == "drop":
        return drop(p, index, wait_of(p, index))
    if way == "tag":
        return put(p, index, op.with_attrs(tag=op.tag + rng.randint(1, 3)))
    return put(p, index, op.with_attrs(peer=(op.peer + rng.randint(1, 3)) % p.world_size))


def reduce_early(rng: random.Random, p: Program) -> Program | None:
    """A reduction moves before the last write to its gradients."""
    index = pick(rng, find(p, lambda op: op.reduces and op.reads[0].start is None))
    if index is None:
        return None
    name = p.ops[index].reads[0].name
    wrote = [i for i in find(p, lambda op: name in names(op.writes)) if i < index]
    return move(p, index, wrote[-1]) if wrote else None


def reduce_twice(rng: random.Random, p: Program) -> Program | None:
    """The same gradients once more, or the result of a reduction again."""
    if rng.random() < 0.5:
        return again(rng, p, lambda op: op.reduces)
    index = pick(rng, find(p, lambda op: op.reduces and not op.row.scatters))
    wait = None if index is None else wait_of(p, index)
    if index is None or wait is None:
        return None
    op = p.ops[index]
    once = [replace(p.buffers[ref.name], name=f"{ref.name}.once", at=None) for ref in op.writes]
    refs = [Ref(b.name) for b in once]
    ahead, after = replace(op, writes=tuple(refs)), replace(op, reads=(refs[0], *op.reads[1:]))
    ops = [*p.ops[:index], ahead, make_op("wait", refs[:1]), after, *p.ops[index + 1 : wait + 1], make_op("free", refs)]
    return with_buffers(with_ops(p, [*ops, *p.ops[wait + 1 :]]), *once)
