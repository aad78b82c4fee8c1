"""pipelines: models that a pipeline can cut, and the schedules, meshes and sizes under which `corpus` lowers them.

Each has numbered layers. `tied` uses its embedding at both ends. `lent` uses leaves on other roles than those that keep
them. `keyed` drops values out under a key.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero.random
from fzero.pipeline import CHUNKS, SCHEDULES

VOCABULARY, WIDTH, SEQUENCE = 12, 8, 3


@dataclass(frozen=True)
class Shape:
    """How a pipeline is drawn: roles and data ranks, the schedule, microbatches, and numbered layers of the model."""

    roles: int
    data_ranks: int
    schedule: str
    microbatches: int
    layers: int


@dataclass(frozen=True)
class Piped:
    """A model: `params` draws its parameters for so many layers; `loss` takes a key too if it is `keyed`."""

    params: Callable[[torch.Generator, int], Any]
    loss: Callable[..., Tensor]


def shape(rng: random.Random) -> Shape:
    """Draws a shape: two roles half of the time, and one microbatch now and then."""
    roles, schedule = rng.choice((2, 2, 2, 3, 4)), rng.choice(list(SCHEDULES))
    microbatches = roles if schedule == "interleaved" else rng.choice((1, 2, 2, 3, 4))
    layers = roles * CHUNKS.get(schedule, 1) + rng.choice((0, 0, 1))
    return Shape(roles, rng.choice((1, 2)), schedule, microbatches, layers)


def tokens(g: torch.Generator, rows: int) -> dict[str, Tensor]:
    """A batch of so many rows."""
    return {name: torch.randint(VOCABULARY, (rows, SEQUENCE), generator=g) for name in ("inputs", "targets")}


def _normal(g: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=g) * 0.4


def _blocks(g: torch.Generator, layers: int) -> list[Any]:
    return [{"norm": torch.ones(WIDTH), "up": _normal(g, WIDTH, WIDTH), "down": _normal(g, WIDTH, WIDTH)}
            for _ in range(layers)]  # fmt: skip


def _through(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = x + torch.tanh(F.layer_norm(x, (WIDTH,), block["norm"]) @ block["up"]) @ block["down"]
    return x


def _entropy(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), batch["targets"].view(-1))


def _tied(g: torch.Generator, layers: int) -> Any:
    return {"tokens": _normal(g, VOCABULARY, WIDTH), "blocks": _blocks(g, layers)}


def _tied_loss(p: Any, batch: Any) -> Tensor:
    return _entropy(_through(p["blocks"], p["tokens"][batch["inputs"]]) @ p["tokens"].t(), batch)


def _untied(g: torch.Generator, layers: int) -> Any:
    return {**_tied(g, layers), "head": _normal(g, WIDTH, VOCABULARY)}


def _untied_loss(p: Any, batch: Any) -> Tensor:
    return _entropy(_through(p["blocks"], p["tokens"][batch["inputs"]]) @ p["head"], batch)


def _lent(g: torch.Generator, layers: int) -> Any:
    return {**_untied(g, layers), "first": _normal(g, WIDTH, WIDTH), "embed": _normal(g, WIDTH, WIDTH)}


def _lent_loss(p: Any, batch: Any) -> Tensor:
    x = _through(p["blocks"], torch.tanh(p["tokens"][batch["inputs"]] @ p["first"]))
    return _entropy(x @ p["embed"] @ p["first"] @ p["head"], batch)


def _keyed_loss(p: Any, batch: Any, key: Tensor) -> Tensor:
    x = p["tokens"][batch["inputs"]]
    for number, block in enumerate(p["blocks"]):
        x = fzero.random.dropout(fzero.random.fold_in(key, number), _through([block], x), 0.25)
    return _entropy(x @ p["head"], batch)


PIPED: dict[str, Piped] = {
    "tied": Piped(_tied, _tied_loss),
    "untied": Piped(_untied, _untied_loss),
    "lent": Piped(_lent, _lent_loss),
    "keyed": Piped(_untied, _keyed_loss),
}
