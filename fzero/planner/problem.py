"""problem: what is planned: a step, its global batch, a world, a machine and a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fzero import tree
from fzero.compile.captures import Captures
from fzero.compile.resolve import by_flags
from fzero.compile.state_recipe import recipe_for
from fzero.errors import SpecError
from fzero.hardware import Hardware, load
from fzero.plan.parallelism import AUTO
from fzero.plan.pipeline_cut import layer_of
from fzero.planner.equal_layers import Layers, layers_of
from fzero.shard.partition import P
from fzero.spec import Spec


@dataclass(frozen=True)
class TensorRules:
    """Rules of `shard`, and the bytes that they send in the forward of a row, all layers together: an all-reduce counts
    its buffer twice."""

    shard: Mapping[str, P]
    bytes_a_row: float = 0.0


NO_RULES = TensorRules({})


@dataclass(frozen=True)
class Problem:
    """given: the fields of the spec that are pinned. batch_of: the batch of a number of rows, on meta. rows: of the
    global one. layers: the numbered layers of the parameters. equal: those that are equal. budget: bytes that a rank
    may use of its device. rules: of tensor parallelism, where the spec has none. captures: of the step, as it was
    lowered for candidates. shallower: by depth, the loss, and that and the parameters of a model with so many layers:
    the same each time, so that captures know them."""

    spec: Spec
    given: frozenset[str]
    params_like: Any
    batch_of: Callable[[int], Any]
    rows: int
    layers: int
    equal: Layers | None
    world_size: int
    hardware: Hardware
    budget: int
    rules: TensorRules = NO_RULES
    captures: Captures = field(default_factory=Captures, repr=False)
    shallower: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict, repr=False)

    @cached_property
    def machine(self) -> Hardware:
        """The hardware as so many ranks, and what runs there, find it."""
        return replace(self.hardware.for_ranks(self.world_size), compile=self.spec.compile)


def problem_of(
    spec: Spec, params_like: Any, batch_like: Any, world_size: int, hardware: str | Hardware, memory: int | None
) -> Problem:
    """The arguments of `fzero.plan`, checked. Raises SpecError."""
    left_open = {"mesh": spec.mesh == AUTO, "reduce": spec.reduce is None}
    given, machine = spec.given - {name for name, is_open in left_open.items() if is_open}, load(hardware)
    spec = by_flags(spec, params_like)
    if spec.device is None and machine.type:
        spec = replace(spec, device=machine.type)  # what it runs on decides what it sends, and when it waits
    budget = memory if memory is not None else spec.device_bytes or machine.budget
    if type(world_size) is not int or world_size < 1:
        raise SpecError(f"fzero.plan(world_size={world_size!r}): needed a positive int")
    if type(budget) is not int or budget < 1:
        raise SpecError(f"fzero.plan(memory={budget!r}): needed a positive int, bytes of a rank's device")
    if world_size > machine.devices:
        raise SpecError(
            f"fzero.plan(world_size={world_size}): hardware {machine.name!r} joins {machine.devices} devices: add a "
            "[[level]] to its file, or plan for fewer"
        )
    if machine.disk is None and "nvme" in spec.memory.offload_rules.values():
        raise SpecError(
            f"fzero.plan: offload={spec.offload!r} needs a disk, and hardware {machine.name!r} has none: add [disk] to "
            "its file, with read_bytes and write_bytes, as `fzero doctor --hardware` measures them"
        )
    batch_of, rows = by_rows(tree.plain(batch_like))
    if not rows:
        raise SpecError("batch_like: its tensors have no rows: needed the global batch")
    params_like = _as_shapes(spec, params_like)
    layers = _layers(spec, params_like)
    equal = layers_of(params_like) if spec.loss is not None else None
    return Problem(spec, given, params_like, batch_of, rows, layers, equal, world_size, machine, budget)


def by_rows(batch: Any) -> tuple[Callable[[int], Any], int]:
    """(the batch of a number of rows, on meta; the rows of the whole one)."""
    leaves = [x for x in tree.flatten(batch)[1] if isinstance(x, torch.Tensor)]
    counts = {int(x.shape[0]) for x in leaves if x.dim()}
    if len(counts) != 1:
        raise SpecError(
            f"batch_like: its tensors have {sorted(counts)} rows along dim 0: needed the global batch, "
            "whose tensors have one number of rows"
        )

    def part(x: Any, rows: int) -> Any:
        if not isinstance(x, torch.Tensor) or not x.dim():
            return x
        return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta")

    return lambda rows: tree.map(lambda x: part(x, rows), batch), counts.pop()


def _as_shapes(spec: Spec, params_like: Any) -> Any:
    """The parameters as tensors on meta, where a function of a key makes them: layers are found and left out there."""
    if not callable(params_like) or spec.loss is None:
        return params_like
    recipe = recipe_for(spec, params_like, None, torch.device("cpu"))
    shapes = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in recipe.values]
    return tree.unflatten(recipe.treedef, shapes)["params"]


def _layers(spec: Spec, params_like: Any) -> int:
    recipe = recipe_for(spec, params_like, None, torch.device("cpu"))
    below = [path.partition("/")[2] for path in recipe.paths if path.startswith("params/")]
    return len({layer for path in below for layer, numbered in [layer_of(path)] if numbered})
