"""reference: the meaning of a captured step, computed directly.

State is replicated on every rank, and every reduction is an all-reduce in rank order. This interprets the *captured
graph*, before any plan or pass, with all ranks in one process. A program agrees with it within rounding (a sum over
slices is not bitwise the sum of the whole). Programs agree with one another bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fzero.capture.graph import Graph, Region
from fzero.ir import fx_nodes
from fzero.kernels.codecs import codec_named, decode, encode


def reference(
    graph: Graph, state: Sequence[Sequence[torch.Tensor]], batches: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[list[torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Returns the results of one step: for each rank the leaves of the new state and the metrics.

    state, batches: for each rank the leaves of its state and of its batch.
    """
    n = len(batches)
    constants = list(graph.constants.values())
    values: list[dict[fx.Node, Any]] = []
    for rank in range(n):
        inputs = [*state[rank], *batches[rank], *constants]
        values.append(dict(zip(fx_nodes.placeholders(graph.gm.graph), inputs, strict=True)))
    for node in graph.gm.graph.nodes:
        if node.op != "call_function":
            continue
        args: list[Any] = [fx.node.map_arg((node.args, node.kwargs), own.__getitem__) for own in values]
        if node.target is torch.ops.fzero.region.default:
            results: list[Any] = [_region(graph.regions[a[0][1]], a[0][0]) for a in args]
        elif node.target is torch.ops.fzero.reduce.default:
            results = [_all_reduce([a[0][0] for a in args], node.args[1])] * n
        elif node.target is torch.ops.fzero.coded_mean.default:
            results = _coded_mean([a[0] for a in args])
        elif node.target is torch.ops.fzero.fed_mean.default:
            results = _fed_mean([a[0] for a in args])
        elif node.target is torch.ops.fzero.axis_index.default:
            results = [node.target(*a[0]) + rank for rank, a in enumerate(args)]
        else:
            results = [node.target(*a[0], **a[1]) for a in args]
        for own, result in zip(values, results, strict=True):
            own[node] = result
    outs = [[own[node] for node in fx_nodes.outputs(graph.gm.graph)] for own in values]
    num = len(graph.state_paths)
    metrics = [dict(zip(graph.metric_names, out[num:], strict=True)) for out in outs]
    return [out[:num] for out in outs], metrics


def _region(region: Region, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A region's outputs over all microbatches: the mean of floating ones, the sum of `summed` ones, the last of
    integers."""
    k = region.microbatches
    runs = []
    for m in range(k):
        feed = [x.chunk(k)[m] if cut else x for x, cut in zip(inputs, region.sliced, strict=True)]
        runs.append(region.gm(*feed))
    results = []
    for i, parts in enumerate(zip(*runs, strict=True)):
        if i in region.summed:
            results.append(sum(parts))
        else:
            results.append(sum(parts) / k if parts[0].dtype.is_floating_point else parts[-1])
    return results if k > 1 else list(runs[0])


def _coded_mean(calls: Sequence[Sequence[Any]]) -> list[list[torch.Tensor]]:
    """By rank, the mean of what all ranks send, decoded and added in their order, and the new errors.

    Each leaf is coded by itself."""
    n, (first, _, sizes, name, both, _) = len(calls), calls[0]
    if n == 1:
        return [[sum(calls[0][1], start=first.clone()), *map(torch.zeros_like, calls[0][1])]]
    codec = codec_named(name)

    def through(flat: torch.Tensor) -> torch.Tensor:
        """What comes back of a value that was coded; padding stays zero."""
        back, at = torch.zeros_like(flat), 0
        for size in sizes:
            back[at : at + size] = decode(encode(flat[at : at + size], codec), size, codec)
            at += -(-size // 64) * 64
        return back

    values = [x + errors[0] if errors else x for x, errors, *_ in calls]
    backs = [through(value) for value in values]
    mean = sum(backs[1:], start=backs[0]) / n
    results = [[value - back] if call[1] else [] for value, back, call in zip(values, backs, calls, strict=True)]
    if both:
        length = -(-len(first) // (64 * n)) * 64
        owed = torch.cat([call[1][1] for call in calls])[: len(first)] if calls[0][1] else torch.zeros_like(mean)
        sent = through(mean + owed)
        lost = torch.nn.functional.pad(mean + owed - sent, (0, n * length - len(first))).view(n, length)
        for rank, own in enumerate(results):
            own += [lost[rank]] if calls[0][1] else []
        mean = sent
    return [[mean, *own] for own in results]


def _fed_mean(calls: Sequence[Sequence[Any]]) -> list[list[torch.Tensor]]:
    """By rank, the mean or sum of what all ranks send of a gradient, and the new errors."""
    _, _, name, how, _ = calls[0]
    values = [x.float() + error for x, error, *_ in calls]
    if len(calls) == 1:
        return [[values[0], torch.zeros_like(values[0])]]
    codec = codec_named(name)
    flat = [encode(value.reshape(-1), codec) for value in values]
    backs = [decode(message, values[0].numel(), codec).view(values[0].shape) for message in flat]
    mean = _all_reduce(backs, how)
    return [[mean, value - back] for value, back in zip(values, backs, strict=True)]


def _all_reduce(parts: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = torch.maximum(total, part) if how == "max" else total + part
    return total / len(parts) if how == "mean" else total
