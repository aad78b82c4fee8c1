"""probes: a candidate at any depth and number of microbatches, from programs that are shallow and have few of both.

A program becomes a list of tokens: of each op its kind, what it does on the clock, the bytes that it sends and those
that it allocates. Of equal layers and microbatches these lists grow regularly (`fzero.planner.grow`), which a further
program confirms. The grown list has the full program's ops, bytes and seconds. Its memory is the fullest moment of the
list, times what the arena of the largest program that was lowered needs above its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from fzero.cost.memory import account
from fzero.cost.op_price import Event, priced
from fzero.cost.rates import Rates
from fzero.cost.step_time import StepTime, times_of
from fzero.ir.liveness import live_bytes
from fzero.ir.program import Program, moved_bytes, wire_bytes
from fzero.ir.records import DEVICE, HOST, PERSISTENT, Buffer
from fzero.planner.grow import Token, checked, growth

STARTS = (2, 4)  # layers on a role of the shallowest probe; more where more are gathered ahead than the first has
FIRST = 1  # the same of roles that gather no layers
FEW = 2  # microbatches of the probe that has the fewest, beyond one for each role of a pipeline
HELD, HELD_KINDS = "held between steps", ("param", "optimizer")
LEVELS: tuple[Callable[[Buffer], bool], ...] = (  # of bytes: all of the device, all of the host, the activations
    lambda b: b.space == DEVICE,
    lambda b: b.space == HOST,
    lambda b: b.space == DEVICE and b.kind == "activation",
)
Lists = Mapping[int, Sequence[Token]]


@dataclass(frozen=True)
class Foretold:
    """What a step is said to take. tokens: by role, of the program. over: by role, the bytes at the peak of the largest
    program that was lowered, over those of its own fullest moment."""

    tokens: Lists
    over: Mapping[int, float]
    rates: Rates = field(repr=False)

    @property
    def times(self) -> dict[int, StepTime]:
        """By role, as simulated together."""
        events = {role: list(map(_events, tokens[1:])) for role, tokens in self.tokens.items()}
        found, stuck = times_of(events, self.rates)
        return {} if stuck else found

    @property
    def seconds(self) -> float:
        """Of a step; infinite where the roles would wait for one another."""
        return max((time.seconds for time in self.times.values()), default=float("inf"))

    @property
    def peak(self) -> int:
        """Bytes of the device of the fullest rank."""
        return max(int(self.over[role] * _fullest(tokens, 0)) for role, tokens in self.tokens.items())

    @property
    def host(self) -> int:
        """Bytes of the host of the fullest rank."""
        return max(_fullest(tokens, 1) for tokens in self.tokens.values())

    @property
    def activations(self) -> int:
        """Bytes of the activations of the fullest rank, at their fullest moment."""
        return max(_fullest(tokens, 2) for tokens in self.tokens.values())

    def held(self, kind: str) -> int:
        """Bytes of a kind of `HELD_KINDS` on the first role."""
        return int(self.tokens[0][0].figures[len(LEVELS) + HELD_KINDS.index(kind)])

    @property
    def busy(self) -> tuple[float, float]:
        """Of the first role, with nothing beside anything: (seconds of the loss and its gradient, of the update)."""
        taken = {False: 0.0, True: 0.0}
        for token in self.tokens[0][1:]:
            taken[token.kind[0] == "update"] += sum(event.seconds for event in _events(token))
        return taken[False], taken[True]

    def ops(self, role: int = 0) -> dict[str, tuple[int, int]]:
        """By kind of op, how many there are, and the bytes that they send or move."""
        found: dict[str, tuple[int, int]] = {}
        for token in self.tokens[role][1:]:
            count, sent = found.get(token.kind[0], (0, 0))
            found[token.kind[0]] = count + 1, sent + int(token.figures[0])
        return found


def of_programs(programs: Mapping[int, Program], rates: Rates) -> Foretold:
    """What the programs of all roles take."""
    tokens = {role: tokens_of(program, rates) for role, program in programs.items()}
    peaks = {role: account(program).peak for role, program in programs.items()}
    return Foretold(tokens, {role: peaks[role] / max(_fullest(of, 0), 1) for role, of in tokens.items()}, rates)


def foretold(
    lower: Callable[[int, int], Mapping[int, Program]],
    depths: Sequence[int],
    microbatches: int,
    rates: Rates,
    *,
    checks: bool = True,
    gathers: bool = True,
) -> Foretold | None:
    """A step of so many layers on each role, and so many microbatches; None where programs do not grow regularly, or
    are not deep enough for this to save anything.

    lower: the programs by role, of a number of layers on each role, and of microbatches. checks: whether a further
    program must confirm what is foretold. gathers: whether roles gather their layers. Raises FzeroError as `lower`.
    """
    over: dict[int, float] = {}

    @cache
    def tokens(layers: int, parts: int) -> Lists:
        found = of_programs(lower(layers, parts), rates)
        over.update(found.over)
        return found.tokens

    least = FEW if len(depths) == 1 else len(depths) + FEW

    def all_microbatches(layers: int, checks: bool) -> Lists | None:
        if microbatches <= least + 2:
            return tokens(layers, microbatches)
        return _grown([tokens(layers, least + more) for more in range(2 + checks)], microbatches - least)

    starts = STARTS if gathers or len(depths) == 1 else (FIRST, *STARTS)
    for start in (start for start in starts if start + 2 < min(depths)):
        probes = [all_microbatches(start + more, checks and not more) for more in range(2 + checks)]
        found = [lists for lists in probes if lists is not None]
        if len(found) == len(probes) and (lists := _grown(found, *(depth - start for depth in depths))) is not None:
            return Foretold(lists, over, rates)
    return None


def _grown(probes: Sequence[Lists], *times: int) -> Lists | None:
    """Each role's list, so many times after that of the first probe. times: of each role, or of all. A third probe is
    foretold by two."""
    found = {}
    for role, first in probes[0].items():
        others = [probe[role] for probe in probes[1:]]
        how = checked(first, *others) if len(others) > 1 else growth(first, *others)
        if how is None:
            return None
        found[role] = how.grown(times[role % len(times)])
    return found


def tokens_of(program: Program, rates: Rates) -> list[Token]:
    """The tokens of a program: what it holds between steps, then one for each op."""
    held, levels = [], []
    for counted in LEVELS:
        held.append(sum(b.nbytes for b in program.buffers.values() if b.kind in PERSISTENT and counted(b)))
        level = live_bytes(program.ops, program.buffers, counted)
        levels.append([after - before for before, after in itertools.pairwise([held[-1], *level])])
    kinds = [sum(b.nbytes for b in program.buffers.values() if b.kind == kind) for kind in HELD_KINDS]
    found = [Token((HELD,), (*held, *kinds))]
    for op, events, device, host, kept in zip(program.ops, priced(program, rates), *levels, strict=True):
        kind = (op.kind, str(op.phase), tuple((e.does, e.lane, e.way) for e in events))
        here, need = program.space(op), op.workspace + op.heap
        sent = wire_bytes(program, op) + moved_bytes(program, op)
        needs = need * (here == DEVICE), need * (here == HOST)
        figures = (sent, device, needs[0], host, needs[1], kept, needs[0] * op.in_region)
        found.append(Token(kind, (*figures, *(x for e in events for x in (e.seconds, e.place, e.written)))))
    return found


def _events(token: Token) -> tuple[Event, ...]:
    figures = iter(token.figures[1 + 2 * len(LEVELS) :])
    return tuple(
        Event(does, lane, seconds, int(place), way, int(written))
        for (does, lane, way), seconds, place, written in zip(token.kind[2], figures, figures, figures, strict=True)
    )


def _fullest(tokens: Sequence[Token], number: int) -> int:
    """Bytes at the fullest moment, of one of `LEVELS`."""
    level = most = int(tokens[0].figures[number])
    for token in tokens[1:]:
        level += int(token.figures[1 + 2 * number])
        most = max(most, level + int(token.figures[2 + 2 * number]))
    return most
