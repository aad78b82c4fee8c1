"""What runs before a transfer and what after it: a short chain on a value that is kept anyway is computed again."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fzero.capture import step_ops  # noqa: F401  registers fzero::reduce
from fzero.ir import fx_values
from fzero.lowering import build

aten = torch.ops.aten


def typed(graph: fx.Graph, *shapes: tuple[int, ...]) -> None:
    """Gives every node its value, from fake placeholders of these shapes."""
    with FakeTensorMode():
        values: list[Tensor] = [torch.empty(shape) for shape in shapes]
    fx_values.propagate(fx.GraphModule(torch.nn.Module(), graph), values)


def test_each_later_level_computes_a_short_chain_for_itself() -> None:
    """g / c is read at level 0, and after two sums, at levels 1 and 2: three quotients, each read at its own level."""
    graph = fx.Graph()
    g, c = graph.placeholder("g"), graph.placeholder("c")
    quotient = graph.call_function(aten.div.Tensor, (g, c))
    first = graph.call_function(aten.neg.default, (quotient,))
    readers = [graph.call_function(aten.exp.default, (quotient,)), graph.call_function(aten.sin.default, (quotient,))]
    graph.output((first, *readers))
    typed(graph, (4,), ())
    levels = {node: 0 for node in graph.nodes if node.op != "output"}
    levels |= {readers[0]: 1, readers[1]: 2}
    after = build._repeated(graph, levels)
    assert first.args[0] is quotient
    copies = [reader.args[0] for reader in readers]
    assert len({quotient, *copies}) == 3
    assert [after[copy] for copy in copies] == [1, 2]
    assert all(copy.target is aten.div.Tensor and copy.args == (g, c) for copy in copies)
    assert after[quotient] == 0


def test_a_value_of_a_long_chain_is_not_computed_again() -> None:
    graph = fx.Graph()
    g = graph.placeholder("g")
    value = g
    for _ in range(build.SHORT + 1):
        value = graph.call_function(aten.neg.default, (value,))
    reader = graph.call_function(aten.exp.default, (value,))
    graph.output((reader,))
    typed(graph, (4,))
    levels = {node: 0 for node in graph.nodes if node.op != "output"} | {reader: 1}
    build._repeated(graph, levels)
    assert reader.args[0] is value
