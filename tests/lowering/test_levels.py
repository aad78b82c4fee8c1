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
from fzero.ir import forms
from fzero.lowering import build

aten = torch.ops.aten


def typed(graph: fx.Graph, *shapes: tuple[int, ...]) -> None:
    """Gives every node its value, from fake placeholders of these shapes."""
    with FakeTensorMode():
        values: list[Tensor] = [torch.empty(shape) for shape in shapes]
    forms.propagate(fx.GraphModule(torch.nn.Module(), graph), values)


REDUCE = torch.ops.fzero.reduce.default


def test_what_reads_a_sum_over_ranks_comes_after_it() -> None:
    """x -> a sum over ranks, level 1 -> its reader -> another sum, level 2."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(aten.mm.default, (x, x))
    first = graph.call_function(REDUCE, (before, "mean", "dp"))
    reader = graph.call_function(aten.mm.default, (first, x))
    second = graph.call_function(REDUCE, (reader, "mean", "dp"))
    last = graph.call_function(aten.mm.default, (second, x))
    graph.output((last,))
    typed(graph, (4, 4))
    levels = build._levels(graph)
    assert [levels[node] for node in (x, before, first, reader, second, last)] == [0, 0, 1, 1, 2, 2]
    assert graph.find_nodes(op="output")[0] not in levels


def test_elementwise_work_waits_for_its_first_user() -> None:
    """But a scalar, which nobody minds keeping, and a product are computed as soon as they can be. What only the step
    returns waits for the last level."""
    graph = fx.Graph()
    x, scalar = graph.placeholder("x"), graph.placeholder("scalar")
    total = graph.call_function(REDUCE, (x, "mean", "dp"))
    decayed = graph.call_function(aten.mul.Tensor, (x, 0.9))
    sent = graph.call_function(aten.mul.Tensor, (x, 0.5))
    count = graph.call_function(aten.add.Tensor, (scalar, 1))
    product = graph.call_function(aten.mm.default, (x, x))
    returned = graph.call_function(aten.neg.default, (x,))
    later = graph.call_function(REDUCE, (sent, "mean", "dp"))
    ema = graph.call_function(aten.add.Tensor, (decayed, total))
    uses = [graph.call_function(aten.mm.default, (total, node)) for node in (product, sent)]
    scaled = graph.call_function(aten.mul.Tensor, (total, count))
    graph.output((ema, later, returned, scaled, *uses))
    typed(graph, (4, 4), ())
    levels = build._levels(graph)
    assert levels[total] == levels[later] == 1
    assert levels[decayed] == levels[ema] == levels[returned] == 1
    assert levels[sent] == 0, "a sum over ranks reads it, one level earlier than its own"
    assert levels[count] == levels[product] == 0


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
@pytest.mark.parametrize("tx", ["adamw", "lion", "sgd", "lamb"])
@pytest.mark.sampled(5)
def test_updates_wait_for_a_sum_over_tensor_parallelism_on_slices(tx: str, given: dict[str, Any]) -> None:
    """Whether a step is finite, and LAMB's norms, are known after sums over both axes. What waits for them is no whole
    tensor: no column but the parameters is gathered."""
    make: dict[str, Any] = {
        "adamw": optim.adamw(1e-3), "lion": optim.lion(1e-3), "lamb": optim.lamb(1e-3),
        "sgd": optim.sgd(0.1, momentum=0.9),
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
