"""The models and the data of every contender: plain `nn.Module`s, and batches that a seed makes.

GPT is GPT-2's shape: learned positions, pre-norm blocks, GELU, an output layer tied to the embedding, no dropout. Llama
has rotary positions, RMSNorm, SwiGLU, no biases and an output layer of its own. `forward(x, y)` returns the loss, so
that every wrapper (DDP, FSDP2, DeepSpeed, `fzero.interop.from_module`) wraps the same computation.

In the comments B is the batch, T the sequence, D the width, H the heads, K = D / H.
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
    """A model and one rank's batch of `batch` sequences of `sequence` tokens. `inner` is the width inside an MLP;
    the family is "gpt", "gpt_untied" or "llama"; `rate` is AdamW's learning rate."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    inner: int
    family: str = "gpt"
    rate: float = LEARNING_RATE

    @property
    def tokens(self) -> int:
        """Tokens of one rank's batch."""
        return self.batch * self.sequence

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in empty_model(self).parameters())

    @property
    def flops(self) -> int:
        """Of one rank's forward and backward: 6 per token and parameter that is multiplied with (a table that is only
        looked up does no work), and 12 L T D per token for attention, causal or not, as usual for an MFU."""
        tables = {"gpt": ("positions.weight",), "llama": ("tokens.weight",)}.get(
            self.family, ("positions.weight", "tokens.weight")
        )
        worked = sum(p.numel() for name, p in empty_model(self).named_parameters() if name not in tables)
        return (6 * worked + 12 * self.layers * self.sequence * self.width) * self.tokens


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, vocabulary=512, sequence=32, batch=2, inner=256),  # for the tests
    "small": Size(layers=4, width=256, heads=4, vocabulary=2048, sequence=128, batch=8, inner=1024),  # 3.7M
    "gpt2": Size(layers=12, width=768, heads=12, vocabulary=50257, sequence=256, batch=1, inner=3072),  # 124M
    "gpt2_short": Size(
        layers=12, width=768, heads=12, vocabulary=50257, sequence=64, batch=1, inner=3072
    ),  # few tokens
    "medium": Size(layers=24, width=1024, heads=16, vocabulary=50257, sequence=256, batch=1, inner=4096),  # 355M
    "deep": Size(layers=48, width=128, heads=2, vocabulary=2048, sequence=32, batch=1, inner=512),  # 9.8M, launch-bound
    "shallow": Size(layers=12, width=128, heads=2, vocabulary=2048, sequence=32, batch=1, inner=512),  # a quarter of it
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, size.inner)
        self.down = nn.Linear(size.inner, size.width)

    def forward(self, h: Tensor) -> Tensor:
        rows, length, width = h.shape
        qkv = self.qkv(self.norm1(h)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, K)
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
        return cross_entropy(self.logits(self.norm(h)), y)

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.tokens.weight)  # (B, T, vocabulary)


class UntiedGPT(GPT):
    """GPT with an output layer of its own."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.output = nn.Linear(size.width, size.vocabulary, bias=False)

    def logits(self, h: Tensor) -> Tensor:
        found: Tensor = self.output(h)
        return found


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


class RotaryBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.RMSNorm(size.width, eps=1e-5)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.project = nn.Linear(size.width, size.width, bias=False)
        self.norm2 = nn.RMSNorm(size.width, eps=1e-5)
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        rows, length, width = h.shape
        qkv = self.qkv(self.norm1(h)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, K)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        h = h + self.project(mixed.transpose(1, 2).reshape(rows, length, width))
        x = self.norm2(h)
        return h + self.down(F.silu(self.gate(x)) * self.up(x))


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary positions on (B, H, T, K), halves paired, computed in fp32."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=torch.float32), rates)  # (T, K/2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(RotaryBlock(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)
        self.output = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x)  # (B, T, D)
        for block in self.blocks:
            h = block(h)
        logits = self.output(self.norm(h))  # (B, T, vocabulary)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def empty_model(size: Size) -> nn.Module:
    """Shapes alone, on the meta device."""
    with torch.device("meta"):
        return {"gpt": GPT, "gpt_untied": UntiedGPT, "llama": Llama}[size.family](size)


def make_model(size: Size, device: str = "cpu") -> nn.Module:
    """The same parameters in every process: GPT-2's rule, N(0, 0.02), less for layers that write to the residual."""
    model = empty_model(size).to_empty(device=device)
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
