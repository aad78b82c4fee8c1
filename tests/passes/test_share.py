"""What the batch alone decides is made once for all layers: less memory, the same bits, and equal layers stay equal."""

from __future__ import annotations

from typing import Any

import kept
import pytest
import torch
import torch.nn.functional as F
from helpers import run
from recorded import calls
from short_programs import segment
from torch import Tensor, fx

import fzero
from fzero import passes, random
from fzero._torch_compat import FakeTensorMode
from fzero.cost.memory import account
from fzero.ir import segments
from fzero.ir.program import Program
from fzero.ir.recorder import record
from fzero.passes.share import _shared

WORLD, DEPTH, ROWS, LENGTH, HEADS, WIDTH = 2, 4, 2, 64, 2, 16
BIAS_BYTES = ROWS * LENGTH * LENGTH * 4
SGD = fzero.optim.sgd(0.1)


def test_a_node_without_a_value_is_passed_over() -> None:
    """An op that only checks, as of `torch.linalg.lu_factor`, returns nothing."""
    graph = fx.Graph()
    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(2, 2)
        graph.call_function(torch.ops.aten._linalg_check_errors.default, (x, "lu"), {"is_matrix": True})
        y = graph.call_function(torch.ops.aten.sin.default, (x,))
        y.meta["val"] = torch.empty(2, 2)
    graph.output([y])
    gm = segments.module(graph)
    assert _shared(gm, (None,), {}) is gm


@pytest.mark.parametrize(("of_leaf", "casts"), [(False, 1), (True, 2)])
def test_equal_casts_of_a_value_are_one_but_not_those_of_a_leaf(of_leaf: bool, casts: int) -> None:
    """A leaf is cast where it is used, or gathered as its cast."""

    def fn(w: Tensor, x: Tensor) -> list[Tensor]:
        value = w if of_leaf else w * x
        return [value.to(torch.bfloat16).sin(), value.to(torch.bfloat16).cos(), value.to(torch.float64).cos()]

    with FakeTensorMode():
        gm = record(fn, [torch.empty(2, 2), torch.empty(2, 2)])
    made = _shared(gm, ("layers.0", None), {})
    found = [node for node in made.graph.nodes if node.target is torch.ops.aten._to_copy.default]
    assert len(found) == casts + 1
    assert (made is gm) == of_leaf
    w, x = torch.randn(2, 2), torch.randn(2, 2)
    assert all(torch.equal(a, b) for a, b in zip(made(w, x), fn(w, x), strict=True))


# --- two layers, by hand ----------------------------------------------------------------------------------------------


def shared(body: Any, buckets: str, chunk_of: dict[str, int] | None = None, forward: int = 99) -> list[str]:
    """The ops of a segment behind the pass, by name. `buckets`: of its inputs, `-` for none; `forward`: how many of its
    ops are of the forward."""
    names = [None if name == "-" else name for name in buckets.split()]
    gm = segment(body, *[(2, 2)] * len(names))
    for node in [n for n in gm.graph.nodes if n.op == "call_function"][forward:]:
        node.meta["phase"] = "backward"
    made = _shared(gm, tuple(names), chunk_of or {})
    given = [torch.randn(2, 2) for _ in names]
    assert all(torch.equal(a, b) for a, b in zip(made(*given), gm(*given), strict=True))
    return calls(made)


def test_an_equal_value_is_made_once_before_the_layers() -> None:
    def body(mask: Tensor, w: Tensor, v: Tensor, x: Tensor) -> list[Tensor]:
        seen = mask.t()
        return [(x * w + seen.sin()) / v + seen.sin()]

    assert shared(body, "- a b -") == ["t", "sin", "mul", "add", "div", "add"]


def test_in_a_pipeline_each_chunk_makes_its_own_where_it_first_reads_it() -> None:
    def body(mask: Tensor, w: Tensor, v: Tensor, x: Tensor) -> list[Tensor]:
        y = (x * w + mask.sin()) / v
        return [(y + mask.sin()).cos() - mask.sin()]

    assert shared(body, "- a b -", {"a": 0, "b": 1}) == ["mul", "sin", "add", "div", "sin", "add", "cos", "sub"]
    assert shared(body, "- a b -", {"a": 1, "b": 1}) == ["mul", "sin", "add", "div", "add", "cos", "sub"]
    assert shared(body, "- a b -") == ["sin", "mul", "add", "div", "add", "cos", "sub"]


def test_what_it_is_made_of_from_nothing_comes_before_it() -> None:
    def body(mask: Tensor, w: Tensor, v: Tensor, x: Tensor) -> list[Tensor]:
        y = (x * w) / (mask - torch.ones(2, 2))
        return [(y * v) / (mask - torch.ones(2, 2))]

    assert shared(body, "- a b -") == ["ones", "sub", "mul", "div", "mul", "div"]


def test_what_is_made_of_nothing_alone_stays_where_it_is_made_first() -> None:
    def body(w: Tensor, v: Tensor, x: Tensor) -> list[Tensor]:
        return [(x * w / torch.ones(2, 2).sin()) * v / torch.ones(2, 2).sin()]

    assert shared(body, "a b -") == ["mul", "ones", "sin", "div", "mul", "div"]


@pytest.mark.parametrize(
    ("body", "forward", "why"),
    [
        (lambda m, w, x: [w.sin() * x, w.sin() + x], 99, "a leaf takes part"),
        (lambda m, w, x: [(x + m.sin()) * w, m.cos(), x - m.sin()], 3, "one is of the backward"),
        (lambda m, w, x: [m.sin(), m.sin()], 99, "each result is a buffer"),
        (lambda m, w, x: [m.sin() * w, m.cos() * w], 99, "they differ"),
        (lambda m, w, x: [m.sum(0) * w, m.sum(1) * w], 99, "they differ in an argument"),
    ],
)
def test_what_is_not_one(body: Any, forward: int, why: str) -> None:
    alone = calls(segment(body, *[(2, 2)] * 3))
    assert shared(body, "- a -", forward=forward) == alone, why


def test_casts_are_one_within_a_chunk() -> None:
    def body(w: Tensor, v: Tensor, x: Tensor) -> list[Tensor]:
        y = x * w
        z = y.bfloat16().sin() * v
        return [z + y.bfloat16().cos()]

    assert shared(body, "a b -").count("_to_copy") == 1
    assert shared(body, "a b -", {"a": 0, "b": 1}).count("_to_copy") == 2


# --- an attention's bias ----------------------------------------------------------------------------------------------


def params(key: Tensor) -> Any:
    return {"layers": [{"qkv": random.normal(k, (WIDTH, 3 * WIDTH)) / 4} for k in random.split(key, DEPTH)]}


def loss(p: Any, b: dict[str, Tensor]) -> Tensor:
    x, seen = b["x"], (b["ids"] > 0)[:, None, None, :].expand(-1, 1, LENGTH, -1).tril()
    for layer in p["layers"]:
        q, k, v = (x @ layer["qkv"]).view(len(x), LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)  # torch makes the bias in here, in each layer
        x = x + y.transpose(1, 2).reshape(x.shape)
    return x.square().mean()


def batch(rank: int, step: int) -> dict[str, Tensor]:
    key = random.fold_in(random.fold_in(random.key(4), step), rank)
    ids = torch.arange(LENGTH).expand(ROWS, -1) < torch.tensor([[LENGTH], [LENGTH // 2]])
    return {"x": random.normal(key, (ROWS, LENGTH, WIDTH)), "ids": ids.long()}


def lowered(**options: Any) -> fzero.Lowered:
    spec = fzero.Spec(loss=loss, **{"optimizer": SGD, "zero": 3, **options})
    return kept.lower(spec, params(random.key(0)), batch(0, 0), WORLD)


def biases(program: Program) -> list[int]:
    """The numbers of the ops that make a bias, once for each."""

    def made(node: fx.Node) -> bool:
        value = node.meta.get("val")
        return (
            node.target is torch.ops.aten.where.self
            and value.shape[-2:] == (LENGTH, LENGTH)
            and value.is_floating_point()
        )

    return [
        number
        for number, op in enumerate(program.ops)
        for node in (program.segments[op.segment].graph.nodes if op.segment else ())
        if made(node)
    ]


def through(rows: passes.Passes) -> Program:
    return passes.optimise(lowered().naive, passes.Options(), rows)[0]


def test_one_bias_is_made_for_all_layers_and_one_is_kept() -> None:
    every = through(passes.PASSES)
    each = through([row for row in passes.PASSES if row[0] != "share"])
    fzero.verify(every)
    assert (len(biases(every)), len(biases(each))) == (1, DEPTH)
    assert account(each).peak - account(every).peak >= (DEPTH - 1) * BIAS_BYTES
    shared, alone = ({op.segment for op in program.ops if op.segment} for program in (every, each))
    assert len(shared) <= len(alone), "layers are as equal as before"


def test_each_microbatch_makes_its_own() -> None:
    assert len(biases(lowered(microbatches=2).program)) == 2


@pytest.mark.parametrize(
    "options", [{}, {"remat": {"**": "full"}}, {"microbatches": 2, "zero": 2}, {"mesh": {"pp": 2}}], ids=str
)
@pytest.mark.sampled(2)
def test_it_trains_as_torch_does(options: dict[str, Any]) -> None:
    spec = fzero.Spec(loss=loss, optimizer=SGD, **{"zero": 3, **options})
    result = run(spec, params(random.key(0)), batch, world=WORLD, steps=2)
    data = 1 if "mesh" in options else WORLD
    p = fzero.tree.map(lambda x: x.requires_grad_(), params(random.key(0)))
    for step in range(2):
        parts = [batch(rank, step) for rank in range(data)]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        value = loss(p, whole)
        assert result.losses()[step] == pytest.approx(value.item(), rel=1e-5)
        leaves = fzero.tree.flatten(p)[1]
        grads = torch.autograd.grad(value, leaves)
        with torch.no_grad():
            for leaf, grad in zip(leaves, grads, strict=True):
                leaf -= 0.1 * grad


def test_each_role_of_a_pipeline_makes_its_own_and_none_travels() -> None:
    programs = lowered(mesh={"pp": 2}, zero=0).programs
    for program in programs.values():
        assert len(biases(program)) == 1
        for op in program.ops:
            if op.kind in ("send", "recv"):
                assert all(program.buffers[ref.name].nbytes < BIAS_BYTES for ref in (*op.reads, *op.writes))


def test_what_a_parameter_takes_part_in_is_left_alone() -> None:
    def own(p: Any, x: Tensor) -> Tensor:
        return sum(((x @ w.tanh()) * w.tanh().sum()).sum() for w in p)

    spec = fzero.Spec(loss=own, optimizer=SGD, zero=3)
    found = fzero.lower(spec, [torch.ones(4, 4), torch.ones(4, 4)], torch.ones(2, 4), world_size=WORLD)
    before, after = (found.after(name) for name in ("cast_before_gather", "share"))
    assert before.segments.keys() == after.segments.keys()
