"""The forms of values of a graph, set anew where operands have become others."""

from __future__ import annotations

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import forms
from fzero.ir.recorder import record

aten = torch.ops.aten


def traced() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """relu(x) @ w, transposed, and beside it x + 1; by op, the nodes."""
    with FakeTensorMode():
        gm = record(lambda x, w: [torch.mm(x.relu(), w).t().exp(), x + 1], [torch.empty(3, 5), torch.empty(5, 7)])
    return gm.graph, {str(node.target).split(".")[1]: node for node in gm.graph.nodes if node.op == "call_function"}


def test_what_reads_another_form_is_renewed_and_nothing_else() -> None:
    graph, nodes = traced()
    before = {name: node.meta["val"] for name, node in nodes.items()}
    with graph.inserting_after(nodes["mm"]):
        wide = graph.call_function(aten.constant_pad_nd.default, (nodes["mm"], [0, 1, 0, 0]))
        part = graph.call_function(aten.slice.Tensor, (wide, 1, 0, 7))
    nodes["t"].args = (part,)
    wide.append(part)
    forms.renew(graph)
    assert (wide.meta["val"].shape, part.meta["val"].stride()) == ((3, 8), (8, 1))
    assert nodes["t"].meta["val"].stride() == (1, 8)
    assert nodes["exp"].meta["val"] is not before["exp"]
    for name in ("relu", "mm", "add"):
        assert nodes[name].meta["val"] is before[name], name


def test_a_value_that_was_missing_renews_its_readers() -> None:
    graph, nodes = traced()
    before = nodes["mm"].meta.pop("val"), nodes["t"].meta["val"]
    forms.renew(graph)
    assert nodes["mm"].meta["val"].stride() == before[0].stride()
    assert nodes["t"].meta["val"] is not before[1]
