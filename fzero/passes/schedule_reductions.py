"""schedule_reductions: a gradient bucket is reduced when it is complete, beside compute.

A sum over microbatches follows as soon as both of its terms are there. Where reductions need no memory of the program
to receive into, nothing is waited for earlier on its account: the last of a microbatch are beside the forward of the
next. A reduction starts when its bucket is complete, and a sum over a further axis when what it sums has arrived. No
more than the gradients of a layer are in flight: before one starts that would be more, the first are waited for.
Without overlap each is waited for at once.

At stage 1 a rank has room for whole gradients until the end of the backward, and what arrives comes on top: no more
than a layer's of that is in flight, of N ranks their shares of N layers. What is reduced with each microbatch is so as
at stage 2: of the others a rank then keeps its share alone. In a pipeline the backwards of microbatches end together,
behind the last, and a role would hold the gradients of all of them.

In a pipeline what is slow on one role is slow on all, one after the other: compute beside a transfer, and more so a
wait. At stage 1 reductions start when the role has nothing else to do. At stages 2 and 3 the buckets of a chunk, which
are complete at about the same time, are waited for where the first of the next chunk starts.

Reductions that receive into buffers of the program take that memory where they start, in the backward, when there is
least. At stage 1 these start at the end, and overlap one another; else they are waited for behind the next segment.

    run bwd1; run bwd0; reduce g1; wait; reduce g0; wait
    becomes   run bwd1; reduce g1; run bwd0; wait g1; reduce g0; ...
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fzero.ir import rewrite
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.plan.pipeline_cut import layer_of


def schedule_reductions(program: Program, overlap: bool = True) -> Program:
    """The program with each gradient bucket reduced when it is complete and, with `overlap`, beside compute."""
    ops = _sums_early(list(program.ops))
    starts = [op for op in ops if _reduced_bucket(program, op) is not None]
    bucket_of = {op.target: _reduced_bucket(program, op) for op in starts}
    axis_of = {bucket_of[op.target]: op.axis for op in reversed(starts)}  # that of a bucket's first sum
    first = [op for op in starts if op.axis == axis_of[bucket_of[op.target]]]
    often = Counter(bucket_of[op.target] for op in first)
    at_end = {name for name, bucket in program.buckets.items() if bucket.reduce_when == "end" and often[name] <= 1}
    kept = {target for target, bucket in bucket_of.items() if bucket in at_end}
    piped = program.role is not None
    if not overlap or (piped and kept) or any(len(op.writes) > 1 for op in starts):
        ops = _soon(ops, [op for op in first if op.target not in kept], overlap)
        ops = _staggered(ops, kept) if overlap else ops
    else:
        once = {target for target, bucket in bucket_of.items() if piped and often[bucket] == 1}
        for some in (first, [op for op in starts if op.axis != axis_of[bucket_of[op.target]]]):
            ops = _sums_early(_beside(program, _sums_late(ops, some), some, once - kept, kept))
    return rewrite.finish(program, "schedule_reductions", ops=_sums_early(ops))


def _reduced_bucket(program: Program, op: Op) -> str | None:
    """The bucket of gradients that an op reduces; None for any other op."""
    if not (op.reduces or op.exchanges) or op.row.small:
        return None
    bucket = program.buffers[op.reads[0].name].bucket
    return bucket if bucket in program.buckets else None


@dataclass(frozen=True)
class _Reduction:
    """start, wait: its ops. complete: the op behind which its bucket is. chunk: of the last op of a region up to there,
    in a pipeline: a sum over microbatches has none. read: the first op that reads what it brings."""

    start: Op
    wait: Op
    complete: int
    chunk: int | None
    read: int


def _taken_out(ops: Sequence[Op], starts: Sequence[Op]) -> tuple[list[Op], list[_Reduction]]:
    """(the ops without these reductions and their waits, the reductions in their order)."""
    waits = {op.reads[0].name: op for op in ops if op.is_wait}
    taken = {id(op) for start in starts for op in (start, waits[start.target])}
    rest = [op for op in ops if id(op) not in taken]
    reads, last = rewrite.reads_of(rest), dict[str, int]()
    chunks: list[int | None] = [None]
    for index, op in enumerate(rest):
        chunks.append(chunks[-1] if op.chunk is None else op.chunk)
        last |= {ref.name: index for ref in (op.reads if op.is_wait else op.writes)}
    found = []
    for start in starts:
        complete = last[start.reads[0].name]
        read = min((i for i, _ in reads.get(start.target, ())), default=len(rest))
        found.append(_Reduction(start, waits[start.target], complete, chunks[complete + 1], read))
    return rest, found


def _soon(ops: list[Op], starts: Sequence[Op], overlap: bool) -> list[Op]:
    """The ops with each of these reductions where its bucket is complete, and its wait behind the next segment."""
    rest, found = _taken_out(ops, starts)
    segments = [i for i, op in enumerate(rest) if op.in_region]
    edits = rewrite.Edits()
    for one in found:
        following = bisect_right(segments, one.complete)
        beside = overlap and following < len(segments) and segments[following] < one.read
        edits.after[one.complete][:0] = [one.start] if beside else [one.start, one.wait]
        if beside:
            edits.after[segments[following]].insert(0, one.wait)
    return edits.spliced(rest)


def _staggered(ops: list[Op], targets: Collection[str]) -> list[Op]:
    """The ops with each of several consecutive reductions waited for after the next has started."""
    result: list[Op] = []
    index = 0
    while index < len(ops):
        chain: list[tuple[Op, Op]] = []
        while index + 1 < len(ops) and ops[index].transfers and ops[index].target in targets:
            if ops[index + 1].reads[0].name != ops[index].target or not ops[index + 1].is_wait:
                break
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


def _beside(
    program: Program, ops: list[Op], starts: Sequence[Op], by_chunk: Collection[str], kept: Collection[str]
) -> list[Op]:
    """The ops with each of these reductions where its bucket is complete, and its wait where another over its axis
    starts with which more than a layer would be in flight, but before what it brings is read. by_chunk: targets that
    are waited for where one of another chunk starts. kept: targets whose sources have room until all are complete."""
    rest, found = _taken_out(ops, starts)
    room, edits, waited = _most_of_a_layer(program), rewrite.Edits(), set[str]()
    in_flight = defaultdict[str | None, list[_Reduction]](list)
    for one in sorted(found, key=lambda one: one.complete):
        before = [other for other in in_flight[one.start.axis] if other.read > one.complete]
        due: list[_Reduction] = []
        if one.start.target in by_chunk:
            due = [other for other in before if other.chunk != one.chunk]
        else:
            sizes = [_added(program, other.start, kept) for other in (*before, one)]
            due = [other for n, other in enumerate(before) if sum(sizes[n:]) > room]
        in_flight[one.start.axis] = [other for other in (*before, one) if other not in due]
        waited |= {other.start.target for other in due}
        edits.after[one.complete] += [*(other.wait for other in due), one.start]
    for one in found:
        if one.start.target not in waited:
            edits.before[one.read].append(one.wait)
    return edits.spliced(rest)


def _added(program: Program, start: Op, kept: Collection[str]) -> int:
    """The elements that a reduction in flight adds to those that have room in any case."""
    return program.buffers[(start.writes if start.target in kept else start.reads)[0].name].numel


def _most_of_a_layer(program: Program) -> int:
    """The elements of the largest layer, by its numbered leaves; of the largest bucket where none are."""
    layers: Counter[str] = Counter()
    for bucket in program.buckets.values():
        for layer, numbered in {layer_of(slot.path) for slot in bucket.slots}:
            layers[layer] += bucket.length * numbered
    return max(layers.values(), default=0) or max((bucket.length for bucket in program.buckets.values()), default=0)


def _sums_late(ops: list[Op], starts: Sequence[Op]) -> list[Op]:
    """Moves each sum over microbatches of what these bring right before the first op that touches what it does."""
    return _sums_moved(ops[::-1], {op.target for op in starts})[::-1]


def _sums_early(ops: list[Op]) -> list[Op]:
    """Moves each sum over microbatches right behind the last op that touches what it does."""
    return _sums_moved(ops)


def _sums_moved(ops: list[Op], of: Collection[str] | None = None) -> list[Op]:
    """Moves sums over microbatches, all or of some buffers, right behind the last op that touches what they do."""
    places: list[tuple[int, ...]] = []  # of each op, in an order in which there is always room behind one
    last: dict[str, tuple[int, ...]] = {}  # place of the last op that touches a buffer
    for index, op in enumerate(ops):
        names = {ref.name for ref in (*op.reads, *op.writes)}
        place: tuple[int, ...] = (index,)
        if op.is_between and (of is None or not names.isdisjoint(of)):
            place = (*max((last[name] for name in names if name in last), default=(-1,)), -index)
        places.append(place)
        last.update({name: max(place, last.get(name, place)) for name in names})
    return [ops[i] for i in sorted(range(len(ops)), key=places.__getitem__)]
