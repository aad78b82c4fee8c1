"""resolve: a Spec, taken apart once into what the capture, the layout and the passes read. None of them sees a Spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import tree
from fzero.errors import FzeroError
from fzero.functional import forward
from fzero.precision import Precision
from fzero.spec import DEFAULT_PARAMS, Spec
from fzero.training import training_of


@dataclass(frozen=True)
class TrainStep:
    """What is captured: `user(state, batch)`, in which `loss` is named by errors."""

    user: Callable[..., Any]
    loss: Callable[..., Any]
    microbatches: int
    precision: Precision
    allow_unused: bool


@dataclass(frozen=True)
class LayoutRules:
    """Where leaves go: path rules, and where buckets are cut."""

    zero: int | Mapping[str, int]
    params: tuple[str, ...]
    params_given: bool
    trainable: tuple[str, ...]
    remat: Mapping[str, str]
    bucket_bytes: int | None
    compute_dtype: Callable[[str, torch.dtype], torch.dtype]


@dataclass(frozen=True)
class LoweringOptions:
    """What may be chosen of a program. None: by measurement, or by rule."""

    reduce: str | None
    prefetch: int | None
    gather_bytes: int | None
    overlap: bool
    remat: Mapping[str, str]
    compile: str
    matmul: str
    cuda_graph: bool


def train_step(spec: Spec, fn: Callable[..., Any] | None = None) -> TrainStep:
    """The step of a spec, or the evaluation of `fn`: a step that changes nothing and has fn's result as metrics.

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
    """What a spec says of the layout."""
    return LayoutRules(
        zero=spec.zero,
        params=spec.param_rules,
        params_given=spec.params != DEFAULT_PARAMS,
        trainable=spec.trainable_rules or (),
        remat=spec.remat_rules,
        bucket_bytes=spec.bucket_bytes,
        compute_dtype=spec.policy.compute_dtype,
    )


def lowering_options(spec: Spec) -> LoweringOptions:
    """What a spec says of the program."""
    return LoweringOptions(
        reduce=spec.reduce,
        prefetch=spec.prefetch,
        gather_bytes=spec.gather_bytes,
        overlap=spec.overlap,
        remat=spec.remat_rules,
        compile=spec.compile,
        matmul=spec.products,
        cuda_graph=spec.cuda_graph,
    )


def _evaluation(spec: Spec, fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def step(state: Any, given: Any) -> Any:
        params = state if spec.loss is None else state["params"]
        return state, {"result": forward(fn, key=given["key"])(params, given["batch"])}

    return step


def by_flags(spec: Spec, params: Any) -> Spec:
    """The spec; where it does not say what trains and some of the parameters require grad and others do not, with
    `trainable` naming the former. What is wrong with the parameters is said later, where all ranks hear it."""
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
