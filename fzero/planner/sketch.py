"""sketch: what a candidate takes, roughly, from two lowerings of the step on one rank.

It only proposes: which candidates are lowered, and in which order. What a plan says of a candidate is read off its own
programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import tree
from fzero.compile.decide import DECIDERS
from fzero.compile.decide.reduce_when import MORE
from fzero.compile.resolve import mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.hardware import Hardware
from fzero.ir.mesh import DATA, PIPELINE
from fzero.ir.records import DEVICE
from fzero.kernels.codecs import BLOCK, CODECS
from fzero.plan.memory_use import MemoryUse
from fzero.planner.candidates import OFFLOADS, Candidate, fixed, gradients_wait, sharded
from fzero.planner.deep import takes
from fzero.planner.probes import Foretold
from fzero.planner.problem import Problem

TENSOR = "tp"  # the axis of rules that were found
FEW_LAYERS = 3  # of which parameters are gathered at once, and gradients not yet reduced
SAVER = 0.002  # of two that are alike, the one with fewer means to save memory


@dataclass(frozen=True)
class Ends:
    """A figure of one row of the batch, and of more: between and beyond them it lies on their line. Where one row is
    all that is known, it is proportional."""

    one: float
    many: float
    rows: int

    def of(self, rows: float) -> float:
        """The figure of so many rows."""
        slope = (self.many - self.one) / (self.rows - 1) if self.rows > 1 else self.many
        return max(self.one + slope * (rows - 1), 0.0)


@dataclass(frozen=True)
class Held:
    """The parts of the bytes of the parameters and of the optimizer's columns that are held on the device, and whether
    gradients wait elsewhere for all others."""

    params: float
    optimizer: float
    gradients: bool

    @property
    def off_device(self) -> bool:
        """Whether anything is elsewhere."""
        return self.params < 1 or self.optimizer < 1 or self.gradients


@dataclass(frozen=True)
class Sketch:
    """Of one rank. seconds: of the loss and its gradient, by the value of `remat`. activations: their bytes at their
    fullest. update: seconds. params, optimizer: bytes. wire: bytes of an element that is gathered, over those of one
    that is held. layers: of the model. waits: whether gradients wait for the last one. held: by the value of `offload`.
    ops: of the program."""

    seconds: dict[Any, Ends]
    activations: dict[Any, Ends]
    update: float
    params: int
    optimizer: int
    wire: float
    layers: int
    waits: bool
    held: dict[Any, Held]
    ops: int

    def estimate(self, one: Candidate, rows: int, machine: Hardware, tensor_bytes: float = 0.0) -> tuple[float, int]:
        """(seconds of a step, bytes of the device) of a candidate for a global batch of so many rows.
        tensor_bytes: that tensor parallelism sends in the forward of a row."""
        sizes = dict(one.mesh)
        data, parts, roles = math.prod(sizes.get(axis, 1) for axis in DATA), sharded(sizes), sizes.get(PIPELINE, 1)
        own = rows / data / one.microbatches
        computing = self._like(self.seconds, one).of(own) / parts * (one.microbatches + roles - 1)
        computing += self._tensor(one, rows / data * tensor_bytes / roles, machine)
        stage = one.zero if isinstance(one.zero, int) else 3
        inner = (sizes["dp"] if one.zero == "hsdp" else data) if stage else 1
        update = self.update / parts / inner
        exposed = max(0.0, self._transfers(one, stage, machine) - computing / 2)
        fetched, late = self._moves(one, inner * parts, machine)
        seconds = max(computing, fetched) + update + exposed + max(0.0, late - (0 if self.waits else computing / 2))
        savers = (one.remat != "none") + (one.offload is not None) + (roles > 1) + (one.microbatches > 1)
        return seconds * (1 + SAVER * savers), self._bytes(one, stage, inner, own, tensor_bytes)

    def _like(self, known: Mapping[Any, Ends], one: Candidate) -> Ends:
        """What was sketched with the candidate's value of `remat`; of rules, the first."""
        remat = one.remat
        return known[remat] if isinstance(remat, str) and remat in known else next(iter(known.values()))

    def _bytes(self, one: Candidate, stage: int, inner: int, own: float, tensor_bytes: float) -> int:
        """The state, what is gathered, the gradients, and the activations of the microbatches in flight. Between layers
        values are whole on each rank of tensor parallelism: they are as many as it sends."""
        sizes, parts, held = dict(one.mesh), sharded(dict(one.mesh)), self.held[one.offload]
        roles, few = sizes.get(PIPELINE, 1), min(1.0, FEW_LAYERS / max(self.layers, 1))
        keeps = inner if stage == 3 or (stage and self.wire < 1) else 1
        state = held.params * self.params / keeps + held.optimizer * self.optimizer / inner
        gathered = self.params * self.wire * (few if stage == 3 or (keeps == 1 and held.params < 1) else keeps > 1)
        in_flight = min(roles, one.microbatches)
        kept = self._like(self.activations, one).of(own) / roles
        whole = min(kept, tensor_bytes * own / roles) if roles < parts else 0.0
        kept = (whole + (kept - whole) * roles / parts) * in_flight
        gradients = self._gradients(one, stage, inner, kept / in_flight * parts, few)
        return int((state + gathered + gradients) / parts + kept)

    def _gradients(self, one: Candidate, stage: int, inner: int, kept: float, few: float) -> float:
        """The bytes of gradients, of all parts: those of a few layers are whole, others wait whole or as shares."""
        data = math.prod(dict(one.mesh).get(axis, 1) for axis in DATA)
        each = data > 1 and self.params > MORE * (kept + (self.params + self.optimizer) / data)
        if one.microbatches > 1 and not (each and stage >= 2):
            return self.params  # the sum of the microbatches
        waiting = 0.0 if self.held[one.offload].gradients or not self.waits else 1 / (inner if stage >= 2 else 1)
        return self.params * max(few, waiting)

    def _transfers(self, one: Candidate, stage: int, machine: Hardware) -> float:
        mesh = one.ranks
        axes = mesh.data_axes
        if not axes or mesh.size(axes) < 2:
            return 0.0
        rates = machine.rates(mesh)
        n, whole = mesh.size(axes), self.params / sharded(dict(one.mesh))
        gathers = {0: 1, 1: 1, 2: 1, 3: 2 * one.microbatches}[stage]
        gather = rates.transfer("all_gather", int(whole * self.wire), axes, n)
        return gathers * gather + rates.transfer("reduce_scatter", int(whole), axes, n)

    def _tensor(self, one: Candidate, nbytes: float, machine: Hardware) -> float:
        """The seconds of what tensor parallelism sends in the forward and the backward of a step."""
        width = dict(one.mesh).get(TENSOR, 1)
        if width == 1 or not nbytes:
            return 0.0
        return 2 * machine.rates(one.ranks).transfer("all_gather", int(nbytes), TENSOR, width)

    def _moves(self, one: Candidate, shares: int, machine: Hardware) -> tuple[float, float]:
        """(the seconds of what is fetched beside the loss and its gradient, of what is moved and updated after it)."""
        host, held = machine.host, self.held[one.offload]
        if host is None or not held.off_device or not host.to_device_bytes:
            return 0.0, 0.0
        params, optimizer = self.params * (1 - held.params) / shares, self.optimizer * (1 - held.optimizer) / shares
        gradients = self.params / shares
        there = (optimizer + params + gradients * held.gradients) / min(host.to_device_bytes, host.from_device_bytes)
        if host.adam_bytes:  # or the host updates: gradients go there, parameters come back
            there = min(there, gradients / host.from_device_bytes + 2 * (params + optimizer) / host.adam_bytes)
        return 2 * one.microbatches * params / host.to_device_bytes, there


def sketched(problem: Problem) -> Sketch:
    """The sketch of a step. Raises as `fzero.lower`."""
    spec = problem.spec
    rows = max(1, problem.rows // problem.world_size)
    axes = {axis: 1 for dims in (spec.shard or {}).values() for axis in dims.axes}
    alone = replace(
        spec, mesh={"dp": 1, **axes}, zero=0, microbatches=1, offload=None, nvme_path=None, sequence=None,
        pipeline=None, device_bytes=None, host_bytes=None, reduce=None, update_on=None,
    )  # fmt: skip
    remats: list[Any] = ["none", "full"]
    if spec.remat not in remats:
        remats.insert(0, spec.remat)
    there = replace(problem, world_size=1)

    def found(remat: Any, rows: int) -> Foretold:
        return takes(replace(there, rows=rows), replace(alone, remat=remat), mesh_of(alone, 1), DECIDERS)

    seconds, activations = {}, {}
    for remat in remats:
        last, name = found(remat, rows), remat if isinstance(remat, str) else "by rules"
        one = found(remat, 1) if rows > 1 else last
        seconds[name] = Ends(one.busy[0], last.busy[0], rows)
        activations[name] = Ends(one.activations, last.activations, rows)
    policy = spec.numerics.policy
    gathered = CODECS[policy.gather].block_bytes / BLOCK if policy.gather else 2 if policy.compute else None
    wire = 1.0 if gathered is None else gathered / _widest(problem.params_like)
    return Sketch(
        seconds, activations, last.busy[1], last.held("param"), last.held("optimizer"), wire, problem.layers,
        gradients_wait(spec), _held(problem), len(last.tokens[0]),
    )  # fmt: skip


def _held(problem: Problem) -> dict[Any, Held]:
    """What is held on the device, by each value of `offload` that a candidate may have."""
    spec = problem.spec
    recipe = recipe_for(spec, problem.params_like, None, torch.device("cpu"))
    leaves = {path: x.numel() * x.element_size() for path, x in zip(recipe.paths, recipe.values, strict=True)}
    params = {path for path in leaves if any(tree.matches(rule, path) for rule in spec.parallel.param_rules)}

    def by_rules(memory: MemoryUse) -> Held:
        here = {path for path in leaves if memory.space_of(path, spec.parallel.param_rules) == DEVICE}

        def part(paths: set[str]) -> float:
            return sum(leaves[path] for path in paths & here) / max(sum(leaves[path] for path in paths), 1)

        return Held(
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
