"""resolve: a Spec, taken apart once into records for capture and passes. None of them sees a Spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroError, SpecError
from fzero.functional import forward
from fzero.ir.mesh import PIPELINE, Mesh
from fzero.pipeline import Pipeline
from fzero.plan.parallelism import AUTO
from fzero.precision import Precision
from fzero.spec import Spec
from fzero.training import training_of


@dataclass(frozen=True)
class TrainStep:
    """The step to capture, `user(state, batch)`. Errors name `loss`."""

    user: Callable[..., Any]
    loss: Callable[..., Any]
    microbatches: int
    precision: Precision
    allow_unused: bool
    loss_chunks: int | None = None


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
    compile: str | None
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
    elif callable(spec.step):
        user, loss = spec.step, spec.step
    else:
        assert spec.loss is not None
        user, loss = training_of(spec).step, spec.loss
    return TrainStep(
        user,
        loss,
        spec.microbatches,
        spec.numerics.policy,
        spec.allow_unused,
        None if fn is not None else spec.loss_chunks,
    )


def lowering_options(spec: Spec) -> LoweringOptions:
    """The fields of a spec that the program depends on."""
    return LoweringOptions(
        reduce=spec.reduce,
        prefetch=spec.prefetch,
        gather_bytes=spec.gather_bytes,
        prefetch_bytes=spec.prefetch_bytes,
        overlap=spec.overlap,
        remat=spec.memory.remat_rules,
        update_on=spec.update_on,
        offloads=spec.offload is not None,
        gradients=spec.memory.gradient_rules,
        device_bytes=spec.device_bytes,
        host_bytes=spec.host_bytes,
        compile=spec.compile,
        matmul=spec.matmul,
        cuda_graph=spec.cuda_graph,
        pipeline=spec.parallel.order,
        sequence=spec.sequence,
    )


def mesh_of(spec: Spec, world_size: int | None = None) -> Mesh:
    """The mesh of a spec for a world of this size; None: the mesh's own, with 1 for what it leaves open.

    Raises SpecError where the axes do not make that world.
    """
    if spec.mesh == AUTO:
        raise SpecError(
            "mesh='auto': fzero.init(..., batch_like=, hardware=) plans it, with what else is open. Here plan first: "
            "spec = fzero.plan(spec, params, batch, world_size=..., hardware=...).spec"
        )
    axes = spec.parallel.axes or {"dp": -1}
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
        trained = flagged(params)
    except FzeroError:
        return spec
    return spec if trained is None else spec.but(trainable=trained)


def flagged(params: Any) -> tuple[str, ...] | None:
    """The paths of the parameters that require grad, where others do not; else None: all train."""
    leaves = zip(*tree.flatten(params)[:2], strict=True)
    floats = [
        (path, leaf.requires_grad)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
    ]
    trained = tuple(path for path, flag in floats if flag)
    return trained if 0 < len(trained) < len(floats) else None
