"""reference: the semantics sentence, run.

State is replicated on every rank and every reduction is an all-reduce in rank order. It interprets the *captured
graph*, before any plan or pass, all ranks in one process. A program agrees with it within rounding (a sum over
slices is not bitwise the sum of the whole); programs agree with one another bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fzero import segments
from fzero.capture import Graph, Region


def reference(
    graph: Graph, state: Sequence[Sequence[torch.Tensor]], batches: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[list[torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """One step: per rank the new state's leaves and the metrics, from per rank the leaves of state and batch."""
    n = len(batches)
    constants = list(graph.constants.values())
    values: list[dict[fx.Node, Any]] = []
    for rank in range(n):
        inputs = [*state[rank], *batches[rank], *constants]
        values.append(dict(zip(segments.placeholders(graph.gm.graph), inputs, strict=True)))
    for node in graph.gm.graph.nodes:
        if node.op != "call_function":
            continue
        args: list[Any] = [fx.node.map_arg((node.args, node.kwargs), own.__getitem__) for own in values]
        if node.target is torch.ops.fzero.region.default:
            results: list[Any] = [_region(graph.regions[a[0][1]], a[0][0]) for a in args]
        elif node.target is torch.ops.fzero.reduce.default:
            results = [_all_reduce([a[0][0] for a in args], node.args[1])] * n
        else:
            results = [node.target(*a[0], **a[1]) for a in args]
        for own, result in zip(values, results, strict=True):
            own[node] = result
    outs = [[own[node] for node in segments.outputs(graph.gm.graph)] for own in values]
    num = len(graph.state_paths)
    metrics = [dict(zip(graph.metric_names, out[num:], strict=True)) for out in outs]
    return [out[:num] for out in outs], metrics


def _region(region: Region, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The mean over microbatches of everything a region returns."""
    k = region.microbatches
    totals: list[torch.Tensor] = []
    for m in range(k):
        feed = [x.chunk(k)[m] if cut else x for x, cut in zip(inputs, region.sliced, strict=True)]
        outs = region.gm(*feed)
        totals = [t + o for t, o in zip(totals, outs, strict=True)] if m else list(outs)
    return [t / k for t in totals] if k > 1 else totals


def _all_reduce(parts: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = torch.maximum(total, part) if how == "max" else total + part
    return total / len(parts) if how == "mean" else total
