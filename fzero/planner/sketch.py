"""sketch: what a candidate takes, roughly, from two lowerings of the step on one rank.

It only proposes: which candidates are lowered, and in which order. What a plan says of a candidate is read off its own
programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import tree
from fzero.compile.decide import DECIDERS
from fzero.compile.resolve import mesh_of
from fzero.hardware import Hardware
from fzero.ir.mesh import DATA, PIPELINE
from fzero.kernels.codecs import BLOCK, CODECS
from fzero.planner.candidates import Candidate, sharded
from fzero.planner.deep import takes
from fzero.planner.probes import Foretold
from fzero.planner.problem import Problem

TENSOR = "tp"  # the axis of rules that were found
SAVER = 0.002  # of two that are alike, the one with fewer means to save memory


@dataclass(frozen=True)
class Sketch:
    """Of one rank with `rows` rows of the batch, by the value of `remat`: `seconds` of its loss and gradient, and
    `activations`, the bytes at the peak beyond the state and the gradients. one_row: the seconds of one row, over those
    of `rows`: what small products and launches leave. update: seconds. params, optimizer: bytes. wire: bytes of an
    element that is gathered, over those of one that is held. ops: of the program."""

    rows: int
    seconds: dict[Any, float]
    activations: dict[Any, int]
    one_row: float
    update: float
    params: int
    optimizer: int
    wire: float
    ops: int

    def estimate(self, one: Candidate, rows: int, machine: Hardware, tensor_bytes: float = 0.0) -> tuple[float, int]:
        """(seconds of a step, bytes of the device) of a candidate for a global batch of so many rows.
        tensor_bytes: that tensor parallelism sends in the forward of a row."""
        sizes = dict(one.mesh)
        data, parts, roles = math.prod(sizes.get(axis, 1) for axis in DATA), sharded(sizes), sizes.get(PIPELINE, 1)
        own = rows / data / one.microbatches
        remat = self._like(one.remat)
        computing = self.seconds[remat] * self._share(own) / parts * (one.microbatches + roles - 1)
        computing += self._tensor(one, rows / data * tensor_bytes / roles, machine)
        stage = one.zero if isinstance(one.zero, int) else 3
        inner = sizes["dp"] if one.zero == "hsdp" else data
        update = self.update / parts / (inner if stage else 1)
        exposed = max(0.0, self._transfers(one, stage, machine) - computing / 2)
        moved = self._moves(one, inner if stage else 1, parts, machine)
        seconds = computing + update + exposed + max(0.0, moved - computing / 2)
        savers = (one.remat != "none") + (one.offload is not None) + (roles > 1) + (one.microbatches > 1)
        return seconds * (1 + SAVER * savers), self._bytes(one, stage, inner, own / self.rows, parts)

    def _like(self, remat: Any) -> Any:
        """The value of `remat` that was sketched: of rules, the first."""
        return remat if isinstance(remat, str) and remat in self.seconds else next(iter(self.seconds))

    def _share(self, rows: float) -> float:
        """The seconds of so many rows, over those of `self.rows`."""
        if self.rows == 1:
            return rows
        slope = (1 - self.one_row) / (self.rows - 1)
        return max(self.one_row + slope * (rows - 1), 0.0)

    def _bytes(self, one: Candidate, stage: int, inner: int, own: float, parts: int) -> int:
        homes = str(one.offload or "")
        params = 0 if "params" in homes else self.params / (inner if stage == 3 or (stage and self.wire < 1) else 1)
        moments = 0 if "optimizer" in homes else self.optimizer / (inner if stage else 1)
        gradients = 0 if "grads" in homes else self.params / (inner if stage >= 2 else 1)
        roles = dict(one.mesh).get(PIPELINE, 1)
        held = self.activations[self._like(one.remat)] * own
        return int((params + moments + gradients) / parts + held * min(roles, one.microbatches) / parts)

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

    def _moves(self, one: Candidate, shards: int, parts: int, machine: Hardware) -> float:
        host, homes = machine.host, str(one.offload or "")
        if host is None or not homes or not host.to_device_bytes:
            return 0.0
        moved = (self.params + (self.optimizer if "optimizer" in homes else 0)) / shards / parts
        moved += 2 * self.params / shards / parts if "grads" in homes else 0
        updated = 2 * (self.params + self.optimizer) / shards / parts / host.adam_bytes if host.adam_bytes else 0.0
        return max(moved / host.to_device_bytes, updated)


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

    by_remat = {remat if isinstance(remat, str) else "by rules": found(remat, rows) for remat in remats}
    last = by_remat["full"]
    seconds = {key: found.busy[0] for key, found in by_remat.items()}
    params, optimizer = last.held("param"), last.held("optimizer")
    activations = {key: max(found.peak - optimizer - 2 * params, 0) for key, found in by_remat.items()}
    one_row = found(remats[0], 1).busy[0] / next(iter(seconds.values())) if rows > 1 else 1.0
    policy = spec.numerics.policy
    gathered = CODECS[policy.gather].block_bytes / BLOCK if policy.gather else 2 if policy.compute else None
    wire = 1.0 if gathered is None else gathered / _widest(problem.params_like)
    return Sketch(rows, seconds, activations, one_row, last.busy[1], params, optimizer, wire, len(last.tokens[0]))


def _widest(params: Any) -> int:
    """The bytes of an element of the parameters, the most that there are."""
    if callable(params):
        return 4
    return max((x.element_size() for x in tree.flatten(params)[1] if isinstance(x, torch.Tensor)), default=4)
