"""Stretches of pointwise ops, cut out of a segment: the same bits, nothing that is no loop, one for equal layers."""

import random
from typing import Any

import cases
import helpers
import pytest
import torch
from fusing import graph_of, stretches, use
from torch import fx

import fzero
from fzero.codegen import clusters
from fzero.codegen.fusion import Fused, aliased, fuse, fused
from fzero.ir import fx_nodes, fx_values, segments
from fzero.ir.mesh import Mesh
from fzero.ir.op import make_op
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref
from fzero.runtime import handlers
from fzero.runtime.interpreter import interpret
from lab.mutate import corpus

aten = torch.ops.aten


def names(one: Fused) -> list[str]:
    return [n.target.__name__ for n in one.graph.graph.nodes if fx_nodes.is_compute(n) and not fx_nodes.is_view(n)]


@pytest.mark.parametrize("number", range(18))
@pytest.mark.parametrize("rules", ["processor", "device"])
@pytest.mark.sampled(3)
def test_a_segment_with_stretches_cut_out_computes_the_same_bits(rules: str, number: int, monkeypatch: Any) -> None:
    """By the rules of a device too, where loops move."""
    if rules == "device":
        monkeypatch.setattr(clusters, "on_device", lambda node: bool(fx_values.tensors(node.meta.get("val"))))
    case = corpus.draw(random.Random(number), number)

    def run() -> list[handlers.Rank]:
        memory = [{name: x.clone() for name, x in held.items()} for held in case.memory]
        with torch.no_grad():
            return interpret(case.programs, memory, poison=True)

    plain = run()
    found: dict[str, Any] = {}
    for program in case.programs.values():
        for key, same in aliased(program).items():
            made, _ = fused(program.segments[key], same)
            found.update({key: made.forward} if made is not None else {})
    use(monkeypatch, lambda program: found)
    for ours, theirs in zip(run(), plain, strict=True):
        assert ours.memory.keys() == theirs.memory.keys()
        assert all(helpers.same_bits(ours.memory[name], x) for name, x in theirs.memory.items())
        assert all(ours.memory[name].stride() == x.stride() for name, x in theirs.memory.items())


def test_what_is_no_loop_stays_aten() -> None:
    def body(g: fx.Graph, x: fx.Node, w: fx.Node) -> list[fx.Node]:
        a = g.call_function(aten.mul.Tensor, (x, 2.0))
        b = g.call_function(aten.sin.default, (a,))
        c = g.call_function(aten.mm.default, (b, w))
        d = g.call_function(aten.gelu.default, (c,))  # by erf: aten's is twice as fast on the CPU
        e = g.call_function(aten.rand_like.default, (d,))
        f = g.call_function(aten.add.Tensor, (e, d))  # alone between two borders
        h = g.call_function(aten.mm.default, (f, w))
        return [h]

    made, by_hash = fused(graph_of(body, torch.empty(4, 4), torch.empty(4, 4)), {})
    assert made is not None
    assert [names(one) for one in by_hash.values()] == [["mul.Tensor", "sin.default", "copy_.default"]]
    kinds = [getattr(n.target, "__name__", "") for n in made.graph.nodes if fx_nodes.is_compute(n)]
    assert [k for k in kinds if "mm" in k or "gelu" in k or "rand" in k or "add" in k] == [
        "mm.default",
        "gelu.default",
        "rand_like.default",
        "add.Tensor",
        "mm.default",
    ]


def test_a_segment_without_a_stretch_is_left_out() -> None:
    def body(g: fx.Graph, x: fx.Node) -> list[fx.Node]:
        return [g.call_function(aten.mm.default, (g.call_function(aten.t.default, (x,)), x))]

    assert fused(graph_of(body, torch.empty(4, 4)), {}) == (None, {})


@pytest.mark.parametrize("deeper", [5, pytest.param(9, marks=pytest.mark.acceptance)])
def test_depth_adds_nothing_to_compile(deeper: int) -> None:
    found = []
    for depth in (3, deeper):
        init, loss = cases.gpt(64, 16, depth, 2)
        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.lion(1e-3), zero=3, precision="bf16")
        batch = {name: torch.empty(2, 8, dtype=torch.int64, device="meta") for name in "xy"}
        found.append(stretches(fzero.lower(spec, init, batch, world_size=2).program))
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) >= 4


@pytest.mark.parametrize(("width", "compiled"), [(128, True), (16, False)])
def test_auto_compiles_an_update_at_every_stage_or_at_none(width: int, compiled: bool) -> None:
    """A rank's slice of it moves a quarter of the bytes: stages had other bits."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"]).square().mean()

    for zero in range(4):
        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.lion(1e-3), zero=zero)
        program = fzero.lower(spec, {"w": torch.empty(width, width)}, torch.empty(2, width), world_size=4).program
        updates = {op.segment for op in program.ops if op.is_update or op.phase == "outer"}
        assert bool(updates & fuse(program, "auto")[0].keys()) == compiled, zero


def test_segments_whose_ops_alias_differently_are_left_alone() -> None:
    def body(g: fx.Graph, x: fx.Node, into: fx.Node) -> list[fx.Node]:
        g.call_function(aten.copy_.default, (into, g.call_function(aten.mul.Tensor, (x, 2.0))))
        return []

    gm = graph_of(body, torch.empty(8), torch.empty(8))
    key = segments.digest(gm)
    buffers = {name: Buffer(name, torch.float32, (16,), "state") for name in "ab"}

    def program(*pairs: tuple[Ref, Ref]) -> Program:
        ops = tuple(make_op("update", [read], [write], segment=key, fresh=0) for read, write in pairs)
        return Program(Mesh((("dp", 1),)), {}, buffers, ops, {}, segments={key: gm})

    a, b = Ref("a", 0, 8), Ref("b", 0, 8)
    assert aliased(program((a, b), (b, a))) == {key: {}}
    assert aliased(program((a, a), (b, b))) == {key: {1: 0}}
    assert aliased(program((a, a), (b, a))) == {}
    assert aliased(program((Ref("a", 4, 12), a))) == {}
