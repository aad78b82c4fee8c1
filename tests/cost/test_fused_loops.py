"""fused_loops: what a run of loops reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import hardware
from fzero.cost.fused_loops import fused_works
from fzero.cost.node_work import works
from fzero.ir.mesh import Mesh

aten = torch.ops.aten
ROWS, WIDTH = 32, 64
WHOLE = 4 * ROWS * WIDTH  # bytes of x


def graph(fn: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    found: fx.GraphModule = make_fx(fn, tracing_mode="fake")(*given)
    return found


def x() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def told(gm: fx.GraphModule) -> list[tuple[str, int, int]]:
    return [(work.kind, work.read, work.written) for work in fused_works(gm)]


def test_a_run_is_one_kernel_between_products() -> None:
    """Of what is made and used inside nothing is moved; a view of it is it."""

    def fn(a: Tensor, w: Tensor) -> Tensor:
        y = a @ w
        z = torch.relu(y) * 2 + torch.sigmoid(y).view(ROWS, WIDTH)
        return z @ w

    gm = graph(fn, x(), torch.randn(WIDTH, WIDTH))
    (first, loops, last) = told(gm)
    assert (first[0], loops, last[0]) == ("product", ("cluster", WHOLE, WHOLE), "product")
    assert sum(work.moved for work in works(gm.graph) if not work.flops) == 9 * WHOLE  # one by one


def test_what_is_written_over_is_written_once() -> None:
    def fn(a: Tensor, into: Tensor, total: Tensor) -> None:
        into.copy_(a.sin())
        total.add_(a.cos())

    ((kind, read, written),) = told(graph(fn, x(), x(), x()))
    assert (kind, read, written) == ("cluster", 2 * WHOLE, 2 * WHOLE)  # a and the total; both destinations


def test_results_that_are_read_behind_another_call() -> None:
    """A norm's statistics are picked behind the product that reads its values."""

    def fn(a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        found = aten.native_layer_norm.default(a, [WIDTH], None, None, 1e-5)
        return found[0] @ w, found[1]

    gm = graph(fn, x(), torch.randn(WIDTH, WIDTH))
    nodes = {n.name: n for n in gm.graph.nodes}
    late = next(n for n in nodes.values() if n.args[1:] == (1,))
    next(n for n in nodes.values() if n.target is aten.mm.default).append(late)
    assert [kind for kind, *_ in told(gm)] == ["cluster", "product", "cluster"]


def test_they_are_priced_where_they_run_so() -> None:
    """By default on CUDA, where `compile` says so, and not on a processor."""
    card, mesh = hardware.load("h100"), Mesh((("dp", 1),))
    fuses = {how: replace(card, compile=how).rates(mesh).fuses for how in (None, "none", "auto", "inductor")}
    assert fuses == {None: True, "none": False, "auto": True, "inductor": True}
    assert not replace(card, type="cpu").rates(mesh).fuses
    assert not replace(card, type="").rates(mesh).fuses
