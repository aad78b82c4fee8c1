"""exposure: for which transfers a rank stands still, and for how long, at the rates of a machine."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from fzero.ir.program import Program, moved_bytes, wire_bytes

Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class InFlight:
    """A transfer of a program, from the op that starts it to its wait.

    op, wait: their numbers; a transfer without a wait ends with the program. nbytes: what one rank sends, or moves.
    computed: the ops that compute in between. exposed: seconds for which the rank stands still for it; None: not known.
    """

    op: int
    wait: int
    nbytes: int
    computed: int
    exposed: float | None


def in_flight(program: Program, spans: Spans | None = None) -> list[InFlight]:
    """The transfers of a program, in its order. spans: when each op began and ended, as `step_time.op_spans` says."""
    started: dict[str, deque[int]] = defaultdict(deque)
    before, found = [0], []
    ends: dict[int, int] = {}
    for index, op in enumerate(program.ops):
        before.append(before[-1] + op.computes)
        if op.transfers:
            started[op.target].append(index)
        elif op.is_wait and started[op.target]:
            ends[started[op.target].popleft()] = index
    for index, op in enumerate(program.ops):
        if op.transfers:
            wait = ends.get(index, len(program.ops) - 1)
            nbytes = wire_bytes(program, op) or moved_bytes(program, op)
            exposed = None if spans is None else spans[wait][1] - spans[wait][0] if index in ends else 0.0
            found.append(InFlight(index, wait, nbytes, before[wait] - before[index], exposed))
    return found


def most_exposed(transfers: list[InFlight], most: int = 20) -> list[InFlight]:
    """Those that a rank waits for longest; without seconds, the largest of those beside which nothing computes."""
    if all(t.exposed is None for t in transfers):
        bare = [t for t in transfers if not t.computed]
        return sorted(bare, key=lambda t: (-t.nbytes, t.op))[:most]
    waited = [t for t in transfers if t.exposed]
    return sorted(waited, key=lambda t: (-(t.exposed or 0.0), t.op))[:most]
