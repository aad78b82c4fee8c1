"""node_writer: a node that is written has the value that its op gives, and the marks of the node that it is like."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fzero.lowering.node_writer import NodeWriter

aten = torch.ops.aten


@pytest.fixture
def written() -> tuple[fx.Graph, fx.Node, NodeWriter]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta = {"val": torch.empty(4, 6).t(), "source": "loss.py:3", "phase": "backward"}
    return graph, x, NodeWriter(graph, x)


def test_a_call_has_its_value_and_the_marks(written: Any) -> None:
    _, x, write = written
    node = write(aten.sum.dim_IntList, (x, [1]), {"dtype": torch.float64})
    assert (node.args, node.kwargs) == ((x, [1]), {"dtype": torch.float64})
    assert (tuple(node.meta["val"].shape), node.meta["val"].dtype) == ((6,), torch.float64)
    assert (node.meta["source"], node.meta["phase"]) == ("loss.py:3", "backward")


def test_a_call_without_tensors_has_a_fake_value_too(written: Any) -> None:
    _, x, write = written
    node = write(aten.full.default, ([2, 3], 1.5))
    assert node.meta["val"].fake_mode is x.meta["val"].fake_mode


def test_a_view_that_strides_do_not_allow_is_of_a_copy(written: Any) -> None:
    _, x, write = written
    node = write(aten.view.default, (x, [24]))
    copy = node.args[0]
    assert copy.target is aten.clone.default
    assert copy.args == (x,)
    assert copy.meta["val"].is_contiguous()
    assert tuple(node.meta["val"].shape) == (24,)
    for target, args in ((aten.view.default, (copy, [7])), (aten.mm.default, (x, x))):
        with pytest.raises((RuntimeError, ValueError)):
            write(target, args)


def test_an_item_of_several_results(written: Any) -> None:
    _, x, write = written
    both = write(aten.max.dim, (x, 1))
    place = write.item(both, 1)
    assert place.target is operator.getitem
    assert place.args == (both, 1)
    assert place.meta["val"].dtype is torch.int64
    assert place.meta["source"] == "loss.py:3"
