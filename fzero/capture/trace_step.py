"""trace_step: a user's step, traced once on fake tensors into a `Graph`.

Two levels. The *outer* graph is everything done to the state. Each `fzero.value_and_grad` in it is one node, a
*region*, whose own joint graph (forward and backward of that loss, at the shape of one microbatch) is traced by
itself. Reductions over mesh axes are nodes too (`fzero::reduce`), put there by `value_and_grad` and `pmean`, so that
nothing that moves between ranks has to be guessed later. No device and no process group takes part.

Nothing is baked in silently: see `fzero.capture.tracing` for what is refused; a closed-over tensor becomes a named
constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fzero import tree
from fzero._torch_compat import FakeTensorMode, disable_proxy_modes_tracing, real_tensors
from fzero.capture.known import Baked
from fzero.capture.provenance import describe, found_name, user_line
from fzero.capture.tracing import Tracing, check_leaf, check_names, current, fake_like, lifted, trace, while_active
from fzero.errors import CaptureError, TreeError, at
from fzero.ir import as_strided, fx_nodes, fx_values, segments
from fzero.precision import LOW, Precision

aten = torch.ops.aten


@dataclass(frozen=True)
class Region:
    """One `value_and_grad`: its joint graph and what its inputs and outputs are.

    Outputs are the loss, one gradient per entry of `grad_of` (the index of the input it belongs to), then the rest.
    Over microbatches outputs are averaged, those in `summed` added, and integers are the last part's. Gradients travel
    in the dtype that `wire` says. Inputs marked in `sliced` carry the batch in dim 0 and are cut into `microbatches`.
    """

    gm: fx.GraphModule
    values: tuple[torch.Tensor, ...]
    grad_of: tuple[int, ...]
    summed: frozenset[int]
    wire: Mapping[int, torch.dtype]
    sliced: tuple[bool, ...]
    microbatches: int
    source: str


@dataclass(frozen=True)
class Graph:
    """A captured step. Placeholders of `gm` are the state's leaves, the batch's leaves, then the constants."""

    gm: fx.GraphModule
    regions: tuple[Region, ...]
    state_paths: tuple[str, ...]
    batch_paths: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    metric_names: tuple[str, ...]
    metrics_spec: Any
    varying_metrics: tuple[str, ...]
    baked: tuple[Baked, ...] = ()  # closed-over tensors whose values have decided it


def capture(
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    *,
    microbatches: int = 1,
    allow_unused: bool = False,
    precision: Precision | None = None,
    axis: str = "dp",
    per_rank: Sequence[str] = (),
    fns: Sequence[Callable[..., Any]] = (),
) -> Graph:
    """The graph of `step(state, batch) -> (new state, metrics)`.

    `state` and `batch` are pytrees whose tensor leaves give shapes, dtypes and devices (fake or real, never read). A
    leaf of `batch` that is no tensor is passed to `step` as it is. Raises CaptureError or TreeError, naming leaf and
    line.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state_paths, state_leaves, state_spec = tree.flatten(state)
    batch_paths, batch_leaves, batch_spec = tree.flatten(batch)
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in batch_leaves]
    inputs = [fake_like(mode, leaf) for leaf in state_leaves]
    inputs += [fake_like(mode, leaf) for leaf, tensor in zip(batch_leaves, is_tensor, strict=True) if tensor]
    shown: dict[str, Any] = {}

    def flat(*flat_inputs: torch.Tensor) -> list[Any]:
        feed = iter(flat_inputs[len(state_leaves) :])
        full = [next(feed) if tensor else leaf for leaf, tensor in zip(batch_leaves, is_tensor, strict=True)]
        result = step(tree.unflatten(state_spec, flat_inputs[: len(state_leaves)]), tree.unflatten(batch_spec, full))
        new_leaves = _check_result(result, state_paths, state_leaves, state_spec, per_rank)
        names, metrics, spec = tree.flatten(result[1])
        check_names("metrics", names)
        for name, value in zip(names, metrics, strict=True):
            if not isinstance(value, torch.Tensor):
                raise CaptureError(
                    f"metric {name!r} is the Python value {value!r}: it would stay what it was at the first step. "
                    "Return a tensor computed from the state or the batch, or keep it out of the metrics"
                )
            check_leaf(at("metrics", name), value)
        shown.update(names=tuple(names), spec=spec)
        return [*new_leaves, *metrics]

    names = [at("state", p) for p in state_paths]
    names += [at("batch", p) for p, tensor in zip(batch_paths, is_tensor, strict=True) if tensor]
    tracing = Tracing(mode, (*fns, step), microbatches, allow_unused, axis, precision or Precision())
    with while_active(tracing):
        gm = trace(tracing, flat, inputs, names)
        constants = _lift(tracing, gm)
    _fold_updates(gm)
    segments.normalised(gm)
    graph = Graph(
        gm,
        tuple(tracing.regions),
        tuple(state_paths),
        tuple(p for p, tensor in zip(batch_paths, is_tensor, strict=True) if tensor),
        constants,
        shown["names"],
        shown["spec"],
        (),
        tracing.known.baked(tracing.fns),
    )
    return Graph(**{**graph.__dict__, "varying_metrics": _varying_metrics(graph, per_rank)})


def _varying_metrics(graph: Graph, per_rank: Sequence[str]) -> tuple[str, ...]:
    """The metrics that may differ between ranks. Raises CaptureError for a leaf of the state that would."""
    varying = varying_nodes(graph, per_rank)
    outs = fx_nodes.outputs(graph.gm.graph)
    num = len(graph.state_paths)
    for path, node in zip(graph.state_paths, outs[:num], strict=True):
        if node in varying and path not in per_rank:
            where = node.meta.get("source") or "the step"
            raise CaptureError(
                f"{at('state', path)} would differ between ranks: it is computed at {where} from this rank's batch "
                "without a reduction. Reduce it with fzero.pmean, or keep one per rank with fzero.per_rank"
            )
    return tuple(name for name, node in zip(graph.metric_names, outs[num:], strict=True) if node in varying)


def varying_nodes(graph: Graph, per_rank: Sequence[str]) -> set[fx.Node]:
    """The nodes whose value may differ between ranks: what depends on the batch without a reduction in between."""
    inputs = fx_nodes.placeholders(graph.gm.graph)
    num = len(graph.state_paths)
    varying = {n for path, n in zip(graph.state_paths, inputs, strict=False) if path in per_rank}
    varying |= set(inputs[num : num + len(graph.batch_paths)])
    for node in graph.gm.graph.nodes:
        if node.op != "call_function" or node.target is torch.ops.fzero.reduce.default:
            continue
        index = node.target is torch.ops.fzero.axis_index.default
        if index or any(argument in varying for argument in node.all_input_nodes):
            varying.add(node)
    return varying


@dataclass(frozen=True)
class PerRank:
    """A leaf of which every rank keeps its own: made by `fzero.per_rank`."""

    value: Any


def _check_result(result: Any, paths: list[str], leaves: list[Any], spec: Any, per_rank: Sequence[str]) -> list[Any]:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise CaptureError(
            f"a step returns (new state, metrics), this one returned {type(result).__name__}. "
            "Without metrics, return (state, {})"
        )
    new_paths, new_leaves, _ = tree.flatten(result[0])
    if new_paths != paths:
        lost, extra = sorted(set(paths) - set(new_paths)), sorted(set(new_paths) - set(paths))
        first = (
            f"{at('state', lost[0])} is missing"
            if lost
            else f"{at('state', extra[0])} is new"
            if extra
            else "its order differs"
        )
        raise TreeError(f"the step's new state has another structure than its state: {first}. Return the same pytree")
    for path, old, new in zip(paths, leaves, new_leaves, strict=True):
        if isinstance(new, PerRank):
            if path not in per_rank:
                raise CaptureError(f"{at('state', path)} became per_rank in the step: make it so in fzero.init too")
            new = new.value
        name = at("state", path)
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


def _back(old: torch.Tensor, new: torch.Tensor) -> str:
    narrowed = old.shape == new.shape and new.dtype in LOW
    kept = ", or keep what it is computed with wide: Precision(compute=..., keep={'<its path>': 'fp32'})"
    return f"Cast or reshape it back{kept if narrowed else ''}"


def _lift(tracing: Tracing, gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    before = len(fx_nodes.placeholders(gm.graph))
    constants: dict[str, torch.Tensor] = {}
    values = lifted(gm, before)
    for node, value in zip(fx_nodes.placeholders(gm.graph)[before:], values, strict=True):
        name = found_name(value, tracing.fns) or f"{describe(value)}"
        name = name if name not in constants else f"{name}#{len(constants)}"
        constants[name] = value.detach().contiguous()  # as its fake is
        node.meta["val"] = fake_like(tracing.mode, value)
    return constants


def _fold_updates(gm: fx.GraphModule) -> None:
    """apply_delta(p, delta(new, p)) is new: the optimizer's kernel makes parameters, optax's shape asks for updates.

    So it is where the step was made on a wider p, and where a flag keeps the old: apply_delta(p, where(flag, delta(new,
    p), 0)) is where(flag, new, p).
    """
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.fzero.apply_delta.default:
            with gm.graph.inserting_before(node):
                new = _folded(node, *node.args)
            if new is not None:
                node.replace_all_uses_with(new)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _finish_early(gm: fx.GraphModule) -> None:
    """What is done to gradients after the backward (casts) is done to each where it is complete. In place."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        if node.meta.get("phase") == "finish":
            node.meta["phase"] = "backward"
            latest = max(node.all_input_nodes, key=order.__getitem__)
            order[node] = order[latest]
            if latest.op == "call_function":
                latest.append(node)


def _folded(node: fx.Node, old: fx.Node, update: fx.Node) -> fx.Node | None:
    """The new value, of old's dtype, that `old + update` stands for, or None; new nodes take the place of `node`."""

    def made(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        result = node.graph.call_function(target, args, kwargs)
        result.meta = dict(node.meta)
        return result

    if update.target is torch.ops.fzero.delta.default:
        new, base = update.args
        assert isinstance(new, fx.Node)
        if base is old or _equal_casts(base, old):
            return new
        if _equal_casts(base, base) and base.args[0] is old:  # type: ignore[union-attr]
            return made(aten._to_copy.default, new, dtype=node.meta["val"].dtype)
    elif update.target is aten.where.self:
        flag, value, zero = update.args
        if isinstance(zero, fx.Node) and zero.target is aten.zeros.default and isinstance(value, fx.Node):
            new = _folded(node, old, value)
            return None if new is None else made(aten.where.self, flag, new, old)
    return None


def _equal_casts(a: Any, b: Any) -> bool:
    casts = all(isinstance(n, fx.Node) and n.target is aten._to_copy.default for n in (a, b))
    return casts and (a.args, a.kwargs) == (b.args, b.kwargs)


# --- regions ----------------------------------------------------------------------------------------------------------


def add_region(
    fn: Callable[..., Any],
    shown: Callable[[], Mapping[str, Any]],
    leaves: Sequence[torch.Tensor],
    names: Sequence[str],
    others: Sequence[torch.Tensor],
    **how: Any,
) -> list[torch.Tensor]:
    """Traces `fn(*leaves, *others) -> [loss, *grads, *rest]` as a region and puts its one node into the outer graph.

    `shown()` tells afterwards the `Region`'s grad_of, summed and wire.
    """
    tracing = current()
    microbatches, sliced = how["microbatches"], how["sliced"]
    inputs = [*leaves, *(x.contiguous() if cut else x for x, cut in zip(others, sliced, strict=True))]
    tracing.depth += 1
    try:
        with disable_proxy_modes_tracing(), tracing.mode:
            own = []
            for x, cut in zip(map(fx_values.dense_like, inputs), (*(False for _ in leaves), *sliced), strict=True):
                shape = (x.shape[0] // microbatches, *x.shape[1:]) if cut else x.shape
                own.append(torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device))
            gm = trace(tracing, fn, own, names)
            with real_tensors():
                extra = lifted(gm, len(own))
    finally:
        tracing.depth -= 1
        tracing.phase = None
    for node in fx_nodes.placeholders(gm.graph)[len(own) :]:
        node.meta["val"] = fake_like(tracing.mode, node.meta["val"])
    segments.normalised(gm)
    if microbatches > 1:
        holders = fx_nodes.placeholders(gm.graph)[len(leaves) :]
        with disable_proxy_modes_tracing():
            as_strided.aligned(gm, [holder for holder, cut in zip(holders, sliced, strict=False) if cut])
    _finish_early(gm)
    values = tuple(node.meta["val"] for node in fx_nodes.outputs(gm.graph))
    flags = (*(False for _ in leaves), *sliced, *(False for _ in extra))
    index = len(tracing.regions)
    tracing.regions.append(Region(gm, values, **shown(), sliced=flags, microbatches=microbatches, source=user_line()))
    return torch.ops.fzero.region([*inputs, *extra], index)
