"""A byte-level GPT as two functions over a pytree of tensors: `init_gpt(key, config) -> params`, `gpt(params, tokens)`.

GPT-2's shape: learned positions, pre-norm blocks, GELU, an output layer tied to the embedding. A token is one byte,
so there is no tokenizer and the vocabulary is 256. Heads are always 64 wide, which makes their number a shape: the
parameters say everything about the model, and `gpt` needs no configuration.

In the comments B is the batch, T the sequence, D the width, H the heads, K = 64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero

Params = dict[str, Any]  # nested dicts and lists of tensors
Batch = dict[str, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

VOCABULARY = 256
HEAD_DIM = 64


@dataclass(frozen=True)
class Config:
    """Sizes. `width` is a multiple of 64; `tied` uses the embedding as the output layer too; a larger `vocabulary` than
    256 has rows that no byte asks for."""

    num_layers: int
    width: int
    sequence: int
    tied: bool = True
    vocabulary: int = VOCABULARY


def sizes(sequence: int) -> dict[str, Config]:
    """The named sizes, for sequences of up to `sequence` bytes."""
    return {
        "tiny": Config(num_layers=2, width=64, sequence=sequence),
        "small": Config(num_layers=4, width=128, sequence=sequence),
        "gpt2": Config(num_layers=12, width=768, sequence=sequence),
    }


def init_gpt(key: Tensor, config: Config) -> Params:
    """Fresh parameters, fp32. GPT-2's rule: N(0, 0.02), and less with depth for layers that write to the residual.

    Embeddings are wider: with 256 rows each is trained often, and N(0, 0.05) saves some hundred steps.
    """
    width = config.width
    keys = fzero.random.split(key, config.num_layers + 3)

    def normal(key: Tensor, *shape: int, scale: float = 0.02) -> Tensor:
        return fzero.random.normal(key, shape) * scale

    def block(key: Tensor) -> Params:
        into_residual = 0.02 / math.sqrt(2 * config.num_layers)
        qkv, project, up, down = fzero.random.split(key, 4)
        return {
            "norm1": {"scale": torch.ones(width), "bias": torch.zeros(width)},
            "attention": {
                "qkv": {"weight": normal(qkv, 3 * width, width), "bias": torch.zeros(3 * width)},
                "project": {"weight": normal(project, width, width, scale=into_residual), "bias": torch.zeros(width)},
            },
            "norm2": {"scale": torch.ones(width), "bias": torch.zeros(width)},
            "mlp": {
                "up": {"weight": normal(up, 4 * width, width), "bias": torch.zeros(4 * width)},
                "down": {"weight": normal(down, width, 4 * width, scale=into_residual), "bias": torch.zeros(width)},
            },
        }

    params = {
        "tokens": normal(keys[0], config.vocabulary, width, scale=0.05),
        "positions": normal(keys[1], config.sequence, width),
        "blocks": [block(k) for k in keys[3:]],
        "norm": {"scale": torch.ones(width), "bias": torch.zeros(width)},
    }
    if not config.tied:
        params["output"] = normal(keys[2], config.vocabulary, width)
    return params


def norm(params: Params, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params["scale"], params["bias"])


def linear(params: Params, x: Tensor) -> Tensor:
    return F.linear(x, params["weight"], params["bias"])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each byte looks at all bytes up to itself."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(params: Params, x: Tensor, attend: Attend) -> Tensor:
    heads = (*x.shape[:2], 3, -1, HEAD_DIM)
    q, k, v = linear(params["qkv"], x).view(heads).permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, K)
    mixed = attend(q, k, v)  # (B, H, T, K)
    return linear(params["project"], mixed.transpose(1, 2).flatten(2))  # (B, T, D)


def mlp(params: Params, x: Tensor) -> Tensor:
    return linear(params["down"], F.gelu(linear(params["up"], x), approximate="tanh"))


def gpt(params: Params, tokens: Tensor, attend: Attend = causal) -> Tensor:
    """Logits (B, T, vocabulary) for the byte after each of `tokens` (B, T), int64, T at most `config.sequence`.

    `attend(q, k, v)` is the attention of a layer, each (B, H, T, K).
    """
    x = F.embedding(tokens, params["tokens"]) + params["positions"][: tokens.shape[1]]  # (B, T, D)
    for block in params["blocks"]:
        x = x + attention(block["attention"], norm(block["norm1"], x), attend)
        x = x + mlp(block["mlp"], norm(block["norm2"], x))
    output = params.get("output")
    return F.linear(norm(params["norm"], x), params["tokens"] if output is None else output)


def loss_fn(params: Params, batch: Batch, attend: Attend = causal) -> Tensor:
    """Mean cross-entropy in nats per byte; `batch["x"]` and `batch["y"]` are (B, T), y one byte further than x."""
    logits = gpt(params, batch["x"], attend)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten())


@torch.no_grad()
def generate(params: Params, prompt: bytes, num_bytes: int, *, seed: int, temperature: float = 0.8) -> bytes:
    """`prompt` continued by `num_bytes` sampled bytes; each sees the last `config.sequence` bytes."""
    window = params["positions"].shape[0]
    device = params["tokens"].device
    generator = torch.Generator(device=device).manual_seed(seed)
    text = torch.tensor(list(prompt), device=device)[None]  # (1, T)
    for _ in range(num_bytes):
        logits = gpt(params, text[:, -window:])[:, -1]  # (1, 256)
        chosen = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        text = torch.cat([text, chosen], dim=1)
    return bytes(text[0].tolist())
