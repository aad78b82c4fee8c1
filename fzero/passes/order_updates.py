"""order_updates: what follows the losses runs bucket by bucket.

`shard_update` writes the end of a step level by level: first this for every bucket, then that for every bucket. What
work on whole leaves needs (Muon's matrices, Adafactor's squares) would be whole for all buckets at once. So each new
leaf comes as early as it may, right behind what only it needs: one bucket is whole at a time. What brings
gradients to their places stays before all of it, in its order.

    gather f.a; gather f.b; run f.a -> o.a; run f.b -> o.b; run o.a -> a.new; run o.b -> b.new
    becomes   gather f.a; run f.a -> o.a; run o.a -> a.new; gather f.b; run f.b -> o.b; run o.b -> b.new
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from fzero.ir import rewrite
from fzero.ir.op import Op, StepPhase
from fzero.ir.program import Program
from fzero.ir.records import Ref
from fzero.passes.common.touched import Touched


def order_updates(program: Program) -> Program:
    """The program with the ops behind its last loss in an order in which little is whole at once."""
    first = 1 + max((i for i, op in enumerate(program.ops) if op.in_region), default=-1)
    head, tail = program.ops[:first], program.ops[first:]
    kept = {i: program.buffers[op.target].bucket for i, op in enumerate(tail) if op.is_update}
    kept_in = {tail[i].reads[0].name: tail[i].target for i, bucket in kept.items() if bucket}
    needs = _needs(tail, {op.target: op.reads[0].name for op in program.ops if op.gathers}, kept_in)
    ends = [*_arrivals(tail), *_ends(needs, kept)]
    order = _depth_first(ends, needs, {i for i, bucket in kept.items() if bucket})
    return rewrite.finish(program, "order_updates", ops=[*head, *(tail[i] for i in order)])


def _needs(ops: Sequence[Op], gathered: Mapping[str, str], kept_in: Mapping[str, str]) -> list[list[int]]:
    """Of each op, those it must come behind. A new leaf of a bucket counts as written where its old value lies: so it
    may be. What was gathered counts as read where it comes from: it may be gathered again.

    gathered: by buffer, where it comes from. kept_in: by buffer of new leaves, where they are kept.
    """
    touched, needs = Touched(), []
    for place, op in enumerate(ops):
        reads, writes = touched.by(op)
        reads += tuple(Ref(gathered[ref.name]) for ref in reads if ref.name in gathered)
        writes += tuple(replace(ref, name=kept_in[ref.name]) for ref in writes if ref.name in kept_in)
        needs.append(sorted(set(touched.before(reads, writes))))
        touched.note(reads, writes, place)
    return needs


def _arrivals(ops: Sequence[Op]) -> list[int]:
    """What brings results of the loss to where they belong, up to the first work on them; but no gather."""
    start = next((i for i, op in enumerate(ops) if op.phase is StepPhase.OUTER), len(ops))
    gathered = {op.target for op in ops[:start] if op.gathers}
    return [i for i in range(start) if ops[i].target not in gathered]


def _ends(needs: Sequence[Sequence[int]], kept: Mapping[int, str | None]) -> list[int]:
    """The ops that no other needs, in order; those that keep new leaves (by op: of which bucket) bucket by bucket,
    and those of none last."""
    needed = {i for before in needs for i in before}
    first: dict[str | None, int] = {None: len(needs)}
    for i, bucket in kept.items():
        first.setdefault(bucket, i)
    return sorted(
        (i for i in range(len(needs)) if i not in needed), key=lambda i: (first[kept[i]] if i in kept else i, i)
    )


def _depth_first(ends: Sequence[int], needs: Sequence[Sequence[int]], soon: Container[int]) -> list[int]:
    """Each end behind what it needs and was not done before; soon: those that come at once where all of that was."""
    missing = {i: len(needs[i]) for i in ends if i in soon}
    ends_of: dict[int, list[int]] = {}
    for end in missing:
        for i in needs[end]:
            ends_of.setdefault(i, []).append(end)
    done: dict[int, None] = {}
    stack = [*ends][::-1]
    while stack:
        before = [i for i in needs[stack[-1]] if i not in done]
        if before:
            stack += before[::-1]
        elif (own := stack.pop()) not in done:
            done[own] = None
            for end in ends_of.get(own, ()):
                missing[end] -= 1
                stack += [end] if missing[end] == 0 else []
    return list(done)
