"""nothing_fits: what the least is, and the nearest that would fit: each lowered and verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fzero import backend
from fzero.errors import SpecError
from fzero.hardware import load, presets
from fzero.lowering.chunk_loss import chunks_for
from fzero.planner.candidates import Candidate
from fzero.planner.estimates import Sketch
from fzero.planner.planned import Row, size
from fzero.planner.problem import Problem
from fzero.planner.search import Search, search
from fzero.planner.sketch import sketched

TRIED = 4  # candidates that are lowered for one way out
DOUBLED = 5  # times that ranks, or halved rows, are tried


@dataclass(frozen=True)
class Alternative:
    """A way out. words: what to change. row: the candidate that fits then, as it was lowered."""

    words: str
    row: Row

    def __str__(self) -> str:
        return f"{self.words} ({size(self.row.peak)}, {self.row.seconds:.4g} s: {self.row.candidate})"


class NothingFitsError(SpecError):
    """Nothing fits. least: the row that is least over the budget; None if no candidate could be lowered.
    alternatives: the nearest that fit."""

    def __init__(self, text: str, least: Row | None, alternatives: tuple[Alternative, ...] = ()) -> None:
        super().__init__(text)
        self.least, self.alternatives = least, alternatives


def nothing_fits(problem: Problem, sketch: Sketch, found: Search) -> NothingFitsError:
    """The error for a problem of which no candidate fits."""
    machine = problem.machine
    ranks = f"{problem.world_size} rank{'s' * (problem.world_size > 1)}"
    head = f"nothing fits {ranks} with {size(problem.budget)} each ({machine.name})"
    whole = [row for row in found.rows.values() if not row.refused]
    if not whole:
        first = next(iter(found.rows.values()))
        return NothingFitsError(f"no candidate for {ranks} could be lowered. The first said: {first.refused}", None)
    nearest = sorted(whole, key=lambda row: (_over(row, problem), row.peak))[:TRIED]
    least = min((found.tightest(row.candidate) for row in nearest), key=lambda row: (_over(row, problem), row.peak))
    beside = f" and {size(least.host)} of the host" if least.host > machine.host_budget else ""
    beside += ", but its file has no [host]" if beside and machine.host is None else ""
    ways = (*_by_chunks(problem, sketch, found), *alternatives(problem, sketch, least))
    shown = "".join(f"\n  {way}" for way in ways) or "\n  none was found: cut the model, or its sequences"
    text = (
        f"{head}. The least that was found is {size(least.peak)} ({least.peak:,} bytes){beside}: "
        f"{least.candidate}. The nearest that fit:{shown}"
    )
    return NothingFitsError(text, least, ways)


def _over(row: Row, problem: Problem) -> int:
    return max(row.peak - problem.budget, 0) + max(row.host - problem.machine.host_budget, 0)


def alternatives(problem: Problem, sketch: Sketch, least: Row | None = None) -> Iterator[Alternative]:
    """One for each way out that leads to something that fits: pinned fields left open, more ranks, fewer rows, more of
    this card's memory than `memory=` has, other cards. least: the row that needs the least memory."""
    for name in [name for name in Candidate.__dataclass_fields__ if name in problem.given and name != "pipeline"]:
        opened = replace(problem, given=problem.given - {name})
        if row := _first(opened, sketched(opened) if name == "remat" else sketch):
            yield Alternative(f"leave {name} open", row)
    if "mesh" not in problem.given:
        for n in (problem.world_size << i for i in range(1, DOUBLED)):
            if n <= problem.machine.devices and problem.rows % n == 0 and (row := _first(_on(problem, n), sketch)):
                yield Alternative(f"{n} ranks", row)
                break
    for rows in (problem.rows >> i for i in range(1, DOUBLED)):
        if rows and problem.rows % rows == 0 and (row := _first(replace(problem, rows=rows), sketch)):
            yield Alternative(f"a global batch of {rows} rows", row)
            break
    if least is not None and _is_argument(problem) and least.fits(problem.hardware.budget, problem.machine.host_budget):
        yield Alternative(f"memory={least.peak}", least)
        return
    yield from _more_memory(problem, sketch)


def _is_argument(problem: Problem) -> bool:
    """Whether the budget is that of `fzero.plan(memory=)`, not the spec's and not the card's."""
    return problem.budget not in (problem.spec.device_bytes, problem.hardware.budget)


def _by_chunks(problem: Problem, sketch: Sketch, found: Search) -> Iterator[Alternative]:
    """The loss by chunks of the sequence, where it is of logits."""
    graph = next((lowered.graph for lowered in found.programs.values()), None)
    if graph is None or problem.spec.loss is None or problem.spec.loss_chunks is not None:
        return
    chunks, nbytes = chunks_for(graph)
    chunked = replace(problem, spec=replace(problem.spec, loss_chunks=chunks))
    if nbytes and (row := _first(chunked, sketch, hopes=True)):  # the sketch is of all logits at once
        yield Alternative(f"loss_chunks={chunks}", row)


def _on(problem: Problem, world_size: int) -> Problem:
    return replace(problem, world_size=world_size)


def _more_memory(problem: Problem, sketch: Sketch) -> Iterator[Alternative]:
    """All the memory of this card, where `device_bytes` leaves some, or the card of the presets with the least memory
    on which it fits."""
    cards = [machine for machine in map(load, presets()) if not backend.of(machine.type).on_host]
    machines = sorted(cards, key=lambda machine: machine.budget)
    pinned = problem.spec.device_bytes == problem.budget
    opened = replace(problem, spec=replace(problem.spec, device_bytes=None))
    for machine in [problem.hardware] * pinned + machines:
        larger = machine.budget > problem.budget and machine.devices >= problem.world_size
        if larger and (row := _first(replace(opened, hardware=machine, budget=machine.budget), sketch)):
            words = ["leave device_bytes open"] * pinned + [machine.name] * (machine is not problem.hardware)
            yield Alternative(", ".join(words), row)
            return


def _first(problem: Problem, sketch: Sketch, *, hopes: bool = False) -> Row | None:
    """The fastest that fits, of a few. hopes: as in `search`."""
    fitting = search(problem, sketch, TRIED, hopes=hopes).fitting
    return min(fitting, key=lambda row: row.seconds, default=None)
