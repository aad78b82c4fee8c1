"""kept_plans: answers of `fzero.plan`, kept on this machine (`fzero.compile.kept_lowerings`): the same question has its
answer without a search.

The question is the captured step, what else the Spec says, the world, the machine and the budget. The answer is what
was chosen, with its figures, reasons and table. Its programs are lowered, and verified, when they are asked for.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fzero.compile.ahead import graph_of
from fzero.compile.kept_lowerings import NOTHING, SWITCH, Kept
from fzero.compile.lowered import Lowered
from fzero.compile.resolve import mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.errors import FzeroError
from fzero.ir.decisions import Choice
from fzero.planner.candidates import Candidate, default, fixed
from fzero.planner.chosen import rules_as_data, rules_of
from fzero.planner.planned import Planned, Row
from fzero.planner.problem import Problem
from fzero.planner.programs import lowered_of, step_seconds
from fzero.spec import Spec

log = logging.getLogger("fzero")
IN_THE_GRAPH = {"loss", "optimizer", "step"}  # fields whose functions a captured step shows
NEAR = 1e-6  # of the seconds


@dataclass(frozen=True)
class Answer:
    """What is kept of a plan. fields: of its Spec. rules: of `shard`, as data. choices: of `Planned`, but for values
    that the Spec has."""

    fields: Mapping[str, Any]
    rules: Mapping[str, Any]
    seconds: float
    peak: int
    choices: Mapping[str, Choice[Any]]
    table: tuple[Row, ...]


def answered(problem: Problem, most: int | None, make: Callable[[], Planned]) -> Planned:
    """The answer that was kept for a problem, else the one that is made. most: as in `fzero.plan`."""
    place, made = _place(problem, most), list[Planned]()

    def answer() -> Answer:
        made.append(make())
        return _answer(made[0])

    for _ in range(2):
        found = place.of(answer)
        if made:
            return made[0]
        try:
            return _planned(found, problem, place)
        except (FzeroError, AttributeError, TypeError) as error:
            log.debug("fzero: a kept plan is not read: %s", error)
            place.forget()
    return make()


def _place(problem: Problem, most: int | None) -> Kept:
    """Where the answer is kept: nowhere if the step cannot be captured, for then there is none."""
    if os.environ.get(SWITCH) == "0":
        return NOTHING
    of, one = problem.spec, default(problem.spec, problem.world_size)
    rows = max(problem.rows // one.ranks.data_ranks // one.microbatches, 1) * one.microbatches
    try:
        spec, batch = one.spec(of, problem.rules.shard), problem.batch_of(rows)
        graph = graph_of(spec, problem.params_like, batch, world_size=problem.world_size, captures=problem.captures)
        own = recipe_for(spec, problem.params_like, None, torch.device("cpu")).per_rank  # the graph does not show them
    except Exception as error:  # of the user's functions, too: planning says what is wrong
        log.debug("fzero: no plan is kept: %s", error)
        return NOTHING
    said = [[f.name, getattr(of, f.name)] for f in fields(Spec) if f.init and f.name not in IN_THE_GRAPH]
    world = problem.world_size, problem.rows, problem.hardware, problem.budget
    return Kept("plan").of_step(graph, said, sorted(problem.given), sorted(own), world, most, lines=False)


def _answer(found: Planned) -> Answer:
    names = {f.name for f in fields(Candidate)} | found.choices.keys() - {"shard"}
    choices = {name: replace(one, value=None) for name, one in found.choices.items()}
    values = {name: getattr(found.spec, name) for name in sorted(names)}
    return Answer(values, rules_as_data(found.spec.shard or {}), found.seconds, found.peak, choices, found.table)


def _planned(found: Answer, problem: Problem, place: Kept) -> Planned:
    spec = replace(problem.spec, shard=rules_of(found.rules) or problem.spec.shard, **found.fields)
    choices = {name: replace(one, value=getattr(spec, name)) for name, one in found.choices.items()}
    table = tuple(replace(row, candidate=_hashable(row.candidate)) for row in found.table)

    def programs() -> Lowered:
        try:
            lowered = lowered_of(problem, spec, mesh_of(spec, problem.world_size))
        except FzeroError:
            place.forget()
            raise
        seconds = step_seconds(lowered, problem.machine)
        if lowered.memory.peak != found.peak or not math.isclose(seconds, found.seconds, rel_tol=NEAR):
            log.warning("fzero: a plan that was kept is of another step. It is removed: plan again")
            place.forget()
        return lowered

    return Planned(
        spec, found.seconds, found.peak, choices, table, problem.machine, problem.budget, problem.world_size, programs
    )


def _hashable(one: Candidate) -> Candidate:
    return replace(one, zero=fixed(one.zero), remat=fixed(one.remat), offload=fixed(one.offload))
