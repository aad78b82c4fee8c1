"""coded: edits that only programs with messages of blocks have (`fzero.ir.code_ops`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from fzero.ir import segments
from fzero.ir.code_ops import OPS, CodeOps
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Ref
from lab.mutate.edits import (
    alike,
    alive,
    drop,
    find,
    insert,
    move,
    pick,
    put,
    replaced,
    touching,
    wait_of,
    with_buffers,
)

ENCODES, DECODES, SUMS = (
    {getattr(ops, name): ops for ops in OPS.values()} for name in ("encode", "decode", "decode_sum")
)


def _nodes(p: Program, op: Op, table: dict[Any, CodeOps]) -> list[fx.Node]:
    gm = p.segments.get(op.segment)
    return [] if gm is None else [node for node in gm.graph.nodes if node.target in table]


def _ops(p: Program, *tables: dict[Any, CodeOps]) -> list[int]:
    """The ops whose segment encodes, decodes or adds up messages."""
    return find(p, lambda op: op.computes and any(_nodes(p, op, table) for table in tables))


def _message(p: Program, ref: Ref) -> bool:
    return p.buffers[ref.name].per != 1


def changed(p: Program, index: int, change: Callable[[fx.Graph], bool]) -> Program | None:
    """The program with a change in the graph of an op's segment."""
    graph = segments.copied(p.segments[p.ops[index].segment].graph)
    if not change(graph):
        return None
    gm = segments.module(graph)
    key = segments.digest(gm)
    return replace(put(p, index, p.ops[index].with_attrs(segment=key)), segments={**p.segments, key: gm})


def _in_one(
    rng: random.Random, p: Program, table: dict[Any, CodeOps], change: Callable[[fx.Node], bool]
) -> Program | None:
    """The program with one such node of one op changed."""
    index = pick(rng, _ops(p, table))
    if index is None:
        return None
    return changed(p, index, lambda graph: change(rng.choice([n for n in graph.nodes if n.target in table])))


def another_codec(rng: random.Random, p: Program) -> Program | None:
    """Messages are read, or written, as those of another codec of as many bytes."""
    which = rng.choice(("encode", "decode", "decode_sum"))
    table = {"encode": ENCODES, "decode": DECODES, "decode_sum": SUMS}[which]

    def change(node: fx.Node) -> bool:
        own = table[node.target]
        others = [getattr(ops, which) for ops in OPS.values() if ops is not own and ops.per == own.per]
        if others:
            node.target = rng.choice(others)
        return bool(others)

    return _in_one(rng, p, table, change)


def another_divisor(rng: random.Random, p: Program) -> Program | None:
    """A sum of messages is divided by another number."""

    def change(node: fx.Node) -> bool:
        right = int(str(node.args[1]))
        node.update_arg(1, rng.choice([d for d in (1, right * 2, right + 1, p.world_size) if d != right]))
        return True

    return _in_one(rng, p, SUMS, change)


def another_message(rng: random.Random, p: Program) -> Program | None:
    """What decodes reads another message of the same form: another leaf's, another bucket's, another microbatch's."""
    places = [(i, n) for i in _ops(p, DECODES, SUMS) for n, ref in enumerate(p.ops[i].reads) if _message(p, ref)]
    place = pick(rng, places)
    if place is None:
        return None
    index, n = place
    other = pick(rng, [ref for ref in alike(p, p.ops[index].reads[n]) if alive(p, ref.name, index)])
    return None if other is None else put(p, index, replaced(p.ops[index], "reads", n, other))


def another_leaf(rng: random.Random, p: Program) -> Program | None:
    """The message of one leaf is made of another leaf."""
    index = pick(rng, [i for i in _ops(p, ENCODES) if len(p.ops[i].reads) > 1])
    if index is None:
        return None
    a, b = rng.sample(range(len(p.ops[index].reads)), 2)
    return put(p, index, replaced(p.ops[index], "reads", a, p.ops[index].reads[b]))


def messages_exchanged(rng: random.Random, p: Program) -> Program | None:
    """Two leaves' messages are written in each other's place."""
    index = pick(rng, [i for i in _ops(p, ENCODES) if len(p.ops[i].writes) > 1])
    if index is None:
        return None
    a, b = rng.sample(range(len(p.ops[index].writes)), 2)
    op = replaced(p.ops[index], "writes", a, p.ops[index].writes[b])
    return put(p, index, replaced(op, "writes", b, p.ops[index].writes[a]))


def _transfer(rng: random.Random, p: Program) -> int | None:
    return pick(rng, find(p, lambda op: op.is_collective and _message(p, op.reads[0])))


def never_sent(rng: random.Random, p: Program) -> Program | None:
    """A transfer of messages is left out, with its wait or without."""
    index = _transfer(rng, p)
    return None if index is None else drop(p, index, rng.choice((None, wait_of(p, index))))


def sent_over_another_axis(rng: random.Random, p: Program) -> Program | None:
    """Messages go over another axis, or over all data axes."""
    index = _transfer(rng, p)
    others = (
        [] if index is None else [a for a, _ in (*p.mesh, ("dp_out.dp", 0)) if a in p.mesh and a != p.ops[index].axis]
    )
    return put(p, index, replace(p.ops[index], axis=rng.choice(others))) if index is not None and others else None


def sent_in_another_way(rng: random.Random, p: Program) -> Program | None:
    """Messages are gathered for exchanged, or added up as numbers."""
    index = _transfer(rng, p)
    if index is None:
        return None
    kinds = ("all_gather", "all_gather_values", "all_to_all", "reduce_scatter", "all_reduce")
    others = [kind for kind in kinds if kind != p.ops[index].kind]
    return put(p, index, replace(p.ops[index], kind=rng.choice(others)))


def read_before_it_came(rng: random.Random, p: Program) -> Program | None:
    """What decodes a message runs before the wait for it, or before it was sent."""
    starts = {op.target: i for i, op in enumerate(p.ops) if op.is_collective and _message(p, op.reads[0])}
    late = [(i, ref.name) for i in _ops(p, DECODES, SUMS) for ref in p.ops[i].reads if ref.name in starts]
    place = pick(rng, late)
    if place is None:
        return None
    index, name = place
    return move(p, index, starts[name] + rng.choice((0, 1)))


def stale_codes(rng: random.Random, p: Program) -> Program | None:
    """Messages are made before what they are of has its last value, or are not made at all."""
    index = pick(rng, _ops(p, ENCODES))
    if index is None:
        return None
    names = {ref.name for ref in p.ops[index].reads}
    writes = [i for i in find(p, lambda op: names & {ref.name for ref in op.writes}) if i < index]
    if writes and rng.random() < 0.7:
        return move(p, index, writes[-1])
    return drop(p, index)


def sent_as_it_was(rng: random.Random, p: Program) -> Program | None:
    """The message that goes out is another one, of the same form."""
    index = _transfer(rng, p)
    if index is None:
        return None
    other = pick(rng, [ref for ref in alike(p, p.ops[index].reads[0]) if _message(p, ref) and touching(p, ref.name)])
    return None if other is None else put(p, index, replaced(p.ops[index], "reads", 0, Ref(other.name)))


def one_rank_more(rng: random.Random, p: Program) -> Program | None:
    """A buffer is said to hold the messages of other ranks than it does, or blocks of another size."""
    buffer = pick(rng, [b for b in p.buffers.values() if b.per != 1])
    if buffer is None:
        return None
    if rng.random() < 0.5:
        return with_buffers(p, replace(buffer, parts=rng.choice([n for n in (1, 2, 3, 4) if n != buffer.parts])))
    return with_buffers(p, replace(buffer, per=rng.choice([ops.per for ops in OPS.values() if ops.per != buffer.per])))


def coded_twice(rng: random.Random, p: Program) -> Program | None:
    """Gradients are encoded again after they were added up: what the sum was is rounded once more, or doubled."""
    index = pick(rng, [i for i in _ops(p, SUMS) if not p.ops[i].in_region])
    if index is None:
        return None
    later = [i for i in range(index + 1, len(p.ops)) if p.ops[i].reads]
    return insert(p, rng.choice(later), p.ops[index]) if later else None


def exact_instead(rng: random.Random, p: Program) -> Program | None:
    """What reads a leaf through its message reads it as it is: the node that decodes is gone."""
    return _in_one(rng, p, DECODES, lambda node: _bypassed(node))


def _bypassed(node: fx.Node) -> bool:
    other = next(
        (n for n in node.graph.nodes if n.op == "placeholder" and n.meta["val"].dtype == node.meta["val"].dtype), None
    )
    if other is None:
        return False
    node.replace_all_uses_with(other)
    return True


def own_part_alone(rng: random.Random, p: Program) -> Program | None:
    """Of all ranks' messages one rank's is added up: the sum is of this rank's own, as it was sent."""
    index = pick(rng, [i for i in _ops(p, SUMS) if len(p.ops[i].reads) == 1])
    if index is None:
        return None
    sources = {op.target: op.reads[0].name for op in p.ops if op.exchanges}
    ref = p.ops[index].reads[0]
    if ref.name not in sources:
        return None
    return put(p, index, replaced(p.ops[index], "reads", 0, replace(ref, name=sources[ref.name])))
