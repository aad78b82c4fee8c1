"""budgets: the last passes under `Spec(device_bytes=, host_bytes=)`, with less brought ahead where these ask for it.

A program that fits is taken as it is. Else nothing is brought before it is needed, then tiles get smaller. What then
does not fit is refused, with the op at the peak and the least that works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fzero.cost.memory import MemoryAccount, account
from fzero.errors import SpecError
from fzero.ir.program import Program
from fzero.ir.records import DEVICE, HOST
from fzero.passes import FROM_PREFETCH, Options, PassRecord, optimise

SMALL_TILE = 1 << 20  # bytes: below, the fixed costs of a move show
Result = tuple[Program, Options, tuple[PassRecord, ...]]


def fitted(program: Program, options: Options, device_bytes: int | None, host_bytes: int | None) -> Result:
    """(the program after the last passes, their options, their records), under these budgets.

    Raises SpecError where no way of running it fits.
    """
    limits = {space: most for space, most in ((DEVICE, device_bytes), (HOST, host_bytes)) if most is not None}
    tried: list[tuple[Program, MemoryAccount]] = []
    for attempt in _attempts(options) if limits else [options]:
        done, records = optimise(program, attempt, FROM_PREFETCH)
        if not limits:
            return done, attempt, records
        memory = account(done)
        if all(memory.spaces[space] <= most for space, most in limits.items()):
            return done, attempt, records
        tried.append((done, memory))
    raise SpecError(_too_much(tried, limits))


def _attempts(options: Options) -> Iterator[Options]:
    """The options in the order in which they are tried: each needs less memory than the one before."""
    yield options
    if options.ahead > 1:
        yield replace(options, ahead=1)
    yield replace(options, ahead=0)
    yield replace(options, ahead=0, prefetch=0)
    yield replace(options, ahead=0, prefetch=0, tile_bytes=min(options.tile_bytes, SMALL_TILE))


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
