"""Small pure models that the tests share. Each is `(init(key) -> params, loss(params, batch), batch(rank, step))`.

Batches are made from (rank, step) alone, differ for each, and have the same shape everywhere. Weights are large enough
for gradients to be far from zero in every leaf; no leaf has a gradient that is zero by symmetry (an attention key bias
does), for Adam would amplify its rounding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero import random

Tree = Any
NUM_ROWS = 4  # rows of a batch on one rank: the most microbatches


class Model(NamedTuple):
    """`init(key) -> params`, `loss(params, batch) -> 0-d tensor`, `batch(rank, step) -> pytree` of CPU tensors."""

    init: Callable[[Tensor], Tree]
    loss: Callable[[Tree, Tree], Tensor]
    batch: Callable[[int, int], Tree]


def generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * (step + 1) + rank)


def normal(key: Tensor, *shape: int, scale: float = 1.0) -> Tensor:
    return random.normal(key, shape) * scale


# --- a byte GPT: tied embedding, a list of blocks ---------------------------------------------------------------------

BYTES, WIDTH, HEADS, SEQUENCE, DEPTH = 256, 16, 2, 6, 2


def gpt_init(key: Tensor) -> Tree:
    keys = random.split(key, DEPTH + 2)

    def block(key: Tensor) -> Tree:
        k = random.split(key, 4)
        return {
            "norm": [torch.ones(WIDTH), torch.ones(WIDTH)],
            "qkv": normal(k[0], 3 * WIDTH, WIDTH, scale=0.25),
            "project": normal(k[1], WIDTH, WIDTH, scale=0.25),
            "up": {"w": normal(k[2], 2 * WIDTH, WIDTH, scale=0.25), "b": torch.zeros(2 * WIDTH)},
            "down": {"w": normal(k[3], WIDTH, 2 * WIDTH, scale=0.25), "b": torch.zeros(WIDTH)},
        }

    return {
        "tokens": normal(keys[0], BYTES, WIDTH, scale=0.5),
        "positions": normal(keys[1], SEQUENCE, WIDTH, scale=0.5),
        "blocks": [block(k) for k in keys[2:]],
        "norm": torch.ones(WIDTH),
    }


def gpt_loss(params: Tree, batch: Tree) -> Tensor:
    x = F.embedding(batch["x"], params["tokens"]) + params["positions"]
    for block in params["blocks"]:
        heads = F.linear(F.layer_norm(x, (WIDTH,), block["norm"][0]), block["qkv"])
        q, k, v = heads.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, block["project"])
        inner = F.gelu(F.linear(F.layer_norm(x, (WIDTH,), block["norm"][1]), block["up"]["w"], block["up"]["b"]))
        x = x + F.linear(inner, block["down"]["w"], block["down"]["b"])
    logits = F.linear(F.layer_norm(x, (WIDTH,), params["norm"]), params["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def gpt_batch(rank: int, step: int) -> Tree:
    text = torch.randint(BYTES, (NUM_ROWS, SEQUENCE + 1), generator=generator(rank, step))
    return {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}


# --- a convolutional net ----------------------------------------------------------------------------------------------


def conv_init(key: Tensor) -> Tree:
    k = random.split(key, 3)
    return {
        "stem": {"w": normal(k[0], 8, 3, 3, 3, scale=0.3), "b": torch.zeros(8)},
        "layers": [{"w": normal(k[1], 8, 8, 3, 3, scale=0.2), "b": torch.zeros(8)}],
        "head": {"w": normal(k[2], 5, 8, scale=0.5), "b": torch.zeros(5)},
    }


def conv_loss(params: Tree, batch: Tree) -> Tensor:
    x = F.conv2d(batch["image"], params["stem"]["w"], params["stem"]["b"], padding=1)
    for layer in params["layers"]:
        x = x + F.conv2d(F.silu(x), layer["w"], layer["b"], padding=1)
    x = F.max_pool2d(F.silu(x), 2).mean((2, 3))
    return F.cross_entropy(F.linear(x, params["head"]["w"], params["head"]["b"]), batch["label"])


def conv_batch(rank: int, step: int) -> Tree:
    g = generator(rank, step)
    image = torch.randn(NUM_ROWS, 3, 8, 8, generator=g)
    return {"image": image, "label": torch.randint(5, (NUM_ROWS,), generator=g)}


# --- an MLP with leaves of awkward sizes, and a 0-d one ---------------------------------------------------------------


def mlp_init(key: Tensor) -> Tree:
    k = random.split(key, 4)
    return {
        "layers": [
            {"w": normal(k[0], 7, 11, scale=0.4), "b": normal(k[3], 11, scale=0.1)},
            {"w": normal(k[1], 11, 13, scale=0.4), "b": torch.zeros(13)},
        ],
        "out": normal(k[2], 13, 3, scale=0.4),
        "scale": torch.ones(()),
    }


def mlp_loss(params: Tree, batch: Tree) -> Tensor:
    x, target = batch
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return F.mse_loss(params["scale"] * (x @ params["out"]), target)


def mlp_batch(rank: int, step: int) -> Tree:
    g = generator(rank, step)
    x = torch.randn(NUM_ROWS, 7, generator=g)
    return (x, torch.randn(NUM_ROWS, 3, generator=g) + x[:, :3])


# --- a large embedding, and an output layer of its own ----------------------------------------------------------------

ROWS = 1500


def untied_init(key: Tensor) -> Tree:
    k = random.split(key, 3)
    return {
        "embedding": normal(k[0], ROWS, 8),
        "hidden": normal(k[1], 8, 8, scale=0.4),
        "output": normal(k[2], ROWS, 8, scale=0.4),
    }


def untied_loss(params: Tree, batch: Tree) -> Tensor:
    x = F.embedding(batch["x"], params["embedding"])
    x = x + torch.tanh(x @ params["hidden"])
    return F.cross_entropy(x @ params["output"].T, batch["y"])


def untied_batch(rank: int, step: int) -> Tree:
    x = torch.randint(ROWS, (NUM_ROWS, 2), generator=generator(rank, step))
    return {"x": x[:, 0].contiguous(), "y": x[:, 1].contiguous()}


GPT = Model(gpt_init, gpt_loss, gpt_batch)
CONV = Model(conv_init, conv_loss, conv_batch)
MLP = Model(mlp_init, mlp_loss, mlp_batch)
UNTIED = Model(untied_init, untied_loss, untied_batch)
MODELS = {"gpt": GPT, "conv": CONV, "mlp": MLP, "untied": UNTIED}
