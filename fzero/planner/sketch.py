"""sketch: what a step takes on one rank, from a few lowerings: of one row and more, with and without recomputation. If
`remat` is pinned to none, without alone.

It only proposes: which candidates are lowered, and in which order (`fzero.planner.estimates`). What a plan says of a
candidate is read off its own programs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fzero import tree
from fzero.compile.decide import DECIDERS
from fzero.compile.resolve import mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.ir.records import DEVICE
from fzero.kernels.codecs import BLOCK, CODECS
from fzero.passes.recompute import GATHERS
from fzero.plan.memory_use import MemoryUse
from fzero.planner.candidates import OFFLOADS, fixed, gradients_wait
from fzero.planner.deep import takes
from fzero.planner.estimates import Ends, OnDevice, Sketch
from fzero.planner.probes import Foretold
from fzero.planner.problem import Problem


def sketched(problem: Problem) -> Sketch:
    """The sketch of a step. Raises as `fzero.lower`."""
    spec = problem.spec
    rows = max(2, problem.rows // problem.world_size)
    axes = {axis: 1 for dims in (spec.shard or {}).values() for axis in dims.axes}
    alone = replace(
        spec, mesh={"dp": 1, **axes}, zero=0, microbatches=1, offload=None, nvme_path=None, sequence=None,
        pipeline=None, device_bytes=None, host_bytes=None, reduce=None, update_on=None,
    )  # fmt: skip
    remats: list[Any] = ["none", "full"]
    if "remat" in problem.given and spec.remat in ("none", GATHERS):  # on one rank nothing is gathered
        remats = ["none"]
    elif spec.remat not in remats:
        remats.insert(0, spec.remat)
    there = replace(problem, world_size=1)

    def found(remat: Any, rows: int) -> Foretold:
        return takes(replace(there, rows=rows), replace(alone, remat=remat), mesh_of(alone, 1), DECIDERS)

    seconds, activations = {}, {}
    for remat in remats:
        last, name = found(remat, rows), remat if isinstance(remat, str) else "by rules"
        one = found(remat, 1)
        seconds[name] = Ends(one.busy[0], last.busy[0], rows)
        activations[name] = Ends(one.activations, last.activations, rows)
    policy = spec.numerics.policy
    gathered = CODECS[policy.gather].block_bytes / BLOCK if policy.gather else 2 if policy.compute else None
    wire = 1.0 if gathered is None else gathered / _widest(problem.params_like)
    return Sketch(
        seconds, activations, last.busy[1], last.held("param"), last.held("optimizer"), wire, problem.layers,
        gradients_wait(spec), _held(problem), len(last.tokens[0]),
    )  # fmt: skip


def _held(problem: Problem) -> dict[Any, OnDevice]:
    """What is held on the device, by each value of `offload` that a candidate may have."""
    spec = problem.spec
    recipe = recipe_for(spec, problem.params_like, None, torch.device("cpu"))
    leaves = {path: x.numel() * x.element_size() for path, x in zip(recipe.paths, recipe.values, strict=True)}
    params = {path for path in leaves if any(tree.matches(rule, path) for rule in spec.parallel.param_rules)}

    def by_rules(memory: MemoryUse) -> OnDevice:
        here = {path for path in leaves if memory.space_of(path, spec.parallel.param_rules) == DEVICE}

        def part(paths: set[str]) -> float:
            return sum(leaves[path] for path in paths & here) / max(sum(leaves[path] for path in paths), 1)

        return OnDevice(
            part(params), part(leaves.keys() - params), any(to != DEVICE for to in memory.gradient_rules.values())
        )

    return {value: by_rules(MemoryUse(offload=value)) for value in OFFLOADS} | {
        fixed(spec.offload): by_rules(spec.memory)
    }


def _widest(params: Any) -> int:
    """The bytes of an element of the parameters, the most that there are."""
    if callable(params):
        return 4
    return max((x.element_size() for x in tree.flatten(params)[1] if isinstance(x, torch.Tensor)), default=4)
