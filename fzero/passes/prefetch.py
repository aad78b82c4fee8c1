"""prefetch: a gather starts some segments before it is needed, within a byte cap.

Each gather of a parameter moves up past `depth` segments, but never past an update of its source. Sums over
microbatches are short, and no segments in this sense. The gathered buffers alive at any moment stay under the cap. The
wait stays at the first use. Depth 1 is "one block ahead". The cap is the program's `gather_cap_bytes`, which verify
checks. It is the caller's, or the bytes that this depth needs. The smallest possible cap is that of depth 0.

In a pipeline, what stays gathered until the end of the step is gathered at its start, unless the depth is 0: roles that
wait for their first microbatch have time, and later each role would wait in turn for the one before.

    run seg0; gather p1; wait p1; run seg1      becomes      gather p1; run seg0; wait p1; run seg1

What would be gathered anew within `depth` segments of its last use, as the weights of layers that share them, stays
instead: a gather that early would take the same memory.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import accumulate

from fzero.errors import SpecError
from fzero.ir import rewrite
from fzero.ir.liveness import gathered_bytes
from fzero.ir.op import Op
from fzero.ir.program import Level, Program


def prefetch(program: Program, depth: int = 1, cap: int | None = None, soft: int | None = None) -> Program:
    """The program with gathers of parameters up to `depth` segments earlier, under `cap` bytes gathered at once.

    soft: bytes up to which gathers start earlier; what one segment needs is gathered all the same.

    Raises SpecError where one segment alone needs more than `cap`.
    """
    ops = list(program.ops)
    levels = gathered_bytes(ops, program.buffers)
    least = max(levels, default=0)
    if cap is not None and least > cap:
        index = levels.index(least)
        raise SpecError(
            f"gather_bytes={cap} is less than one segment needs: op {index} ({ops[index].why}) has {least} bytes "
            f"gathered at once. The smallest cap is {least}"
        )
    if soft is not None:
        cap = max(soft, least) if cap is None else min(max(soft, least), cap)
    ops, levels = _kept_for_next(program, depth, cap, levels)
    for index in [i for i, op in enumerate(ops) if op.gathers and _parameter(program, op)]:
        room = None if cap is None else cap - _size(program, ops[index])
        once = depth > 0 and program.role is not None and _kept(program, ops[index])
        to = _first(program, ops, index, room, levels) if once else _earlier(ops, index, depth, room, levels)
        ops[to : index + 1] = [ops[index], *ops[to:index]]  # those after it stay where they are
        higher = [level + _size(program, ops[to]) for level in levels[to:index]]
        levels[to : index + 1] = [*higher[:1], *higher] or levels[index : index + 1]
    peak = max(gathered_bytes(ops, program.buffers), default=0)
    done = rewrite.finish(program, "prefetch", ops=ops, level=Level.CAPPED)
    return replace(done, gather_cap_bytes=cap if cap is not None else peak)


def _kept_for_next(program: Program, depth: int, cap: int | None, levels: list[int]) -> tuple[list[Op], list[int]]:
    """(The ops, with what was gathered at most `depth` segments before, in the same phase, kept instead of gathered
    anew; the bytes that are gathered at each.) No more than `cap` bytes are kept at once."""
    ops, edits, levels = program.ops, rewrite.Edits(), list(levels)
    reads, writes = rewrite.reads_of(ops), rewrite.writes_of(ops)
    passed = [0, *accumulate(map(_hides, ops))]
    waits = defaultdict[str, list[int]](list)
    for index, op in enumerate(ops):
        if op.is_wait:
            waits[op.target].append(index)
    newest: dict[Op, tuple[str, int]] = {}  # by a gather without its target: that, and where it is last read
    for index, op in enumerate(ops):
        uses = [i for i, _ in reads.get(op.target, ())] if op.gathers and _parameter(program, op) else []
        if not uses:
            continue
        same, size = replace(op, writes=(), why=""), _size(program, op)
        name, last = newest.get(same, ("", -1))
        if (
            name
            and passed[uses[0]] - passed[last + 1] <= depth
            and ops[last].phase == ops[uses[0]].phase
            and not any(last < i < index for ref in op.reads for i, _ in writes.get(ref.name, ()))
            and (cap is None or max(levels[last + 1 : index], default=0) + size <= cap)
        ):
            levels[last + 1 : index] = [level + size for level in levels[last + 1 : index]]
            edits.instead |= dict.fromkeys([index, *waits[op.target]], ())
            for i in uses:
                edits.rename[i][op.target] = name
        else:
            name = op.target
        newest[same] = name, uses[-1]
    dropped = edits.instead.keys()
    return edits.spliced(ops), [level for i, level in enumerate(levels) if i not in dropped]


def _hides(op: Op) -> bool:
    """Whether a gather may be hidden behind an op: a segment, but not what is short, as a sum over microbatches."""
    return op.computes and not op.is_between


def _parameter(program: Program, op: Op) -> bool:
    return program.buffers[op.writes[0].name].kind == "gathered"


def _kept(program: Program, gather: Op) -> bool:
    """Whether what it gathers stays until the end of the step."""
    return program.buckets[program.buffers[gather.target].bucket or ""].keeps_gathered


def _size(program: Program, gather: Op) -> int:
    return program.buffers[gather.writes[0].name].nbytes


def _earlier(ops: list[Op], index: int, depth: int, room: int | None, levels: list[int]) -> int:
    """Where the gather at `index` goes: past `depth` segments, as long as no more than `room` is gathered there."""
    source = ops[index].reads[0].name
    best, passed = index, 0
    for target in range(index - 1, -1, -1):
        full = room is not None and levels[target] > room
        if passed >= depth or full or any(ref.name == source for ref in ops[target].writes):
            break
        if _hides(ops[target]):
            best, passed = target, passed + 1
    return best


def _first(program: Program, ops: list[Op], index: int, room: int | None, levels: list[int]) -> int:
    """Where the gather at `index` goes: behind the one before it that stays, and what its source is from, as long as no
    more than `room` is gathered."""
    source = ops[index].reads[0].name
    for target in range(index - 1, -1, -1):
        op = ops[target]
        made = any(ref.name == source for ref in op.writes) or (op.is_wait and op.target == source)
        before = op.gathers and _parameter(program, op) and _kept(program, op)
        if made or before or (room is not None and levels[target] > room):
            return target + 1
    return 0
