"""Steps by the naive program, all ranks in this process: what lowering writes, before any pass. Of a step that is
sharded by dims the first passes take the transfers out of the segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import kept
import torch
from helpers import start
from passed import upto
from torch import Tensor

import fzero
from fzero import tree
from fzero.capture.graph import Graph
from fzero.compile.judged import naive
from fzero.compile.lowering_context import LoweringContext
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import lowering_options, mesh_of, train_step
from fzero.compile.state_recipe import recipe_for
from fzero.compile.step import _Asked, _captured, fakes_on
from fzero.ir.program import Program
from fzero.lowering.localise import Sharding
from fzero.plan.state_plan import Plan
from fzero.runtime.interpreter import interpret
from fzero.state import storage
from fzero.verify.rules import verify

CPU = torch.device("cpu")
Batch = Callable[[int, int], Any]


class Written(NamedTuple):
    """A step before any pass. graph: of one rank; sharding: how the captured one lies, where an axis cuts dims."""

    program: Program
    graph: Graph
    plan: Plan
    sharding: Sharding | None


class Steps(NamedTuple):
    """What steps left behind: whole leaves by path, and by rank the metrics of the last step."""

    leaves: dict[str, Tensor]
    metrics: list[dict[str, Tensor]]


def written(spec: fzero.Spec, params: Any, batch: Any, world: int, transport: str = "p2p") -> Written:
    """The naive program of a spec, whose meaning the verifier has proved; but not where leaves are held off the device,
    from where later passes bring them."""
    mesh = mesh_of(spec, world)
    recipe = recipe_for(spec, params, None, CPU, mesh.data_ranks)
    plan = plan_for(spec, recipe.paths, recipe.values, recipe.per_rank, mesh)
    state = tree.unflatten(recipe.treedef, recipe.values)
    with kept.captures():
        asked = _Asked(lowering_options(spec), LoweringContext(transport))
        captured = _captured(train_step(spec), asked, state, fakes_on(batch, CPU), plan)
    _, local, sharding, _ = captured
    program = naive(local, plan, reduce=spec.reduce or "end", transport=transport)
    if spec.offload is None:
        verify(program)
    return Written(program, local, plan, sharding)


def stepped(
    spec: fzero.Spec, params: Any, batch: Batch, *, world: int, steps: int = 1, transport: str = "p2p"
) -> Steps:
    """Interprets the naive program; `batch(rank, step)` is what a rank of the data is given."""
    program, graph, plan, sharding = written(spec, params, batch(0, 0), world, transport)
    program = program if sharding is None else upto("segment", program)
    _, leaves = start(spec, params, ranks=plan.data_ranks)
    memory = [storage.shards(plan, leaves, rank) for rank in range(world)]
    inputs = [name for name, b in program.buffers.items() if b.kind == "batch"]
    constants = [name for name, b in program.buffers.items() if b.kind == "constant"]
    fixed = dict(zip(constants, graph.constants.values(), strict=True))
    ranks: list[Any] = []
    for number in range(steps):
        given = []
        for rank in range(world):
            flat = tree.flatten(batch(plan.mesh.data_rank(rank), number))[1]
            own = dict(zip(inputs, [x for x in flat if isinstance(x, Tensor)], strict=True))
            given.append({**memory[rank], **fixed, **own})
        with torch.no_grad():
            ranks = interpret(dict.fromkeys(range(world), program), given, poison=True)
        memory = [{name: rank.memory[name] for name in plan.held_by(rank.rank)} for rank in ranks]
    metrics = [{name: rank.memory[buffer].clone() for name, buffer in program.metrics.items()} for rank in ranks]
    return Steps({leaf.path: storage.join(plan, leaf, memory) for leaf in plan.leaves}, metrics)
