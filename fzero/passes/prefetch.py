"""prefetch: a gather starts some segments before it is needed, within a byte cap.

Each gather of a parameter moves up past `depth` segments (never past an update of what it reads), as long as the
gathered buffers alive at any moment stay under the cap; the wait stays at the first use. "One block ahead" is depth
1. The cap is the program's `gather_cap_bytes`, checked by verify: given, or what this depth needs. With no cap
given, the smallest cap is that of depth 0.

    run seg0; gather p1; wait p1; run seg1      becomes      gather p1; run seg0; wait p1; run seg1
"""

from __future__ import annotations

from dataclasses import replace

from fzero.errors import SpecError
from fzero.passes import rewrite
from fzero.program import Op, Program


def prefetch(program: Program, depth: int = 1, cap: int | None = None) -> Program:
    ops = list(program.ops)
    least = max(gathered_bytes(program, ops), default=0)
    if cap is not None and least > cap:
        at = max(range(len(ops)), key=gathered_bytes(program, ops).__getitem__)
        raise SpecError(
            f"gather_bytes={cap} is less than one segment needs: op {at} ({ops[at].why}) has {least} bytes gathered at "
            f"once. The smallest cap is {least}"
        )
    for name in [one.writes[0].name for one in ops if one.kind == "gather" and _parameter(program, one)]:
        ops = _earlier(program, ops, name, depth, cap)
    peak = max(gathered_bytes(program, ops), default=0)
    done = rewrite.finish(program, "prefetch", ops=ops)
    return replace(done, gather_cap_bytes=cap if cap is not None else peak)


def _parameter(program: Program, one: Op) -> bool:
    return program.buffers[one.writes[0].name].kind == "gather"


def _earlier(program: Program, ops: list[Op], name: str, depth: int, cap: int | None) -> list[Op]:
    at = next(i for i, one in enumerate(ops) if one.kind == "gather" and one.writes[0].name == name)
    source = ops[at].reads[0].name
    best, passed = ops, 0
    for target in range(at - 1, -1, -1):
        if passed >= depth or any(ref.name == source for ref in ops[target].writes):
            break
        if ops[target].kind not in ("run", "update"):
            continue
        passed += 1
        moved = [*ops[:target], ops[at], *ops[target:at], *ops[at + 1 :]]
        if cap is not None and max(gathered_bytes(program, moved)) > cap:
            break
        best = moved
    return best


def gathered_bytes(program: Program, ops: list[Op]) -> list[int]:
    """Bytes of gathered parameters alive at each op: from the gather's start to the last use (or the free)."""
    last: dict[str, int] = {}
    for index, one in enumerate(ops):
        for ref in (*one.reads, *one.writes):
            if ref.name in program.buffers and program.buffers[ref.name].kind == "gather":
                last[ref.name] = index
    live: set[str] = set()
    levels = []
    for index, one in enumerate(ops):
        live |= {r.name for r in one.writes if r.name in last}
        levels.append(sum(program.buffers[n].nbytes for n in live))
        live -= {n for n in live if last[n] <= index}
    return levels
