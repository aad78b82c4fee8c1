"""batched_heads: a frozen head of shifted features, which torch computes as a product for each sequence, by chunks.

A product that is left out, or a weight that is not turned for the backward, is another gradient, or no head at all.
"""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from helpers import run
from torch import Tensor

import fzero
from fzero.lowering.batched_heads import batched_heads, unbatched
from fzero.lowering.chunk_body import heads

V, D, S, CHUNKS = 48, 8, 12, 4
aten = torch.ops.aten
Params = dict[str, Tensor]


def params() -> Params:
    draw = torch.Generator().manual_seed(0)
    shapes = {"embed": (V, D), "w": (D, D), "lora": (D, D), "head": (D, V)}
    return {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}


def batch(rank: int = 0, step: int = 0) -> Tensor:
    return torch.randint(0, V, (3, S + 1), generator=torch.Generator().manual_seed(10 * step + rank))


def features(p: Params, x: Tensor) -> Tensor:
    h = F.embedding(x, p["embed"])
    return torch.tanh(h @ p["w"] + h @ p["lora"])[:, :-1]


def tied(p: Params, x: Tensor) -> Tensor:
    logits = features(p, x) @ p["embed"].T
    return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum")


def untied(p: Params, x: Tensor) -> Tensor:
    logits = features(p, x) @ p["head"]
    return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum")


def of_each(p: Params, x: Tensor) -> Tensor:
    """Each sequence has a head of its own."""
    logits = features(p, x) @ torch.stack([p["head"], p["head"] + 1, p["head"] + 2])
    return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum")


def by_hand(p: Params, x: Tensor, head: Tensor) -> Tensor:
    parts = zip(features(p, x).chunk(CHUNKS, 1), x[:, 1:].chunk(CHUNKS, 1), strict=True)
    totals = [F.cross_entropy(h.flatten(0, 1) @ head, y.flatten(), reduction="sum") for h, y in parts]
    return sum(totals[1:], totals[0])


def spec(loss: Any, **given: Any) -> fzero.Spec:
    return fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.01), trainable="lora", **given)


@pytest.mark.parametrize("loss", [tied, untied])
def test_a_frozen_head_of_shifted_tokens_runs_by_chunks(loss: Any) -> None:
    done = run(spec(loss, loss_chunks=CHUNKS), params(), batch, world=1, steps=1)
    given = params()
    lora = given["lora"].requires_grad_()
    wanted = by_hand(given, batch(), given["embed"].T if loss is tied else given["head"])
    (grad,) = torch.autograd.grad(wanted, lora)
    assert torch.equal(done.metrics[0][0]["loss"], wanted.detach())
    torch.testing.assert_close(done.final["params/lora"], lora.detach() - 0.01 * grad, rtol=0, atol=1e-6)
    program = fzero.lower(spec(loss, loss_chunks=CHUNKS), params(), batch(), world_size=1).program
    assert sum(aten.bmm.default in targets(program, op.segment) for op in program.ops if op.segment) == 0


def targets(program: Any, name: str) -> set[Any]:
    return {node.target for node in program.segments[name].graph.nodes}


def test_stages_have_one_set_of_bits() -> None:
    plain = run(spec(tied, loss_chunks=CHUNKS, mesh={"dp": 2}, zero=0), params(), batch, world=2, steps=2)
    other = run(spec(tied, loss_chunks=CHUNKS, mesh={"dp": 2}, zero=3, remat="full"), params(), batch, world=2, steps=2)
    assert torch.equal(other.final["params/lora"], plain.final["params/lora"])


def test_only_a_weight_that_sequences_share_is_a_head() -> None:
    for loss, count in ((tied, 1), (untied, 1), (of_each, 0)):
        graph, _ = cases.captured(spec(loss), params(), batch())
        gm = next(region.gm for region in graph.regions if region.grad_of)
        assert len(batched_heads(gm.graph)) == count
        assert not heads(gm.graph)
        unbatched(gm.graph)
        gm.graph.lint()
        assert len(heads(gm.graph)) == count
