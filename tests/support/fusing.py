"""Segments of a few ops, their fused stretches, and ranks that run other callables for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.codegen.fusion import Fused, aliased, fused
from fzero.ir import forms, segments
from fzero.ir.program import Program
from fzero.runtime import handlers


def stretches(program: Program) -> dict[str, Fused]:
    by_hash: dict[str, Fused] = {}
    for key, same in aliased(program).items():
        by_hash |= fused(program.segments[key], same, known=by_hash)[1]
    return by_hash


def graph_of(body: Callable[..., list[fx.Node]], *like: torch.Tensor) -> fx.GraphModule:
    """A segment: `body(graph, *placeholders)` returns the outputs."""
    graph = fx.Graph()
    graph.output(body(graph, *[graph.placeholder(f"x{i}") for i in range(len(like))]))
    with FakeTensorMode() as mode:
        return forms.propagate(segments.module(graph), [mode.from_tensor(x) for x in like])


def use(monkeypatch: Any, calls: Callable[[Program], dict[str, Any]]) -> None:
    """Ranks run these callables for segments."""
    original = handlers.Rank.__init__

    def init(self: handlers.Rank, program: Program, *args: Any, **options: Any) -> None:
        original(self, program, *args, **options)
        self.calls = {**self.calls, **calls(program)}

    monkeypatch.setattr(handlers.Rank, "__init__", init)
