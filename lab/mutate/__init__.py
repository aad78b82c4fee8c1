"""mutate: breaks real programs at random and counts what verify catches.

`corpus` draws unbroken programs, `kinds` breaks them, `oracle` runs the result to see whether it means something else.
Every mutant that does must be refused by `fzero.verify`, under a budget of the unbroken program's own peak, and no
unbroken program may be.

    python -m lab.mutate --count 1000 --seed 0
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fzero.cost.memory import account
from fzero.errors import VerifyError
from fzero.ir.program import Program
from fzero.verify.rules import verify
from lab.mutate.corpus import (
    Case,
    draw,
    draw_coded,
    draw_hierarchy,
    draw_kept,
    draw_offloaded,
    draw_parallel,
    draw_pipeline,
    draw_windowed,
)
from lab.mutate.edits import Mutation
from lab.mutate.kinds import ANY, AXES, CODED, HIERARCHY, KEPT, KINDS, MOVES, ROLES, WINDOWS
from lab.mutate.oracle import Outcome, difference, executed, outcome

__all__ = [
    "ANY", "AXES", "CODED", "HIERARCHY", "KEPT", "KINDS", "MOVES", "PARTS", "ROLES", "WINDOWS", "Bench", "Case",
    "Mutant", "Part", "Report", "draw", "draw_coded", "draw_hierarchy", "draw_kept", "draw_offloaded", "draw_parallel",
    "draw_pipeline", "draw_windowed", "run",
]  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Kinds of mutant that only some programs have, who draws such programs, and what they are called."""

    kinds: Mapping[str, Mutation]
    draw: Callable[[random.Random, int], Case]
    of: str


PARTS = {
    "roles": Part(ROLES, draw_pipeline, "pipelines"),
    "moves": Part(MOVES, draw_offloaded, "offloaded states"),
    "hierarchy": Part(HIERARCHY, draw_hierarchy, "two data axes"),
    "axes": Part(AXES, draw_parallel, "meshes with tp"),
    "coded": Part(CODED, draw_coded, "messages of blocks"),
    "kept": Part(KEPT, draw_kept, "copies of parameters"),
    "windows": Part(WINDOWS, draw_windowed, "block-sparse attention and losses by chunks"),
}


@dataclass(frozen=True)
class Mutant:
    """A broken program of a case, the change in meaning (None: no change), and verify's message (None: not refused)."""

    kind: str
    case: Case
    programs: Mapping[int, Program]
    changes: str | None
    refused: str | None


class Bench:
    """A case to break: its outcome, its budget, and the mutants made so far, so that none is made twice."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.budget = max(account(p).peak for p in case.programs.values())
        self.refused = self.refusal(case.programs)
        self.sound: Outcome = outcome(case, case.programs)
        self.ran: Outcome = executed(case, case.programs)
        self.seen = {self._key(case.programs)}

    def mutants(self, kind: str, rng: random.Random, tries: int = 1) -> Iterator[Mutant]:
        """The mutants of so many tries of one kind. A try that finds no place, or gives a known program, gives none."""
        for _ in range(tries):
            programs = KINDS[kind](rng, self.case.programs)
            if programs is None or self._key(programs) in self.seen:
                continue
            self.seen.add(self._key(programs))
            changes = difference(self.sound, outcome(self.case, programs))
            if changes is None and self.placed:
                changes = difference(self.ran, executed(self.case, programs))
            try:
                refused = self.refusal(programs)
            except Exception as error:  # a rule that breaks down says nothing to the user: a miss
                changes, refused = f"verify failed with {error!r}", None
            yield Mutant(kind, self.case, programs, changes, refused)

    def refusal(self, programs: Mapping[int, Program]) -> str | None:
        """Returns verify's message for these programs, under the case's own planned peak; None if it accepts them."""
        try:
            verify(programs, budget_bytes=self.budget)
        except VerifyError as error:
            if error.__cause__ is not None:
                raise error.__cause__ from None
            return str(error)
        return None

    @property
    def placed(self) -> bool:
        """Whether the executor can run the case: a program written by hand has no places for its batch."""
        return self.ran.error is None

    def _key(self, programs: Mapping[int, Program]) -> tuple[str, ...]:
        return tuple(programs[rank].digest for rank in sorted(programs))


@dataclass
class Report:
    """The counts of `run`. By kind: the mutants made, those that change meaning, and those of them that were caught.
    `add` writes it."""

    mutants: Counter[str] = field(default_factory=Counter)
    changing: Counter[str] = field(default_factory=Counter)
    caught: Counter[str] = field(default_factory=Counter)
    unbroken: int = 0
    refused: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def add(self, mutant: Mutant) -> None:
        """Counts one mutant."""
        self.mutants[mutant.kind] += 1
        if mutant.changes is not None:
            self.changing[mutant.kind] += 1
            self.caught[mutant.kind] += mutant.refused is not None
            if mutant.refused is None:
                self.missed.append(f"{mutant.kind} of {mutant.case.name}: {mutant.changes}")

    @property
    def progress(self) -> str:
        """The counts so far in one line."""
        changing, caught = sum(self.changing.values()), sum(self.caught.values())
        counts = f"{self.unbroken} programs, {len(self.refused)} refused; {sum(self.mutants.values())} mutants"
        return f"{counts}, {changing} change meaning, {caught} caught"

    @property
    def good(self) -> bool:
        """Whether no unbroken program was refused and no mutant missed."""
        return not self.refused and not self.missed

    def __str__(self) -> str:
        columns = (self.mutants, self.changing, self.caught)
        rows = [(kind, [column[kind] for column in columns]) for kind in KINDS if self.mutants[kind]]
        rows.append(("all", [sum(column.values()) for column in columns]))
        lines = [f"{'kind':32} {'made':>6} {'meaning-changing':>17} {'caught':>7}"]
        lines += [f"{kind:32} {mutants:6} {changing:17} {caught:7}" for kind, (mutants, changing, caught) in rows]
        lines.append(f"unbroken programs: {self.unbroken}, refused: {len(self.refused)}")
        return "\n".join([*lines, *(f"refused: {x}" for x in self.refused), *(f"missed: {x}" for x in self.missed)])


def run(
    count: int = 1000,
    seed: int = 0,
    *,
    each: int = 50,
    unbroken: int = 240,
    kinds: Sequence[str] = tuple(ANY),
    source: Callable[[random.Random, int], Case] = draw,
    after_program: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Draws programs and breaks each in every way, until `count` mutants change meaning, `each` of every kind, and
    `unbroken` programs were seen. A kind that lags behind gets more tries; one that has `each` gets none after `count`.
    Gives `after_program` the counts so far. `source` must draw programs that have places for each of `kinds`: those of
    `PARTS` go with the programs of their part."""
    rng, report = random.Random(seed), Report()

    def wanted(kind: str) -> bool:
        return report.changing[kind] < each or sum(report.changing.values()) < count

    while report.unbroken < unbroken or any(map(wanted, kinds)):
        report.unbroken += 1
        try:
            bench = Bench(source(rng, report.unbroken))
        except VerifyError as error:  # from lowering
            report.refused.append(f"program {report.unbroken}: {error}")
            continue
        if bench.refused is not None:
            report.refused.append(f"{bench.case.name}: {bench.refused}")
        for kind in filter(wanted, kinds):
            behind = report.changing[kind] * unbroken < each * report.unbroken
            for mutant in bench.mutants(kind, rng, tries=6 if behind else 1):
                report.add(mutant)
        after_program(report)
    return report
