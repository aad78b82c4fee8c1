"""candidates: the values that the open fields of a Spec may take in a world.

A field that was given is pinned: it has that one value in every candidate (`Spec.given`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from fzero.compile.resolve import mesh_of
from fzero.hardware import Hardware
from fzero.ir.mesh import DATA, PIPELINE, Mesh
from fzero.passes.recompute import GATHERS
from fzero.pipeline import CHUNKS, Pipeline
from fzero.plan.parallelism import AUTO
from fzero.shard.partition import P
from fzero.spec import Spec

STAGES = (0, 1, 2, 3)
REMATS = ("none", "full", GATHERS)  # the last makes a difference where tokens stay in parts
MOST_MICROBATCHES = 64
INTERLEAVED, MOST_CHUNKS = (2, 4), 8  # chunks a role, beside as many as there are layers
EMPTY: Mapping[str, P] = MappingProxyType({})


def named(rules: Mapping[str, P] | None) -> set[str]:
    """The axes that rules of `shard` name."""
    return {axis for dims in (rules or {}).values() for axis in dims.axes}


class FixedRules(dict[str, Any]):
    """Path rules as a candidate has them: never changed, and a part of a key.

    >>> FixedRules({"**": 1}) == {"**": 1}, len({FixedRules({"**": 1}), FixedRules({"**": 1})})
    (True, 1)
    """

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(repr(self))


def fixed(value: Any) -> Any:
    """The value of a field, as a candidate has it."""
    return FixedRules(value) if isinstance(value, Mapping) else value


# gradients that wait to be clipped, or to be found finite, are as large as the parameters
ALL = FixedRules({"optimizer": "cpu", "params": "cpu", "grads/**": "cpu"})
OFFLOADS = (None, "optimizer", "optimizer+params", ALL)


@dataclass(frozen=True)
class Candidate:
    """One value for each field that may be open. mesh: the axes, the slowest first. pipeline: None for the default.
    reduce: None for the rule of `Spec`, and where there is one microbatch. sequence: the axis along which tokens stay
    in parts between layers."""

    mesh: tuple[tuple[str, int], ...]
    zero: Any
    microbatches: int
    remat: Any
    offload: Any
    pipeline: Any = None
    reduce: str | None = None
    sequence: str | None = None

    def spec(self, base: Spec, rules: Mapping[str, P] = EMPTY) -> Spec:
        """The spec with these values. rules: of `shard`, where the mesh has an axis that only these name."""
        used = {"shard": rules} if named(rules) & {name for name, _ in self.mesh} else {}
        remat = getattr(self.remat, "rules", self.remat)
        pipeline = self.pipeline if self.ranks.roles > 1 else None
        fields = {**self.fields, "mesh": dict(self.mesh), "remat": remat, "pipeline": pipeline, **used}
        return replace(base, **fields)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.values)

    @property
    def fields(self) -> dict[str, Any]:
        """The values by the field's name."""
        return dict(zip(NAMES, self.values, strict=True))

    @cached_property
    def values(self) -> tuple[Any, ...]:
        """The values, in the order of the fields."""
        return _values(self)

    @cached_property
    def ranks(self) -> Mesh:
        """The mesh."""
        return Mesh(self.mesh)

    @cached_property
    def chunks(self) -> int:
        """The pieces of the model that each role of an interleaved pipeline holds; 1 of every other one."""
        given = self.pipeline if isinstance(self.pipeline, Pipeline) else Pipeline(self.pipeline or "1f1b")
        return given.chunks or CHUNKS["interleaved"] if given.schedule == "interleaved" else 1

    def __str__(self) -> str:
        mesh = " ".join(f"{name}={size}" for name, size in self.mesh)
        offload = f" offload={self.offload}" if self.offload is not None else ""
        named = isinstance(self.pipeline, Pipeline) and self.pipeline.cut is None
        order = f"{self.pipeline.schedule} of {self.chunks} chunks" if named else self.pipeline
        schedule = f" pipeline={order}" if self.pipeline is not None else ""
        rest = offload + schedule + (f" reduce={self.reduce}" if self.reduce is not None else "")
        rest += f" sequence={self.sequence}" if self.sequence is not None else ""
        return f"{mesh} zero={self.zero} microbatches={self.microbatches} remat={self.remat}{rest}"


NAMES = tuple(f.name for f in fields(Candidate))
_values = attrgetter(*NAMES)


def default(spec: Spec, world_size: int) -> Candidate:
    """What the spec means without a planner."""
    auto = (("dp", world_size), *((axis, 1) for axis in sorted(named(spec.shard))))
    mesh = auto if spec.mesh == AUTO else mesh_of(spec, world_size).axes
    values = spec.microbatches, fixed(spec.remat), fixed(spec.offload), spec.pipeline, spec.reduce, spec.sequence
    return Candidate(mesh, fixed(spec.zero), *values)


def candidates(
    spec: Spec,
    given: Collection[str],
    world_size: int,
    rows: int,
    layers: int,
    machine: Hardware,
    rules: Mapping[str, P] = EMPTY,
    *,
    schedules: bool = False,
) -> Iterator[Candidate]:
    """All candidates. given: the fields that are pinned. rows: of the global batch. layers: the numbered layers of the
    parameters. rules: of `shard`, that were found for a spec without any. schedules: whether pipelines also have
    interleaved ones."""
    open_ = {f.name for f in fields(Candidate)} - {*given}
    offloads = _homes(spec, machine) if "offload" in open_ else [fixed(spec.offload)]
    remats = REMATS if "remat" in open_ else (fixed(spec.remat),)
    if "mesh" in open_:
        every = meshes(spec, world_size, layers, machine, rules)
        over = [mesh for mesh in every if rows % Mesh(mesh).data_ranks == 0]
    else:
        over = [mesh_of(spec, world_size).axes]
    for mesh in over:
        sequences = lengthwise(mesh) if "sequence" in open_ else [spec.sequence]
        for zero in stages(mesh) if "zero" in open_ else [fixed(spec.zero)]:
            for microbatches in _microbatches(mesh, rows) if "microbatches" in open_ else [spec.microbatches]:
                sums = reductions(spec, Mesh(mesh), zero, microbatches)
                orders = [spec.pipeline]
                if schedules and "pipeline" in open_:
                    orders += interleaved(Mesh(mesh).roles, microbatches, layers)
                rest = itertools.product(remats, offloads, orders, sums, sequences)
                found = (Candidate(mesh, zero, microbatches, *values) for values in rest)
                yield from (one for one in found if one.remat != GATHERS or one.sequence or "remat" not in open_)


def _homes(spec: Spec, machine: Hardware) -> Sequence[Any]:
    """The values of `offload`: gradients are among them where they wait for the last one."""
    if machine.host is None:
        return OFFLOADS[:1]
    return OFFLOADS if gradients_wait(spec) or spec.step is not None else OFFLOADS[:-1]


def gradients_wait(spec: Spec) -> bool:
    """Whether gradients wait for the last of them: to be clipped, or to be found finite."""
    scaled = spec.numerics.policy.loss_scale is not None
    return spec.clip_norm is not None or scaled or spec.nonfinite in ("skip", "raise")


def meshes(
    spec: Spec, world_size: int, layers: int, machine: Hardware, rules: Mapping[str, P] = EMPTY
) -> Iterator[tuple[tuple[str, int], ...]]:
    """The meshes of a world: an axis that rules of `shard` name is at most as long as the innermost level is wide; `pp`
    at most as long as there are layers; all other ranks split the batch, over two axes where they span two levels."""
    axes = sorted(named(spec.shard) or named(rules))
    node = machine.levels[0].size if machine.levels else 1
    widths = [n for n in _divisors(world_size) if n <= node] if len(axes) == 1 else [1]
    for width in widths:
        inner = ((axes[0], width),) if axes and (spec.shard or width > 1) else ()
        for roles in _divisors(world_size // width):
            if roles > max(layers, 1):
                continue
            data = world_size // width // roles
            outer = ((PIPELINE, roles),) if roles > 1 else ()
            yield (*outer, ("dp", data), *inner)
            within = math.gcd(data, max(node // width, 1))
            if 1 < within < data:
                yield (*outer, ("dp_out", data // within), ("dp", within), *inner)


def stages(mesh: tuple[tuple[str, int], ...]) -> list[Any]:
    """The stages that make a difference on a mesh."""
    sizes = dict(mesh)
    if "dp_out" in sizes:
        return ["hsdp", "hpz", 1]
    return list(STAGES) if math.prod(sizes.get(axis, 1) for axis in DATA) > 1 else [0]


def lengthwise(mesh: tuple[tuple[str, int], ...]) -> list[str | None]:
    """The values of `sequence`: none, and an axis that cuts layers."""
    return [None, *(axis for axis, _ in Mesh(mesh).model_axes)]


def reductions(spec: Spec, mesh: Mesh, zero: Any, microbatches: int) -> list[str | None]:
    """The values of `reduce` that make a difference: at stages 0 and 1 each rank holds whole gradients either way."""
    if spec.reduce is not None or microbatches == 1 or mesh.data_ranks == 1:
        return [spec.reduce]
    return ["end"] if zero in (0, 1) else ["each", "end"]


def interleaved(roles: int, microbatches: int, layers: int) -> list[Pipeline | str]:
    """The interleaved schedules that suit a pipeline: a chunk has a layer, and microbatches go round in whole groups.

    >>> interleaved(2, 4, 4), interleaved(1, 4, 6), interleaved(4, 6, 24), interleaved(8, 8, 24)[1].chunks
    (['interleaved'], [], [], 3)
    """
    counts = sorted({*INTERLEAVED, min(layers // roles, MOST_CHUNKS)})
    found = [n for n in counts if n > 1 < roles and microbatches % roles == 0 and roles * n <= layers]
    return ["interleaved" if n == CHUNKS["interleaved"] else Pipeline("interleaved", n) for n in found]


def _microbatches(mesh: tuple[tuple[str, int], ...], rows: int) -> list[int]:
    """Powers of two that divide a rank's rows; in a pipeline at least as many as roles."""
    sizes = dict(mesh)
    own, least = rows // math.prod(sizes.get(axis, 1) for axis in DATA), sizes.get(PIPELINE, 1)
    found = [n for n in (2**i for i in range(MOST_MICROBATCHES.bit_length())) if own and own % n == 0]
    return [n for n in found if n >= least] or found[-1:]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def sharded(sizes: Mapping[str, int]) -> int:
    """Into how many parts layers are cut, by `pp` and by axes that rules of `shard` name."""
    return math.prod(size for axis, size in sizes.items() if axis not in DATA)
