"""schedule_reductions: a gradient bucket is reduced when it is complete (stages 0, 2, 3) or at the backward's end (1).

A bucket that is reduced with each microbatch is so when it is complete, at stage 1 too: of the others a rank then keeps
its share alone. In a pipeline the backwards of microbatches end together, behind the last, and a role would hold the
gradients of all of them.

A sum over microbatches follows as soon as both of its terms are there. A reduction that starts when its bucket is
complete is waited for after the next segment. So one reduction is in flight beside the compute, and a full bucket
outlives its reduction by no more. The reductions at the end overlap one another. Without overlap each is waited for at
once.

    run bwd1; run bwd0; reduce g1; wait; reduce g0; wait
    becomes   run bwd1; reduce g1; run bwd0; wait g1; reduce g0; ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection
from itertools import pairwise

from fzero.ir import rewrite
from fzero.ir.op import Op
from fzero.ir.program import Program


def schedule_reductions(program: Program, overlap: bool = True) -> Program:
    """The program with each gradient bucket reduced as its `reduce_when` says; with `overlap`, beside compute."""
    ops = _sums_early(list(program.ops))
    arrived = {op.target for op in ops if op.transfers}
    at_once = _at_once(program, arrived)
    pairs: dict[str, tuple[Op, Op]] = {}
    rest: list[Op] = []
    waits = {op.reads[0].name: op for op in ops if op.is_wait}
    for op in ops:
        if _reduced_bucket(program, op) in at_once and op.reads[0].name not in arrived:
            pairs[op.writes[0].name] = (op, waits[op.writes[0].name])
        elif not (op.is_wait and op.reads[0].name in pairs):
            rest.append(op)
    rest = _placed(rest, list(pairs.values()), overlap)
    if overlap:
        rest = _staggered(program, rest, at_once)
    return rewrite.finish(program, "schedule_reductions", ops=_sums_early(rest))


def _at_once(program: Program, arrived: set[str]) -> set[str]:
    """The buckets whose gradients are reduced as soon as they are complete. arrived: what reductions bring, of which
    the sum over a further axis is no reduction of another microbatch."""
    first = (op for op in program.ops if not arrived & {ref.name for ref in op.reads})
    often = Counter(_reduced_bucket(program, op) for op in first)
    return {name for name, bucket in program.buckets.items() if bucket.reduce_when == "produced" or often[name] > 1}


def _reduced_bucket(program: Program, op: Op) -> str | None:
    """The bucket of gradients that an op reduces; None for any other op."""
    if not (op.reduces or op.exchanges) or op.row.small:
        return None
    bucket = program.buffers[op.reads[0].name].bucket
    return bucket if bucket in program.buckets else None


def _placed(ops: list[Op], pairs: list[tuple[Op, Op]], overlap: bool) -> list[Op]:
    """The ops with each reduction behind the last write to its bucket, and its wait behind the next segment."""
    reads, writes = rewrite.reads_of(ops), rewrite.writes_of(ops)
    segments = [i for i, op in enumerate(ops) if op.in_region]
    edits = rewrite.Edits()
    for start, wait in pairs:
        complete = writes[start.reads[0].name][-1][0]
        needed = min((i for i, _ in reads.get(start.writes[0].name, ())), default=len(ops))
        following = bisect_right(segments, complete)
        beside = overlap and following < len(segments) and segments[following] < needed
        edits.after[complete][:0] = [start] if beside else [start, wait]
        if beside:
            edits.after[segments[following]].insert(0, wait)
    return edits.spliced(ops)


def _staggered(program: Program, ops: list[Op], at_once: Collection[str]) -> list[Op]:
    """The ops with each of several consecutive reductions waited for after the next has started."""
    result: list[Op] = []
    index = 0
    while index < len(ops):
        chain: list[tuple[Op, Op]] = []
        while index + 1 < len(ops) and _end_pair(program, ops[index], ops[index + 1], at_once):
            if chain and ops[index].reads[0].name == chain[-1][0].target:
                break  # the sum over a further axis, of what the one before brings
            chain.append((ops[index], ops[index + 1]))
            index += 2
        if chain:
            result.append(chain[0][0])
            for (_, wait), (start, _) in pairwise(chain):
                result += [start, wait]
            result.append(chain[-1][1])
        else:
            result.append(ops[index])
            index += 1
    return result


def _end_pair(program: Program, op: Op, after: Op, at_once: Collection[str]) -> bool:
    bucket = _reduced_bucket(program, op)
    return bucket is not None and bucket not in at_once and after.is_wait and after.reads[0].name == op.writes[0].name


def _sums_early(ops: list[Op]) -> list[Op]:
    """Moves each sum over microbatches right behind the last op that it needs."""
    places: list[tuple[int, ...]] = []  # of each op, in an order in which there is always room behind one
    last: dict[str, tuple[int, ...]] = {}  # place of the last op that touches a buffer
    for index, op in enumerate(ops):
        names = {ref.name for ref in (*op.reads, *op.writes)}
        place: tuple[int, ...] = (index,)
        if op.is_run and op.is_flat and op.phase is None:
            place = (*max((last[name] for name in names if name in last), default=(-1,)), -index)
        places.append(place)
        last.update({name: max(place, last.get(name, place)) for name in names})
    return [ops[i] for i in sorted(range(len(ops)), key=places.__getitem__)]
