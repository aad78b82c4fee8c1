"""Segments as lists of calls into planned memory: the bits of their graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import same_bits

import fzero
from fzero.capture import trace_step
from fzero.codegen import bind, segment_memory
from fzero.cost.allocator import measured_peak
from fzero.ir import fx_nodes
from fzero.runtime.handlers import spoil
from lab.mutate import corpus

aten = torch.ops.aten


def operands(gm: Any, draw: torch.Generator) -> list[torch.Tensor]:
    """Values for a segment's placeholders: small numbers, valid as indices, probabilities and divisors alike."""
    found = []
    for node in fx_nodes.placeholders(gm.graph):
        like = node.meta["val"]
        value = torch.rand(like.shape, generator=draw) + 0.5 if like.dtype.is_floating_point else torch.ones(like.shape)
        place = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        found.append(place.copy_(value))
    return found


def check(gm: Any, given: Sequence[torch.Tensor] = ()) -> None:
    """The calls of a segment in spoiled memory give the bits of its graph, and so they do a second time."""
    inputs = list(given) or operands(gm, torch.Generator().manual_seed(0))
    plain = [x.clone() for x in inputs]
    expected = gm(*plain)
    layout = segment_memory.layout(gm)
    block = torch.empty(layout.nbytes, dtype=torch.uint8)
    fresh = [
        torch.empty_strided(n.meta["val"].shape, n.meta["val"].stride(), dtype=n.meta["val"].dtype)
        for n in fx_nodes.outputs(gm.graph)
    ]
    memory = [x.clone() for x in inputs]
    calls = bind.bind(gm, memory, fresh, block)
    for _ in range(2):
        for tensor, was in zip(memory, inputs, strict=True):
            tensor.copy_(was)
        for tensor in (block, *fresh):
            spoil(tensor)
        for call in calls:
            call()
        for found, wanted in zip((*fresh, *memory), (*expected, *plain), strict=True):
            assert same_bits(found, wanted)


@pytest.mark.parametrize("programs", [6, pytest.param(24, marks=pytest.mark.acceptance)])
def test_segments_as_calls_have_the_bits_of_their_graphs(programs: int) -> None:
    rng = random.Random(3)
    seen: set[str] = set()
    for number in range(programs):
        for program in corpus.draw(rng, number).programs.values():
            for key, gm in program.segments.items():
                if key not in seen:
                    seen.add(key)
                    check(gm)
    assert len(seen) > 4 * programs


def _every_form(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Ops with an `out=` form, with a special form, and with neither; several results; padded embeddings; in place."""
    rows = F.embedding(x.long(), p["table"]) + F.embedding(x.long(), p["table"], padding_idx=1)
    h = F.layer_norm(rows, rows.shape[-1:], p["scale"], p["shift"])
    h = F.silu(h).to(torch.bfloat16).float() * 2 + torch.zeros_like(h) + torch.ones_like(h) / 3
    h = torch.where(h > 0.1, h, torch.full_like(h, 0.1)).clone()
    var, mean = torch.var_mean(h, -1, keepdim=True)
    h = F.pad(h - mean, (1, 2)) * torch.rsqrt(var + 1e-5)
    h = h.transpose(0, 1).contiguous().cumsum(0) + h.transpose(0, 1)
    h.add_(1)
    top, _ = h.sort(-1)
    picked = F.log_softmax(top.flatten(0, 1), -1).gather(1, x.long().flatten()[:, None].clamp(0, 3))
    return torch.logsumexp(top, (0, 1)).sum() - picked.mean() + torch.stack([h.amax(), h.amin()]).sum()


def test_ops_of_every_form() -> None:
    params = {"table": torch.randn(7, 16), "scale": torch.rand(16) + 1, "shift": torch.randn(16)}
    x = torch.randint(0, 7, (4, 8)).float()

    def step(state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(_every_form)(state, batch)
        return state, {"loss": value, "grads": grads}

    gm = trace_step.capture(step, params, x, axis="dp").regions[0].gm
    targets = {node.target for node in gm.graph.nodes if fx_nodes.is_compute(node)}
    assert {aten.embedding_dense_backward.default, aten.sort.default, aten.native_layer_norm.default} <= targets
    check(gm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_of_an_embedding_is_atens(dtype: torch.dtype) -> None:
    """Rows that are met often: the order of additions, and in what dtype they are made, shows."""
    table, index = torch.randn(9, 24).to(dtype), torch.randint(0, 9, (5, 40))

    def step(state: Any, batch: Any) -> Any:
        return state, fzero.grad(lambda p, b: (F.embedding(b["x"], p) * b["y"]).float().sum())(state, batch)

    gm = trace_step.capture(step, table, {"x": index, "y": torch.randn(5, 40, 24).to(dtype)}, axis="dp").regions[0].gm
    assert aten.embedding_dense_backward.default in {node.target for node in gm.graph.nodes}
    inputs = {torch.int64: [index], dtype: [table, torch.randn(5, 40, 24).to(dtype)]}
    takes = [n.meta["val"] for n in fx_nodes.placeholders(gm.graph)]
    check(gm, given=[x for like in takes for x in inputs[like.dtype] if x.shape == like.shape])


MASK = torch.linspace(-1, 1, 64).view(8, 8).t()
LOSSES = {
    "binary_cross_entropy": lambda p, b: F.binary_cross_entropy(torch.sigmoid(b @ p["w"]), (b > 0).float()),
    "huber_loss": lambda p, b: F.huber_loss(b @ p["w"], b) + (p["w"] ** 2).sum(),
    "soft_margin_loss": lambda p, b: F.soft_margin_loss(b @ p["w"], torch.sign(b)),
    "smooth_l1_loss": lambda p, b: F.smooth_l1_loss(b @ p["w"], b),
    "mse_loss": lambda p, b: F.mse_loss(b @ p["w"], b) + F.mse_loss(p["w"], b, reduction="sum"),
    "qr": lambda p, b: torch.linalg.qr(p["w"])[1].square().mean() + b.mean(),
    "inv": lambda p, b: torch.linalg.inv(p["w"] + 9 * torch.eye(8)).mean() + b.mean(),
    "split_copy": lambda p, b: sum(x.square().sum() for x in torch.split_copy(b @ p["w"], 3)),
    "add with alpha": lambda p, b: torch.ops.aten.add.Scalar(b @ p["w"], 2, 3).square().mean(),
    "a log_softmax that is transposed": lambda p, b: (F.log_softmax(b @ p["w"], -1).t() * b.exp()).sum(),
    "a mask that is not contiguous": lambda p, b: (b @ p["w"] * MASK).square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_ops_that_use_their_out_for_more_than_the_result(name: str) -> None:
    """Losses whose `out=` kernels resize it or want memory of their own, checks without a result, odd arguments."""
    loss, w, x = LOSSES[name], torch.randn(8, 8), torch.randn(8, 8)
    state = fzero.init({"w": w}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1)))
    state = fzero.step(state, x)
    leaf = w.clone().requires_grad_()
    value = loss({"w": leaf}, x)
    value.backward()
    torch.testing.assert_close(state.metrics["loss"], value.detach())
    torch.testing.assert_close(state.params["w"].full(), w - 0.1 * leaf.grad)


SCATTERS: dict[str, Any] = {
    "slice": lambda x: torch.slice_scatter(x, x[:64] * 2, 0, 32, 96),
    "select": lambda x: torch.select_scatter(x, x[3] * 2, 1, 5),
    "diagonal": lambda x: torch.diagonal_scatter(x, x[:, 0] * 2),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_a_part_is_replaced_without_memory_beside_the_arena(name: str) -> None:
    """torch's kernels copy all memory behind the tensor that they are given: that was the arena, for each such op."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(SCATTERS[name](x @ params["w"]))
        return x.square().mean()

    batch, w = torch.linspace(-1, 1, 128 * 128).view(128, 128), torch.eye(128)
    state = fzero.step(fzero.init({"w": w}, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))), batch)
    leaf = w.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss({"w": leaf}, batch), [leaf])
    torch.testing.assert_close(state.params["w"].full(), w - 0.1 * grad)
    state, extra = measured_peak(lambda: fzero.step(state, batch))
    assert extra <= max(op.heap for op in state.runtime.compiled(batch).program.ops) + 8192


def test_dropout_needs_no_memory_beside_the_arena() -> None:
    """torch's `copy` copies all memory behind the tensor that it is given: that was the arena, once a dropout."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = F.dropout(torch.tanh(x @ params["w"]), 0.5)
        return x.square().mean()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    batch = torch.ones(256, 32)
    state = fzero.step(fzero.init({"w": torch.eye(32)}, spec, key=fzero.random.key(0)), batch)
    state, extra = measured_peak(lambda: fzero.step(state, batch))
    assert extra < 0.5 * state.held_bytes["arena"]


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: torch.inner(p["a"], p["b"]).sum(),
        lambda p, x: torch.inner(p["a"], p["b"]).sin().sum(),
        lambda p, x: (p["a"] @ p["b"].t()).cos().sum(),
        lambda p, x: F.linear(F.linear(x, p["a"]).tanh(), p["b"].t()).square().mean(),
        lambda p, x: torch.tensordot(p["a"].unsqueeze(0), p["b"].unsqueeze(0), dims=([2], [2])).square().sum(),
        lambda p, x: torch.einsum("ik,jk->ij", p["a"], p["b"]).exp().mean(),
        lambda p, x: (p["a"].t().contiguous().t() * p["b"]).transpose(0, 1).reshape(5, 1).square().sum(),
    ],
)
def test_gradients_of_columns_are_copied_into_their_own_memory(loss: Any) -> None:
    """Of a dim of one element, kernels and shape rules say different strides: a value that lay in its place already was
    copied over itself, which torch refuses."""
    draw = torch.Generator().manual_seed(0)
    params = {name: torch.randn(5, 1, generator=draw) for name in "ab"}
    x = torch.randn(3, 1, generator=draw)
    own = {name: value.clone().requires_grad_() for name, value in params.items()}
    wanted = torch.autograd.grad(loss(own, x), list(own.values()))
    state = fzero.step(fzero.init(params, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1.0))), x)
    for (name, value), grad in zip(params.items(), wanted, strict=True):
        torch.testing.assert_close(value - state.params[name].full(), grad, rtol=1e-5, atol=1e-6)
