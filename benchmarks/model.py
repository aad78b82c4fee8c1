"""The model and the data of every contender: GPT-2's shape as one plain `nn.Module`, and batches that a seed makes.

Learned positions, pre-norm blocks, GELU, an output layer tied to the embedding, no dropout. `forward(x, y)` returns the
loss, so that every wrapper (DDP, FSDP2, DeepSpeed, `fzero.interop.from_module`) wraps the same computation.

In the comments B is the batch, T the sequence, D the width, H the heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1
SEED = 0


@dataclass(frozen=True)
class Size:
    """A model and one rank's batch of `batch` sequences of `sequence` tokens."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of one rank's batch."""
        return self.batch * self.sequence

    @property
    def num_parameters(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.sequence + 2) * self.width

    @property
    def flops(self) -> int:
        """Of one rank's forward and backward: 6 per parameter and token, and 12 L T D per token for attention."""
        positions = self.sequence * self.width
        per_token = 6 * (self.num_parameters - positions) + 12 * self.layers * self.sequence * self.width
        return per_token * self.tokens


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, vocabulary=512, sequence=32, batch=2),  # for the tests
    "small": Size(layers=4, width=256, heads=4, vocabulary=2048, sequence=128, batch=8),  # 3.7M
    "gpt2": Size(layers=12, width=768, heads=12, vocabulary=50257, sequence=256, batch=1),  # 124M
    "deep": Size(layers=48, width=128, heads=2, vocabulary=2048, sequence=32, batch=1),  # 9.8M, launch-bound
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, h: Tensor) -> Tensor:
        rows, length, width = h.shape
        qkv = self.qkv(self.norm1(h)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, D/H)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        return h + self.down(F.gelu(self.up(self.norm2(h)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]  # (B, T, D)
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.norm(h), self.tokens.weight)  # (B, T, vocabulary)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def make_model(size: Size, device: str = "cpu") -> GPT:
    """The same parameters in every process: GPT-2's rule, N(0, 0.02), less for layers that write to the residual."""
    with torch.device("meta"):
        model = GPT(size)
    model.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                into_residual = name.endswith(("project.weight", "down.weight"))
                scale = 0.02 / math.sqrt(2 * size.layers) if into_residual else 0.02
                parameter.normal_(0.0, scale, generator=generator)
    return model


def make_batch(size: Size, step: int, rank: int, device: str = "cpu") -> Batch:
    """One rank's batch of a step, (B, T) int64 each, y one token further. Small token numbers are common ones, so that
    there is something to learn: log-uniform draws, about Zipf's law."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank + 1)
    draws = torch.rand(size.batch, size.sequence + 1, generator=generator)
    tokens = (torch.pow(float(size.vocabulary), draws) - 1).long().clamp_(0, size.vocabulary - 1).to(device)
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


def batches(size: Size, rank: int, device: str = "cpu") -> Iterator[Batch]:
    """A rank's batches, one for each step, without end."""
    step = 0
    while True:
        yield make_batch(size, step, rank, device)
        step += 1
