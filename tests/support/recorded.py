"""recorded: graphs of functions, and what a rewrite makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fzero.ir.recorder import record
from fzero.shard.placements import Placement


def graph_of(fn: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    with FakeTensorMode():
        return record(lambda *xs: [fn(*xs)], [torch.empty(x.shape, dtype=x.dtype) for x in inputs])


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def calls(gm: fx.GraphModule) -> list[str]:
    return [node.target.overloadpacket.__name__ for node in gm.graph.nodes if node.op == "call_function"]


def rewritten(rewrite: Any, fn: Callable[..., Any], inputs: list[Tensor], placed: list[Placement]) -> fx.GraphModule:
    """The graph after a rewrite that changes no value, but for rounding."""
    gm = graph_of(fn, *inputs)
    rewrite(gm, placed)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*inputs)[0], fn(*inputs))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            assert node.meta["val"].shape == node.target(*fx.node.map_arg(node.args, lambda x: x.meta["val"])).shape
    return gm
