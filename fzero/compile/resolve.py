"""resolve: a Spec, taken apart once into records for capture, layout and passes. None of them sees a Spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroError, SpecError
from fzero.functional import forward
from fzero.ir.mesh import PIPELINE, Mesh, parts_of
from fzero.pipeline import Pipeline
from fzero.plan.stages import Columns, Stage
from fzero.precision import Precision
from fzero.shard.partition import P
from fzero.spec import DEFAULT_PARAMS, GRADS, SPACE_OF, Spec, by_column
from fzero.training import training_of


@dataclass(frozen=True)
class TrainStep:
    """The step to capture, `user(state, batch)`. Errors name `loss`."""

    user: Callable[..., Any]
    loss: Callable[..., Any]
    microbatches: int
    precision: Precision
    allow_unused: bool


@dataclass(frozen=True)
class LayoutRules:
    """Path rules for the places of leaves, and the size at which buckets are cut."""

    zero: Stage | Mapping[str, Stage]
    params: tuple[str, ...]
    params_given: bool
    trainable: tuple[str, ...]
    remat: Mapping[str, str]
    bucket_bytes: int | None
    shard: Mapping[str, P]
    offload: Mapping[str, str]
    gathered_dtype: Callable[[str, torch.Tensor], torch.dtype]


@dataclass(frozen=True)
class LoweringOptions:
    """The choices that a spec makes about a program. None: the choice is made by measurement, or by a rule."""

    reduce: str | None
    prefetch: int | None
    gather_bytes: int | None
    prefetch_bytes: int | None
    overlap: bool
    remat: Mapping[str, str]
    update_on: str | None
    offloads: bool
    gradients: Mapping[str, str]
    device_bytes: int | None
    host_bytes: int | None
    compile: str
    matmul: str
    cuda_graph: bool
    pipeline: Pipeline
    sequence: str | None


def train_step(spec: Spec, fn: Callable[..., Any] | None = None) -> TrainStep:
    """The step of a spec, or the evaluation of `fn`: a step that changes nothing and returns fn's result as metrics.

    The batch of an evaluation is {"batch", "key"}.
    """
    if fn is not None:
        user, loss = _evaluation(spec, fn), fn
    elif spec.step is not None:
        user, loss = spec.step, spec.step
    else:
        assert spec.loss is not None
        user, loss = training_of(spec).step, spec.loss
    return TrainStep(user, loss, spec.microbatches, spec.policy, spec.allow_unused)


def layout_rules(spec: Spec) -> LayoutRules:
    """The fields of a spec that the layout reads."""
    return LayoutRules(
        zero=_stages(spec.zero, mesh_of(spec).data_axes),
        params=spec.param_rules,
        params_given=spec.params != DEFAULT_PARAMS,
        trainable=spec.trainable_rules or (),
        remat=spec.remat_rules,
        bucket_bytes=spec.bucket_bytes,
        shard=spec.shard or {},
        offload=spec.offload_rules,
        gathered_dtype=spec.policy.gathered_dtype,
    )


def _stages(zero: Any, data_axes: str) -> Stage | Mapping[str, Stage]:
    """`Spec(zero=...)` as a stage, or as path rules to stages."""
    inner, every = parts_of(data_axes)[-1:], parts_of(data_axes)
    if zero == "hsdp":
        return Columns(inner, inner, inner)
    if zero == "hpz":
        return Columns(every, every, every, copy=inner)
    if by_column(zero):
        return Columns(tuple(zero["params"]), tuple(zero["grads"]), tuple(zero["optimizer"]))
    stages: Stage | Mapping[str, Stage] = zero
    return stages


def lowering_options(spec: Spec) -> LoweringOptions:
    """The fields of a spec that the program depends on."""
    return LoweringOptions(
        reduce=spec.reduce,
        prefetch=spec.prefetch,
        gather_bytes=spec.gather_bytes,
        prefetch_bytes=spec.prefetch_bytes,
        overlap=spec.overlap,
        remat=spec.remat_rules,
        update_on=spec.update_on,
        offloads=spec.offload is not None,
        gradients={
            rule.removeprefix(GRADS): SPACE_OF[to] for rule, to in spec.offload_rules.items() if rule.startswith(GRADS)
        },
        device_bytes=spec.device_bytes,
        host_bytes=spec.host_bytes,
        compile=spec.compile,
        matmul=spec.matmul,
        cuda_graph=spec.cuda_graph,
        pipeline=pipeline_of(spec),
        sequence=spec.sequence,
    )


def pipeline_of(spec: Spec) -> Pipeline:
    """The order of work that a spec asks for; 1F1B where it names none."""
    return spec.pipeline if isinstance(spec.pipeline, Pipeline) else Pipeline(spec.pipeline or Pipeline.schedule)


def mesh_of(spec: Spec, world_size: int | None = None) -> Mesh:
    """The mesh of a spec for a world of this size; None: the mesh's own, with 1 for what it leaves open.

    Raises SpecError where the axes do not make that world.
    """
    axes = spec.mesh or {"dp": -1}
    if world_size is None and axes.get(PIPELINE) == -1:
        raise SpecError(f"mesh={dict(axes)}: how many roles there are follows from the world. Give world_size=, or pp")
    return Mesh.of({**axes, "dp": axes.get("dp", 1)}, world_size)


def _evaluation(spec: Spec, fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def step(state: Any, inputs: Any) -> Any:
        params = state if spec.loss is None else state["params"]
        return state, {"result": forward(fn, key=inputs["key"])(params, inputs["batch"])}

    return step


def by_flags(spec: Spec, params: Any) -> Spec:
    """The spec, with `trainable` filled in from the parameters' `requires_grad`.

    This happens only if the spec names none, and some parameters require grad and others do not. An error in the
    parameters is raised later, where all ranks learn of it.
    """
    if spec.loss is None or spec.trainable is not None or callable(params):
        return spec
    try:
        leaves = zip(*tree.flatten(params)[:2], strict=True)
    except FzeroError:
        return spec
    floats = [
        (path, leaf.requires_grad)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
    ]
    trained = [path for path, flag in floats if flag]
    return replace(spec, trainable=tuple(trained)) if 0 < len(trained) < len(floats) else spec
