"""leafwise: segments that do one thing to each of several leaves, each a range of a bucket.

x0 x1 -> into0 into1:   copy_(into0, f(x0));  copy_(into1, f(x1))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode, fake_empty
from fzero.ir import segments


@dataclass(frozen=True)
class LeafCall:
    """`target(x, *args, **kwargs)` for a 1-D `x` of `numel` elements like `source`; the result is like `result`, 0-d
    or 1-D of `gives` elements."""

    target: Any
    source: torch.Tensor
    result: torch.Tensor
    numel: int
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    gives: int | None = None


def leafwise(calls: Sequence[LeafCall]) -> fx.GraphModule:
    """The segment of these calls: their operands, then one destination for each."""
    graph = fx.Graph()
    holders = [graph.placeholder(f"x{i}") for i in range(len(calls))]
    targets = [graph.placeholder(f"into{i}") for i in range(len(calls))]
    results = []
    mode = FakeTensorMode()
    for call, holder, target in zip(calls, holders, targets, strict=True):
        shape = () if call.gives is None else (call.gives,)
        holder.meta["val"] = fake_empty(mode, (call.numel,), call.source.dtype, call.source.device)
        target.meta["val"] = fake_empty(mode, shape, call.result.dtype, call.result.device)
        results.append(graph.call_function(call.target, (holder, *call.args), dict(call.kwargs)))
        results[-1].meta["val"] = target.meta["val"]
    for target, value in zip(targets, results, strict=True):
        graph.call_function(torch.ops.aten.copy_.default, (target, value)).meta["val"] = target.meta["val"]
    graph.output([])
    return segments.module(graph)
