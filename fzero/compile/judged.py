"""judged: what lowering writes, with what the judge says of it: the meaning that a program must have, and the proof
that one rank's graph computes the captured one.

Lowering and the passes import nothing of `fzero.verify`, and it imports nothing of theirs: a rule that both took from
one place would be wrong in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from fzero.capture.graph import Graph
from fzero.compile.kept_lowerings import NOTHING, Kept
from fzero.errors import VerifyError
from fzero.ir import fx_nodes, segments
from fzero.ir.program import Level, Program
from fzero.ir.records import PERSISTENT, Buffer
from fzero.lowering.build import build
from fzero.lowering.localise import Proposal, Sharding, localise, reads_rank, settled, unconstrained
from fzero.plan.state_plan import Plan
from fzero.shard.choose_strategies import cheapest
from fzero.shard.placements import Placement, Replicated
from fzero.shard.sharding_problem import Chooser
from fzero.verify.meaning import graph_meaning
from fzero.verify.regrouped import check_regrouped
from fzero.verify.sharding import check_sharding

INPUTS = ("batch", "constant")  # kinds of buffers that a run fills, in their order


def naive(graph: Graph, plan: Plan, *, reduce: str = "end", transport: str = "p2p", verified: bool = True) -> Program:
    """The program before all passes, with the meaning of the captured step, if it is to be verified."""
    program = build(graph, plan, reduce=reduce, transport=transport)
    if not verified:
        return program
    return replace(program, meaning=graph_meaning(graph, plan, reduce, program))


def local_step(
    graph: Graph, plan: Plan, sequence: str | None = None, choose: Chooser = cheapest, kept: Kept = NOTHING
) -> tuple[Graph, Sharding | None]:
    """(the graph of one rank, how it lies), proven, axis by axis; the graph as it is where no axis cuts values by dims.

    sequence: the axis over which sums lie in parts along dim 1. choose: a strategy for each op. kept: where proposals
    are kept, of this graph and plan.

    Raises as `localise`, and VerifyError for a graph that computes something else."""
    axes = [axis for axis, _ in plan.mesh.model_axes]
    graph, sharding = unconstrained(graph, axes), None
    for axis in axes:
        made = _proposed(graph, kept.at(axis), partial(localise, graph, plan, axis, sequence == axis, choose))
        _check(graph, made, plan, axis)
        sharding = replace(settled(made, plan), before=sharding)
        graph = sharding.local
    return graph, sharding


def _proposed(graph: Graph, kept: Kept, make: Callable[[], Proposal]) -> Proposal:
    """The proposal that was kept for a graph, else the one that is made. Of the graph itself nothing is kept."""

    def parts() -> tuple[Any, ...]:
        made = make()
        outer, *own = (replace(one, chosen={}) if kept.key else one for one in (made.outer, *made.regions))
        return made.axis, made.n, [region.gm for region in made.graph.regions], outer, tuple(own)

    axis, n, graphs, outer, own = kept.of(parts)
    regions = tuple(replace(region, gm=gm) for region, gm in zip(graph.regions, graphs, strict=True))
    return Proposal(axis, n, replace(graph, regions=regions), outer, own)


def check_kept(programs: Mapping[int, Program], naive: Program) -> None:
    """Raises VerifyError unless programs that were kept are those of a step, finished, on the state as it is planned,
    and run the segments that they name. naive: the step's, before all passes."""
    for role, program in programs.items():
        for what, own, needed in _facts(program, naive):
            if own != needed:
                raise VerifyError(f"a kept program of role {role} has another {what} than the step")
        for key, gm in program.segments.items():
            if segments.digest(gm) != key:
                raise VerifyError(f"a kept program of role {role} has another segment under {key}")


def _facts(program: Program, naive: Program) -> Iterator[tuple[str, Any, Any]]:
    """(what, that of a program, that which it needs) of all that no pass changes."""
    for name in ("meaning", "mesh", "microbatches", "transport"):
        yield name, getattr(program, name), getattr(naive, name)
    yield "level", program.level, Level.PLACED
    yield "update", program.trainable, tuple(slot for slot in naive.trainable if slot.bucket in program.buckets)
    for kind in INPUTS:
        own, needed = ([n for n, b in one.buffers.items() if b.kind == kind] for one in (program, naive))
        yield f"{kind} of inputs", own, needed
    yield "plan of buckets", program.buckets, {name: naive.buckets.get(name) for name in program.buckets}
    state, planned = _held(program), _held(naive)
    yield "plan of its state", state, {name: planned.get(name) for name in state}


def _held(program: Program) -> dict[str, Buffer]:
    """What is held between steps, but for copies, which a pass adds, and for where the batch is copied to."""
    held = {name: b for name, b in program.buffers.items() if b.kind in PERSISTENT and b.kind != "copy"}
    return {name: replace(b, at=None) if b.kind == "batch" else b for name, b in held.items()}


def _check(captured: Graph, made: Proposal, plan: Plan, axis: str) -> None:
    """Raises VerifyError unless a proposal for an axis computes the captured step, its leaves where the plan says."""
    if (made.axis, made.n) != (axis, plan.mesh.size(axis)):
        raise VerifyError(f"a step of {plan.mesh.size(axis)} ranks of {axis} lies over {made.n} of {made.axis}")
    for before, after in zip(captured.regions, made.graph.regions, strict=True):
        check_regrouped(before.gm, after.gm)

    def inner(node: fx.Node) -> tuple[Sequence[Placement], Sequence[Placement], bool]:
        region = made.regions[int(str(node.args[1]))]
        return region.inputs, region.outputs, reads_rank(region)

    leaves: list[Placement] = [leaf.layout.on(made.axis) for leaf in plan.leaves]
    whole = made.graph.gm
    given, results = (len(ends) for ends in (fx_nodes.placeholders(whole.graph), fx_nodes.outputs(whole.graph)))
    inputs, outputs = ([*leaves, *[Replicated()] * (number - len(leaves))] for number in (given, results))
    check_sharding(whole, made.outer.gm, inputs, outputs, made.n, made.axis, inner)
    for region, own in zip(made.graph.regions, made.regions, strict=True):
        check_sharding(region.gm, own.gm, own.inputs, own.outputs, made.n, made.axis)
