"""budgets: the last passes under `Spec(device_bytes=, host_bytes=)`, with less brought ahead where these ask for it.

A program that fits is taken as it is. Else no 16-bit copy of a parameter stays between steps (`compile.step` lowers the
step again), then less is fetched ahead, then nothing is brought before it is needed, then tiles get smaller. What then
does not fit is refused, with the op at the peak and the least that works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from fzero.compile.decide.by_cost import tile_bytes
from fzero.cost.memory import MemoryAccount, account
from fzero.errors import SpecError
from fzero.ir.decisions import BUDGET, Choice, RoleDecisions, RunnerUp
from fzero.ir.program import Program
from fzero.ir.records import DEVICE, HOST
from fzero.passes import FROM_PREFETCH, Options, PassRecord, optimise

SMALL_TILE = 1 << 20  # bytes: below, the fixed costs of a move show
MOST_TILES = 64  # of a bucket: more are ops that save next to nothing
Result = tuple[Program, RoleDecisions, tuple[PassRecord, ...]]


def fitted(
    program: Program,
    options: Options,
    device_bytes: int | None,
    host_bytes: int | None,
    attempts: Iterator[RoleDecisions],
) -> Result:
    """(the program after the last passes, what these read, their records), under these budgets: of the first attempt
    that fits. Without a budget that is the first.

    Raises SpecError where no way of running it fits.
    """
    limits = {space: most for space, most in ((DEVICE, device_bytes), (HOST, host_bytes)) if most is not None}
    tried: list[tuple[Program, MemoryAccount]] = []
    for decided in attempts:
        done, records = optimise(program, replace(options, decided=decided), FROM_PREFETCH)
        if not limits:
            return done, decided, records
        memory = account(done)
        if all(memory.spaces[space] <= most for space, most in limits.items()):
            return done, _explained(options.decided, decided, [one for _, one in tried], limits), records
        tried.append((done, memory))
    raise SpecError(_too_much(tried, limits))


def copies() -> tuple[Choice[bool], ...]:
    """Whether 16-bit copies of parameters stay between steps: what is tried under a budget of the device, in order."""
    given_up = Choice(False, "what was wanted does not fit with them", BUDGET, runner_up=RunnerUp(True))
    return Choice(True, "updates write them: no cast before a use"), given_up


def tighter(program: Program, decided: RoleDecisions) -> Iterator[RoleDecisions]:
    """What is tried under a budget, in order: each needs less memory than the one before."""
    yield decided
    if decided.fetch_ahead.value > 1:
        yield decided.but(fetch_ahead=1)
    yield decided.but(fetch_ahead=0)
    yield decided.but(fetch_ahead=0, prefetch=0)
    yield decided.but(fetch_ahead=0, prefetch=0, tile_bytes=min(decided.tile_bytes.value, small_tiles(program).value))


def small_tiles(program: Program) -> Choice[int]:
    """The smallest tiles that are tried."""
    return tile_bytes(program, SMALL_TILE, MOST_TILES)


def _explained(
    wanted: RoleDecisions, taken: RoleDecisions, tried: list[MemoryAccount], limits: dict[str, int]
) -> RoleDecisions:
    """What was taken; where a budget forced another value than was wanted, its entry says so."""
    forced: dict[str, Any] = {}
    if not tried:
        return taken
    space, most = next((s, n) for s, n in limits.items() if tried[0].spaces[s] > n)
    needed = tried[0].spaces[space]
    reason = f"Spec({space}_bytes={most}): what was wanted needs {needed:,} bytes of the {space} on a rank"
    for name in (entry.name for entry in fields(taken)):
        before, after = getattr(wanted, name), getattr(taken, name)
        if before.value != after.value:
            forced[name] = Choice(after.value, reason, BUDGET, runner_up=RunnerUp(before.value, needed), unit="bytes")
    return replace(taken, **forced)


def _too_much(tried: list[tuple[Program, MemoryAccount]], limits: dict[str, int]) -> str:
    """Which budget is too small, for which op, and the least that works."""
    least = min(tried, key=lambda one: [one[1].spaces[space] for space in limits])
    program, memory = least
    space, most = next((space, most) for space, most in limits.items() if memory.spaces[space] > most)
    op = memory.ops[space]
    where = f"op {op} ({program.ops[op].kind} | {program.ops[op].why})" if op >= 0 else "the state"
    name = f"{space}_bytes"
    more = {
        DEVICE: "Or offload more, as offload='optimizer+params', use microbatches=, remat='full' or more ranks",
        HOST: "Or keep more on 'nvme', or use more ranks",
    }[space]
    return (
        f"Spec({name}={most}): the step needs {memory.spaces[space]:,} bytes of the {space} on a rank, most of them at "
        f"{where}. The least that works is {name}={memory.spaces[space]}. {more}"
    )
