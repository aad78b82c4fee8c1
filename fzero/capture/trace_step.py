"""trace_step: a user's step, traced once on fake tensors into a `Graph`.

There are two levels. The *outer* graph holds all the work on the state. Each `fzero.value_and_grad` in it is one node,
a *region*. A region has a joint graph of its own: forward and backward of that loss, at the shape of one microbatch.
Reductions over mesh axes are nodes too (`fzero::reduce`); `value_and_grad` and `pmean` add them. So later stages know
every transfer between ranks. No device and no process group takes part.

Nothing is baked in silently: `fzero.capture.tracing` lists the refusals. A closed-over tensor becomes a named constant.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import fx

from fzero import tree
from fzero._torch_compat import FakeTensorMode, is_fake
from fzero.capture.context import Tracing, while_active
from fzero.capture.fold_updates import fold_updates
from fzero.capture.graph import Graph, PerRank
from fzero.capture.joint import no_tensor
from fzero.capture.known import Closed
from fzero.capture.leaf_like import refuse_cut_leaves
from fzero.capture.leaves import check_leaf, check_names, fake_like
from fzero.capture.provenance import called, describe, found_name
from fzero.capture.reads.noted import Reads
from fzero.capture.reads.reading import Reading
from fzero.capture.static import opened
from fzero.capture.tracing import lifted, trace
from fzero.capture.varying import varying_metrics, warn_of_whole, without_equal
from fzero.errors import CaptureError, TreeError, leaf_name
from fzero.ir import fx_nodes, segments
from fzero.ir.elsewhere import chosen_for, device_elsewhere, move, move_values, on_host
from fzero.precision import LOW, Precision

F = TypeVar("F", bound=Callable[..., Graph])


def _anywhere(capture: F) -> F:
    """`capture`, where the device of the state and the batch is elsewhere too (`fzero.ir.elsewhere`)."""

    @functools.wraps(capture)
    def called(step: Callable[..., Any], state: Any, batch: Any, **options: Any) -> Graph:
        away = device_elsewhere(leaf for given in (state, batch) for leaf in tree.flatten(given)[1])
        if away is None:
            return capture(step, state, batch, **options)
        with chosen_for(away):
            graph = capture(step, tree.map(on_host, state), tree.map(on_host, batch), **options)
        for gm in (graph.gm, *(region.gm for region in graph.regions)):
            move(gm, away)
        for region in graph.regions:
            move_values(region.values, away)
        return graph

    return cast("F", called)


@_anywhere
def capture(
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    *,
    axis: str,
    microbatches: int = 1,
    allow_unused: bool = False,
    precision: Precision | None = None,
    per_rank: Sequence[str] = (),
    fns: Sequence[Callable[..., Any]] = (),
) -> Graph:
    """The graph of `step(state, batch) -> (new state, metrics)`.

    `state` and `batch` are pytrees whose tensor leaves give shapes, dtypes and devices (fake or real, never read). A
    leaf of `batch` that is no tensor is passed to `step` as it is, a static one by its value. Raises CaptureError or
    TreeError, naming leaf and line.
    """
    mode, reading = FakeTensorMode(allow_non_fake_inputs=True), Reading((*fns, step))
    state_paths, state_leaves, state_treedef = tree.flatten(state)
    batch_paths, batch_leaves, batch_treedef = tree.flatten(batch)
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in batch_leaves]
    inputs = [fake_like(mode, leaf) for leaf in state_leaves]
    inputs += [fake_like(mode, leaf) for leaf in itertools.compress(batch_leaves, is_tensor)]
    metric_names: tuple[str, ...] = ()
    metrics_treedef: Any = None

    def flat(*flat_inputs: torch.Tensor) -> list[Any]:
        nonlocal metric_names, metrics_treedef
        feed = iter(flat_inputs[len(state_leaves) :])
        full = [next(feed) if tensor else opened(leaf) for leaf, tensor in zip(batch_leaves, is_tensor, strict=True)]
        state = tree.unflatten(state_treedef, flat_inputs[: len(state_leaves)])
        result = called(step, "(state, batch)", state, tree.unflatten(batch_treedef, full))
        new_leaves = _check_result(result, state_paths, state_leaves, per_rank)
        paths, metrics, metrics_treedef = tree.flatten(result[1])
        _check_metrics(paths, metrics)
        metric_names = tuple(paths)
        return [*new_leaves, *metrics]

    names = [leaf_name("state", p) for p in state_paths]
    names += [leaf_name("batch", p) for p in itertools.compress(batch_paths, is_tensor)]
    tracing = Tracing(mode, (*fns, step), microbatches, allow_unused, axis, precision or Precision())
    tracing.paused, tracing.traced = reading.paused, reading.table.settle
    tracing.devices = frozenset(["cpu", "meta", *(x.device.type for x in inputs)])
    tracing.static = _static(batch_paths, batch_leaves, is_tensor)
    with while_active(tracing):
        with reading:
            gm = trace(tracing, flat, inputs, names, range(len(state_leaves), len(inputs)))
        constants, closed, reads = _lift(tracing, gm, reading.noted())
    fold_updates(gm)
    segments.normalised(gm)
    fed, known = tuple(itertools.compress(batch_paths, is_tensor)), tracing.known.baked(tracing.fns)
    graph = Graph(
        gm, tuple(tracing.regions), tuple(state_paths), fed, constants, metric_names, metrics_treedef, (), known, reads,
        closed,
    )  # fmt: skip
    without_equal(graph, per_rank)
    refuse_cut_leaves(graph, per_rank)
    warn_of_whole(graph, per_rank)
    return replace(graph, varying_metrics=varying_metrics(graph, per_rank))


def _static(paths: list[str], leaves: list[Any], is_tensor: list[bool]) -> dict[int, str]:
    """The names of the batch's static tensors, by the id of their value."""
    values = zip(paths, map(opened, leaves), is_tensor, strict=True)
    return {id(x): leaf_name("batch", p) for p, x, tensor in values if isinstance(x, torch.Tensor) and not tensor}


def _check_result(result: Any, paths: list[str], leaves: list[Any], per_rank: Sequence[str]) -> list[Any]:
    """The leaves of the new state. Raises TreeError unless they keep the state's paths, shapes, dtypes and devices."""
    if not (isinstance(result, tuple) and len(result) == 2):
        raise CaptureError(
            f"a step returns (new state, metrics), this one returned {type(result).__name__}. "
            "Without metrics, return (state, {})"
        )
    new_paths, new_leaves, _ = tree.flatten(result[0])
    if new_paths != paths:
        lost, extra = sorted(set(paths) - set(new_paths)), sorted(set(new_paths) - set(paths))
        first = (
            f"{leaf_name('state', lost[0])} is missing"
            if lost
            else f"{leaf_name('state', extra[0])} is new"
            if extra
            else "its order differs"
        )
        raise TreeError(f"the step's new state has another structure than its state: {first}. Return the same pytree")
    for path, old, new in zip(paths, leaves, new_leaves, strict=True):
        if isinstance(new, PerRank):
            if path not in per_rank:
                raise CaptureError(
                    f"{leaf_name('state', path)} became per_rank in the step: make it so in fzero.init too"
                )
            new = new.value
        name = leaf_name("state", path)
        if not isinstance(new, torch.Tensor):
            raise CaptureError(
                f"{name} became the Python value {new!r}: it would stay what it was at the first step. "
                f"Compute it from the state, as in {name} + 1"
            )
        if tuple(new.shape) != tuple(old.shape) or new.dtype != old.dtype:
            raise TreeError(
                f"{name} was {describe(old)} and the step made it {describe(new)}: "
                f"a step keeps shapes and dtypes. {_back(old, new)}"
            )
        if new.device != old.device or new.layout is not torch.strided:
            raise TreeError(
                f"{name} was a dense tensor on {old.device} and the step made it {new.layout} on {new.device}: "
                "a step keeps devices and layouts"
            )
    return [new.value if isinstance(new, PerRank) else new for new in new_leaves]


def _check_metrics(paths: list[str], metrics: list[Any]) -> None:
    """Raises CaptureError for a metric that is no tensor, TreeError for one that no buffer can hold."""
    check_names("metrics", paths)
    for name, value in zip(paths, metrics, strict=True):
        if not isinstance(value, torch.Tensor):
            fix = "Return a tensor computed from the state or the batch, or keep it out of the metrics"
            raise no_tensor(f"metric {name!r}" if name else "metrics", value, fix)
        check_leaf(leaf_name("metrics", name), value)


def _back(old: torch.Tensor, new: torch.Tensor) -> str:
    narrowed = old.shape == new.shape and new.dtype in LOW
    keep_hint = ", or keep what it is computed with wide: Precision(compute=..., keep={'<its path>': 'fp32'})"
    return f"Cast or reshape it back{keep_hint if narrowed else ''}"


def _lift(
    tracing: Tracing, gm: fx.GraphModule, reads: Reads
) -> tuple[dict[str, torch.Tensor], tuple[Closed, ...], Reads]:
    """Makes closed-over tensors placeholders. Returns what a program reads by name, in the order of the placeholders,
    where it comes from, and `reads` with the modules that hold it."""
    before = len(fx_nodes.placeholders(gm.graph))
    constants: dict[str, torch.Tensor] = {}
    closed: list[Closed] = []
    values = lifted(gm, before)
    for node, value in zip(fx_nodes.placeholders(gm.graph)[before:], values, strict=True):
        name = tracing.static.get(id(value)) or found_name(value, tracing.fns) or f"{describe(value)}"
        name = name if name not in constants else f"{name}#{len(constants)}"
        constants[name] = value.detach().contiguous()  # as its fake is
        if not (value.is_meta or is_fake(value)):
            closed.append(Closed.of(value, constants[name], name))
        node.meta["val"] = fake_like(tracing.mode, value)
    return constants, tuple(closed), reads.with_tensors(values)
