"""Results that one stretch takes where the op left them, by the rules of a device."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import helpers
import pytest
import torch
from fusing import graph_of
from torch import fx

from fzero.codegen import clusters, handed, segment_memory
from fzero.codegen.bind import bind
from fzero.codegen.fusion import fused
from fzero.ir import fx_values

aten = torch.ops.aten
Body = Callable[..., list[fx.Node]]


def one_reader(g: fx.Graph, u: fx.Node, v: fx.Node, x: fx.Node) -> list[fx.Node]:
    return [g.call_function(aten.mul.Tensor, (g.call_function(aten.sin.default, (u,)), v))]


def through_a_view(g: fx.Graph, u: fx.Node, v: fx.Node, x: fx.Node) -> list[fx.Node]:
    turned = g.call_function(aten.t.default, (u,))
    return [g.call_function(aten.mul.Tensor, (g.call_function(aten.sin.default, (turned,)), v))]


def two_readers(g: fx.Graph, u: fx.Node, v: fx.Node, x: fx.Node) -> list[fx.Node]:
    return [*one_reader(g, u, v, x), g.call_function(aten.mm.default, (u, x))]


def also_returned(g: fx.Graph, u: fx.Node, v: fx.Node, x: fx.Node) -> list[fx.Node]:
    return [*one_reader(g, u, v, x), u]


def under_two_names(g: fx.Graph, u: fx.Node, v: fx.Node, x: fx.Node) -> list[fx.Node]:
    again = g.call_function(operator.getitem, (u.args[0], 0))
    return [g.call_function(aten.mul.Tensor, (v, made)) for made in one_reader(g, u, again, x)]


def read_later(g: fx.Graph, u: fx.Node, v: fx.Node, x: fx.Node) -> list[fx.Node]:
    product = g.call_function(aten.mm.default, (x, x))
    return [g.call_function(aten.add.Tensor, (made, product)) for made in one_reader(g, u, v, x)]


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        (one_reader, {0, 2}),
        (through_a_view, {0, 2}),
        (two_readers, {2}),
        (also_returned, {2}),
        (under_two_names, {2}),
        (read_later, set()),
    ],
)
def test_a_result_is_handed_to_its_only_reader(body: Body, taken: set[int], monkeypatch: Any) -> None:
    for module in (clusters, handed):
        monkeypatch.setattr(module, "on_device", lambda node: bool(fx_values.tensors(node.meta.get("val"))))

    def graph(g: fx.Graph, x: fx.Node) -> list[fx.Node]:
        several = g.call_function(aten._linalg_svd.default, (x,))  # u, s, v
        return body(g, *(g.call_function(operator.getitem, (several, i)) for i in (0, 2)), x)

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    plain = graph_of(graph, x)
    gm, _ = fused(plain, {})
    assert gm is not None
    assert {index for _, index in handed.handed(gm)} == taken
    wanted = plain(x)
    outs = [torch.empty_strided(w.shape, w.stride()) for w in wanted]
    for call in bind(gm, [x], outs, torch.empty(segment_memory.layout(gm).nbytes, dtype=torch.uint8)):
        call()
    assert all(helpers.same_bits(a, b) for a, b in zip(outs, wanted, strict=True))
