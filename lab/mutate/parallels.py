"""parallels: models whose leaves may lie over `tp`, and the meshes and rules under which `corpus` lowers them.

`columns` is blocks of a norm and two products with biases between an embedding and a head; `heads` has attention too;
`tied` uses its embedding as the head. Rules are those of textbooks, each drawn or left out: so some of a block's leaves
lie in parts, and others whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.pipeline import CHUNKS
from fzero.shard.partition import P

VOCABULARY, WIDTH, HEADS, SEQUENCE = 8, 8, 2, 4
MESHES: tuple[Mapping[str, int], ...] = (
    {"tp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}, {"tp": 4},
    {"dp_out": 2, "dp": 1, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2},
)  # fmt: skip
BLOCK = {"**/up": P(None, "tp"), "**/b": P("tp"), "**/down": P("tp", None)}
ATTENTION = {"**/[qkv]": P(None, "tp"), "**/o": P("tp", None)}


@dataclass(frozen=True)
class Shared:
    """A model: `params` draws its parameters for so many blocks. cuts: rules for leaves that are cut together."""

    params: Callable[[torch.Generator, int], Any]
    loss: Callable[[Any, Any], Tensor]
    cuts: tuple[Mapping[str, P], ...]


def grid(rng: random.Random) -> tuple[dict[str, int], dict[str, Any], int]:
    """(a mesh with `tp`, fields of `Spec` of its pipeline and microbatches, blocks of a model)."""
    mesh = dict(rng.choice(MESHES))
    if "pp" not in mesh:
        return mesh, {"microbatches": rng.choice((1, 1, 2))}, rng.choice((1, 1, 2))
    schedule = rng.choice(("gpipe", "1f1b", "zb-h1"))
    blocks = mesh["pp"] * CHUNKS.get(schedule, 1)
    return mesh, {"pipeline": schedule, "microbatches": 2}, blocks


def rules(rng: random.Random, cuts: tuple[Mapping[str, P], ...], size: int) -> dict[str, P]:
    """Some of the cuts, at least the first; attention's only where each rank has whole heads."""
    legal = [cut for cut in cuts if cut is not ATTENTION or HEADS % size == 0]
    chosen = [cut for cut in legal if rng.random() < 0.6] or legal[:1]
    return {rule: dims for cut in chosen for rule, dims in cut.items()}


def tokens(g: torch.Generator, rows: int) -> dict[str, Tensor]:
    """A batch of so many rows."""
    return {name: torch.randint(VOCABULARY, (rows, SEQUENCE), generator=g) for name in ("inputs", "targets")}


def _normal(g: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=g) * 0.4


def _columns(g: torch.Generator, blocks: int) -> Any:
    made = [{"norm": 1 + _normal(g, WIDTH), "up": _normal(g, WIDTH, 2 * WIDTH), "b": _normal(g, 2 * WIDTH),
             "down": _normal(g, 2 * WIDTH, WIDTH), "c": _normal(g, WIDTH)} for _ in range(blocks)]  # fmt: skip
    return {"tokens": _normal(g, VOCABULARY, WIDTH), "blocks": made, "head": _normal(g, WIDTH, VOCABULARY)}


def _heads(g: torch.Generator, blocks: int) -> Any:
    params = _columns(g, blocks)
    for block in params["blocks"]:
        block |= {name: _normal(g, WIDTH, WIDTH) for name in "qkvo"}
    return params


def _tied(g: torch.Generator, blocks: int) -> Any:
    params = _columns(g, blocks)
    del params["head"]
    return params


def _attention(block: Any, x: Tensor) -> Tensor:
    rows, length, _ = x.shape
    q, k, v = ((x @ block[n]).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for n in "qkv")
    weights = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(rows, length, -1) @ block["o"]


def _loss(p: Any, batch: Any) -> Tensor:
    x = F.embedding(batch["inputs"], p["tokens"])
    for block in p["blocks"]:
        y = F.layer_norm(x, (WIDTH,), block["norm"], eps=1e-5)
        x = x + _attention(block, y) if "o" in block else x
        x = x + torch.tanh(y @ block["up"] + block["b"]) @ block["down"] + block["c"]
    logits = x @ p["head"] if "head" in p else x @ p["tokens"].t()
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), batch["targets"].reshape(-1))


ENDS: tuple[Mapping[str, P], ...] = ({"tokens": P("tp", None)}, {"head": P(None, "tp")})
SHARED: dict[str, Shared] = {
    "columns": Shared(_columns, _loss, (BLOCK, *ENDS)),
    "heads": Shared(_heads, _loss, (BLOCK, ATTENTION, *ENDS)),
    "tied": Shared(_tied, _loss, (BLOCK, {"tokens": P("tp", None)})),
}
