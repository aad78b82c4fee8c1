"""deep: what the programs of a candidate take, without lowering all layers of a deep model of equal ones.

Where layers are equal, and many on each role, three shallow programs or a few foretell the whole one
(`fzero.planner.probes`). Where they are not, or do not foretell one another, the whole one is lowered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from fzero.compile.decide import Deciders
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.errors import FzeroError
from fzero.ir.mesh import Mesh
from fzero.ir.program import Program
from fzero.pipeline import Pipeline
from fzero.plan.pipeline_cut import Cut
from fzero.planner.probes import Foretold, foretold, of_programs
from fzero.planner.problem import Problem
from fzero.planner.programs import lowered_of
from fzero.planner.shallow import Layers, shallow
from fzero.spec import Spec

DEEP = 10  # layers on a role, from which on it is quicker to lower a few shallow programs


def is_deep(problem: Problem) -> bool:
    """Whether it saves time to lower shallow programs first."""
    return problem.equal is not None and problem.equal.depth >= DEEP


def shallow_say(problem: Problem, mesh: Mesh) -> bool:
    """Whether shallow programs may say what a candidate over a mesh takes."""
    return problem.equal is not None and problem.equal.depth // mesh.roles >= DEEP


def takes(problem: Problem, spec: Spec, mesh: Mesh, deciders: Deciders) -> Foretold:
    """What the programs of a spec take, roughly: shallow ones are not checked. Raises FzeroError as `lowered_of`."""
    if (found := probed(problem, spec, mesh, deciders, checks=False)) is not None:
        return found
    return of_programs(lowered_of(problem, spec, mesh, deciders).programs, problem.machine.rates(mesh))


def probed(problem: Problem, spec: Spec, mesh: Mesh, deciders: Deciders, *, checks: bool = True) -> Foretold | None:
    """The same by shallow programs alone; None where these do not say it."""
    layers, own = problem.equal, problem.rows // mesh.data_ranks // spec.microbatches
    if layers is None or problem.rows % (mesh.data_ranks * spec.microbatches):
        return None
    order = spec.parallel.order

    def programs(depth: int, microbatches: int) -> Mapping[int, Program]:
        few = shallow(problem, layers, depth * mesh.roles)
        there = replace(spec, loss=few.spec.loss, microbatches=microbatches)
        if mesh.roles > 1:
            stack = "/".join(next(iter(layers.stacks)))
            starts = [f"{stack}/{depth * role}" for role in range(1, mesh.roles)]
            there = replace(there, pipeline=Pipeline(order.schedule, order.chunks, starts))
        few = replace(few, rows=own * microbatches * mesh.data_ranks)
        return lowered_of(few, there, mesh, deciders, verified=False).programs

    try:
        depths = _depths(problem, spec, mesh, deciders, layers)
        if not depths or sum(depths) // len(depths) < DEEP:  # as `shallow_say` has it: roles need not have equally many
            return None
        rates, gathers = problem.machine.rates(mesh), spec.parallel.zero not in (0, 1, 2)
        return foretold(programs, depths, spec.microbatches, rates, checks=checks, gathers=gathers)
    except FzeroError:  # as of a rule that names a layer: then the whole program says what is wrong, if anything is
        return None


def _depths(problem: Problem, spec: Spec, mesh: Mesh, deciders: Deciders, layers: Layers) -> list[int]:
    """The layers of each role; [] where a role has several pieces of the model, or there are several stacks."""
    if mesh.roles == 1:
        return [layers.depth]
    cut = cut_of(problem, spec, deciders)
    if cut is None or len(cut.role_of) != mesh.roles or len(layers.stacks) > 1:
        return []
    count = Counter(cut.role_of[chunk] for chunk in cut.chunk_of.values())
    return [count[role] for role in range(mesh.roles)] if count.total() == layers.depth else []


def cut_of(problem: Problem, spec: Spec, deciders: Deciders) -> Cut | None:
    """The chunks of a spec's model; None if it has one. Raises SpecError where it is not cut as the spec says."""
    recipe = recipe_for(spec, problem.params_like, None, torch.device("cpu"))
    return plan_for(spec, recipe.paths, recipe.values, recipe.per_rank, mesh_of(spec), None, deciders).cut
