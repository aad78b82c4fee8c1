"""What a loss takes of values that lie in parts: norms, variances, logsumexp and extrema over a sharded dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import run
from torch import Tensor

import fzero
from fzero import P, optim

VOCAB, WIDTH, HIDDEN = 16, 8, 32
RULES = {"emb": P("tp", None), "w": P(None, "tp"), "v": P("tp", None), "head": P(None, "tp")}


def example() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"emb": (VOCAB, WIDTH), "w": (WIDTH, HIDDEN), "v": (HIDDEN, WIDTH), "head": (WIDTH, VOCAB)}
    params = {k: torch.randn(*shape, generator=draw, dtype=torch.float64) / 4 for k, shape in shapes.items()}
    return params, {k: torch.randint(0, VOCAB, (4, 6), generator=draw) for k in ("x", "y")}


def hidden(p: Any, b: Any) -> Tensor:
    return p["emb"][b["x"]] @ p["w"]


def logits(p: Any, b: Any, h: Tensor | None = None) -> Tensor:
    return torch.tanh(hidden(p, b) if h is None else h) @ p["v"] @ p["head"]


def entropy(scores: Tensor, b: Any) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), b["y"].flatten())


def of_accuracy(p: Any, b: Any) -> tuple[Tensor, dict[str, Tensor]]:
    scores = logits(p, b)
    right = (scores.argmax(-1) == b["y"]).double().mean()
    return entropy(scores, b), {"right": right, "best": scores.max(-1)[0].mean(), "least": scores.min(-1)[0].mean()}


def of_layer_norm(p: Any, b: Any) -> Tensor:
    h = hidden(p, b)
    scaled = (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    return entropy(logits(p, b, scaled), b)


def of_normalised_weights(p: Any, b: Any) -> Tensor:
    """Along the dim that is sharded."""
    return entropy(logits(p, b, p["emb"][b["x"]] @ F.normalize(p["w"], dim=1)), b)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "z-loss": lambda p, b: entropy(logits(p, b), b) + 1e-2 * logits(p, b).logsumexp(-1).square().mean(),
    "norms of weights": lambda p, b: entropy(logits(p, b), b) + 1e-2 * sum(w.norm() for w in p.values()),
    "largest weight": lambda p, b: entropy(logits(p, b), b) + p["w"].norm(float("inf")) - p["v"].amin(),
    "spread": lambda p, b: entropy(logits(p, b), b) + hidden(p, b).std(-1).mean(),
    "accuracy": of_accuracy,
    "a layer norm by hand": of_layer_norm,
    "normalised weights": of_normalised_weights,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.sampled(4)
def test_reductions_over_a_sharded_dim_are_those_of_one_rank(name: str) -> None:
    params, batch = example()

    def ran(mesh: dict[str, int], **given: Any) -> Any:
        spec = fzero.Spec(loss=LOSSES[name], optimizer=optim.sgd(0.5, momentum=0.9), mesh=mesh, **given)
        return run(spec, params, lambda rank, step: batch, world=max(mesh.values()), steps=2)

    alone, parts = ran({"dp": 1}), ran({"tp": 4}, shard=RULES)
    for path, one in alone.final.items():
        torch.testing.assert_close(parts.final[path], one, rtol=1e-12, atol=1e-13)
    for one, other in zip(alone.metrics, parts.metrics, strict=True):
        for rank in other:
            assert {k: float(x) for k, x in rank.items()} == pytest.approx(
                {k: float(x) for k, x in one[0].items()}, 1e-12
            )
