"""What runs before a transfer and what after it: a short chain on a value that is kept anyway is computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

import fzero
from fzero import optim
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


NARROW = {
    "a loss scale": {"precision": "fp16"}, "steps that are skipped": {"nonfinite": "skip"},
    "clipping": {"clip_norm": 1.0}, "both": {"precision": "fp16", "clip_norm": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("given", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("tx", ["adamw", "lion", "sgd"])
def test_updates_wait_for_a_sum_over_tensor_parallelism_on_slices(tx: str, given: dict[str, Any]) -> None:
    """Whether a step is finite is known after sums over both axes. What waits for it is no whole tensor: no column but
    the parameters is gathered, as without it."""
    make: dict[str, Any] = {
        "adamw": optim.adamw(1e-3), "lion": optim.lion(1e-3), "sgd": optim.sgd(0.1, momentum=0.9),
    }  # fmt: skip

    def loss(p: Any, x: Tensor) -> Tensor:
        for k in p:
            x = x + torch.tanh(x @ k["up"]) @ k["down"] * k["gain"]
        return x.square().mean()

    shapes = {"up": (64, 64), "down": (64, 64), "gain": (64,)}
    layers = [{name: torch.empty(shape) for name, shape in shapes.items()} for _ in range(2)]
    rules = {"*/up": fzero.P(None, "tp"), "*/down": fzero.P("tp")}
    spec = fzero.Spec(loss=loss, optimizer=make[tx], mesh={"dp": 2, "tp": 2}, shard=rules, zero=2, **given)
    program = fzero.lower(spec, layers, torch.empty(4, 64), world_size=4).program
    gathered = [program.buffers[op.reads[0].name].bucket for op in program.ops if op.gathers]
    assert sorted(filter(None, gathered)) == sorted(program.buckets)
