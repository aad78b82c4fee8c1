"""Loops that move next to others: the numbers stay, what lay apart lies together, and memory is not held longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helpers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fzero._torch_compat import FakeTensorMode
from fzero.codegen import clusters, neighbours
from fzero.ir import forms, fx_nodes

aten = torch.ops.aten


def traced(fn: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    mode = FakeTensorMode()
    return forms.propagate(make_fx(fn)(*inputs), [mode.from_tensor(x) for x in inputs])


def gathered(gm: torch.fx.GraphModule) -> list[str]:
    """The names of what computes, in the new order."""
    neighbours.gather(gm.graph, clusters.is_fusible)
    gm.graph.lint()
    gm.recompile()
    return [fx_nodes.op_name(n) for n in gm.graph.nodes if fx_nodes.is_compute(n) and not fx_nodes.is_view(n)]


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_gate_waits_for_what_it_gates() -> None:
    def fn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gated = torch.sigmoid(x @ gate)
        return (gated * (x @ up)) @ down

    gm = traced(fn, rows(4, 8), rows(8, 8), rows(8, 8), rows(8, 8))
    assert gathered(gm) == ["mm", "mm", "sigmoid", "mul", "mm"]


def test_a_gradient_meets_the_loop_that_made_it_and_takes_along_what_it_needs() -> None:
    def fn(x: Tensor, grad: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        into, up = grad @ w, x @ w
        made = into * up  # down at its reader, it would keep both
        other = into @ w
        slope = torch.sigmoid(x) * 2.0
        return other, made * slope

    gm = traced(fn, rows(8, 8), rows(8, 8), rows(8, 8))
    assert gathered(gm) == ["mm", "mm", "mul", "sigmoid", "mul", "mul", "mm"]


def test_a_small_sum_goes_to_the_rows_that_others_read_too() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.exp(x)
        return made @ w, made.view(32, 4).sum(0)

    assert gathered(traced(fn, rows(16, 8), rows(8, 8))) == ["exp", "sum", "mm"]


def test_nothing_moves_where_more_would_be_held() -> None:
    def down(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        a, b = x @ w, y @ w
        narrow = (a * b).sum(1)  # moved to its reader, it would keep a and b
        return narrow.exp() * (x @ w).sum(1)

    gm = traced(down, rows(8, 8), rows(8, 8), rows(8, 8))
    before = [n.name for n in gm.graph.nodes]
    gathered(gm)
    assert [n.name for n in gm.graph.nodes].index("mul") == before.index("mul")

    def up(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = torch.exp(x)
        other = made @ w
        return other, made, made * 2.0  # made lives on: its double would only be held longer

    assert gathered(traced(up, rows(8, 8), rows(8, 8))) == ["exp", "mm", "mul"]


def test_what_is_written_between_is_read_as_it_was() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        first = torch.exp(x)
        product = first @ w
        x.copy_(product)
        return (first * 2.0) * (torch.sin(x) @ w)

    x, w = rows(8, 8), rows(8, 8, seed=1)
    gm = traced(fn, x.clone(), w)
    gathered(gm)
    assert torch.equal(gm(x.clone(), w), fn(x.clone(), w))


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.exp,
    torch.neg,
    lambda x: x.sum(0, keepdim=True).expand(4, 4),
    lambda x: x.reshape(2, 8).reshape(4, 4),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [torch.add, torch.mul, torch.mm]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=24))
def test_random_graphs_compute_the_same_bits(steps: list[tuple[int, int, int]]) -> None:
    def fn(*given: Tensor) -> list[Tensor]:
        values = list(given)
        for what, left, right in steps:
            a, b = values[left % len(values)], values[right % len(values)]
            made = UNARY[what](a) if what < len(UNARY) else BINARY[what - len(UNARY)](a, b)
            values.append(torch.tanh(made))
        return values[-3:]

    inputs = [rows(4, 4, seed=n) for n in range(2)]
    gm = traced(fn, *inputs)
    wanted = gm(*inputs)
    gathered(gm)
    assert all(helpers.same_bits(got, one) for got, one in zip(gm(*inputs), wanted, strict=True))
