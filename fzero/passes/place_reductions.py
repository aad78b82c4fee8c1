"""place_reductions: a gradient bucket is reduced when it is complete (stages 0, 2, 3) or at the backward's end (1).

A sum over microbatches follows as soon as both of its terms are there. A reduction that starts when its bucket is
complete is waited for after the next segment, so that one is in flight beside the compute and a full bucket never
outlives its reduction by more; those at the end overlap one another. Without overlap each is waited for at once.

    run bwd1; run bwd0; reduce g1; wait; reduce g0; wait
    becomes   run bwd1; reduce g1; run bwd0; wait g1; reduce g0; ...
"""

from __future__ import annotations

from itertools import pairwise

from fzero.passes import rewrite
from fzero.plan.layout import TABLE
from fzero.program import Op, Program


def place_reductions(program: Program, overlap: bool = True) -> Program:
    ops = _sums_early(list(program.ops))
    pairs: dict[str, tuple[Op, Op]] = {}
    rest: list[Op] = []
    waits = {one.reads[0].name: one for one in ops if one.kind == "wait"}
    for one in ops:
        if _movable(program, one):
            pairs[one.writes[0].name] = (one, waits[one.writes[0].name])
        elif not (one.kind == "wait" and one.reads[0].name in pairs):
            rest.append(one)
    for start, wait in pairs.values():
        rest = _placed(program, rest, start, wait, overlap)
    if overlap:
        rest = _staggered(program, rest)
    return rewrite.finish(program, "place_reductions", ops=_sums_early(rest))


def _movable(program: Program, one: Op) -> bool:
    if one.kind != "reduce" or one.get("mode") == "exchange":
        return False
    bucket = program.buckets[program.buffers[one.reads[0].name].bucket or ""]
    return TABLE[bucket.stage].reduce_when == "produced"


def _placed(program: Program, ops: list[Op], start: Op, wait: Op, overlap: bool) -> list[Op]:
    grad, result = start.reads[0].name, start.writes[0].name
    complete = max(i for i, one in enumerate(ops) if any(ref.name == grad for ref in one.writes))
    needed = next((i for i, one in enumerate(ops) if any(r.name == result for r in one.reads)), len(ops))
    runs = (i for i in range(complete + 1, needed) if ops[i].get("phase") == "region")
    done = next(runs, complete) if overlap else complete
    return [*ops[: complete + 1], start, *ops[complete + 1 : done + 1], wait, *ops[done + 1 :]]


def _staggered(program: Program, ops: list[Op]) -> list[Op]:
    """Of reductions one after another, each is waited for when the next has started."""
    result: list[Op] = []
    index = 0
    while index < len(ops):
        chain = []
        while index + 1 < len(ops) and _end_pair(program, ops[index], ops[index + 1]):
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


def _end_pair(program: Program, one: Op, after: Op) -> bool:
    whole = one.kind == "reduce" and one.get("mode") != "exchange" and not _movable(program, one)
    return whole and after.kind == "wait" and after.reads[0].name == one.writes[0].name


def _sums_early(ops: list[Op]) -> list[Op]:
    """Moves each sum over microbatches right behind the last op that it needs."""
    index = 0
    while index < len(ops):
        one = ops[index]
        if one.kind == "run" and one.get("flat") and one.get("phase") is None:
            names = {ref.name for ref in (*one.reads, *one.writes)}
            behind = max(
                (i for i in range(index) if _touches(ops[i], names)),
                default=-1,
            )
            if behind + 1 < index:
                ops = [*ops[: behind + 1], one, *ops[behind + 1 : index], *ops[index + 1 :]]
        index += 1
    return ops


def _touches(one: Op, names: set[str]) -> bool:
    written = {ref.name for ref in one.writes} | ({one.reads[0].name} if one.kind == "wait" else set())
    return bool(written & names) or bool({ref.name for ref in one.reads} & names)
