"""region: one `value_and_grad` of a step, traced as a graph of its own, and its one node in the step's graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import real_tensors, unrecorded
from fzero.capture.beside_uses import beside_uses
from fzero.capture.cast_first import cast_first
from fzero.capture.context import current
from fzero.capture.graph import Region, Roles
from fzero.capture.leaves import fake_like
from fzero.capture.provenance import user_line
from fzero.capture.step_ops import REGION
from fzero.capture.tracing import lifted, trace
from fzero.ir import as_strided, fx_nodes, fx_values, segments


def add_region(
    fn: Callable[..., Any],
    roles: Callable[[], Roles],
    leaves: Sequence[torch.Tensor],
    names: Sequence[str],
    others: Sequence[torch.Tensor],
    *,
    microbatches: int,
    sliced: Sequence[bool],
    changing: Collection[int] = (),
) -> list[torch.Tensor]:
    """Traces `fn(*leaves, *others) -> [loss, *grads, *rest]` as a region; returns the outputs of its one new node.

    `names` are those of the inputs in errors. Inputs in `others` that are marked in `sliced` are cut along dim 0 into
    `microbatches` parts. changing: as of `trace`. `roles()` is called after `fn` was traced, and returns the meaning of
    its outputs.
    """
    tracing = current()
    inputs = [*leaves, *(x.contiguous() if cut else x for x, cut in zip(others, sliced, strict=True))]
    tracing.depth += 1
    try:
        with unrecorded(), tracing.mode:
            parts = []
            for x, cut in zip(map(fx_values.dense_like, inputs), (*(False for _ in leaves), *sliced), strict=True):
                shape = (x.shape[0] // microbatches, *x.shape[1:]) if cut else x.shape
                parts.append(torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device))
            gm = trace(tracing, fn, parts, names, changing)
            with real_tensors():
                extra = lifted(gm, len(parts))
    finally:
        tracing.depth -= 1
        tracing.phase = None
    for node in fx_nodes.placeholders(gm.graph)[len(parts) :]:
        node.meta["val"] = fake_like(tracing.mode, node.meta["val"])
    segments.normalised(gm)
    cuts = (*(False for _ in leaves), *sliced, *(False for _ in extra))
    holders = fx_nodes.placeholders(gm.graph)
    with unrecorded():
        cast_first(gm, [x for x, cut in zip(holders, cuts, strict=True) if not cut])
    beside_uses(gm, [*holders[: len(leaves)], *holders[len(parts) :]])
    if microbatches > 1:
        with unrecorded():
            as_strided.aligned(gm, [holder for holder, cut in zip(holders, cuts, strict=True) if cut])
    _finish_early(gm)
    values = tuple(node.meta["val"] for node in fx_nodes.outputs(gm.graph))
    index = len(tracing.regions)
    of = roles()
    tracing.regions.append(
        Region(gm, values, of.grad_of, of.summed, of.wire, sliced=cuts, microbatches=microbatches, source=user_line())
    )
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    with torch.set_grad_enabled(differentiated):  # what is closed over is a constant, whether it requires grad or not
        return REGION([*inputs, *extra], index)


def _finish_early(gm: fx.GraphModule) -> None:
    """Moves the casts that follow the backward up, each to where its gradient is complete. In place."""
    for node in list(gm.graph.nodes):
        if node.meta.get("phase") == "finish":
            node.meta["phase"] = "backward"
            latest = max(node.all_input_nodes)
            if latest.op == "call_function":
                latest.append(node)
