"""Drawn calls of block-sparse attention, and what masked `scaled_dot_product_attention` makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.sparse.block_layout import BlockLayout


@dataclass
class SparseCall:
    """Operands, and the mask bool (batch, heads, tokens, tokens) of the pairs that are looked at."""

    tensors: tuple[Tensor, ...]  # q, k, v, and the incoming gradient
    columns: Tensor | None
    documents: Tensor | None
    numbers: tuple[Any, ...]  # block, left, right, scale
    mask: Tensor

    @property
    def args(self) -> tuple[Any, ...]:
        """The op's operands."""
        return (*self.tensors[:3], self.columns, self.documents, *self.numbers)


def drawn(seed: Any, dtype: torch.dtype = torch.float32, **fixed: Any) -> SparseCall:
    """Random sizes, blocks, bounds, ids and tensors. Some queries see nothing."""
    draw = random.Random(f"{seed}")
    pick = {
        "batch": draw.choice((1, 2, 3)), "groups": draw.choice((1, 2, 3)), "repeat": draw.choice((1, 2, 3)),
        "rows": draw.choice((1, 2, 3, 5, 8)), "block": draw.choice((1, 2, 4, 16)), "dim": draw.choice((1, 4, 8, 32)),
        "value_dim": draw.choice((3, 8)), "table": draw.choice(("none", "one", "batch", "groups", "heads", "all")),
        "documents": draw.random() < 0.5, "density": draw.choice((0.2, 0.5, 1.0)),
    } | fixed  # fmt: skip
    batch, groups, rows, block = pick["batch"], pick["groups"], pick["rows"], pick["block"]
    heads, tokens = groups * pick["repeat"], rows * block
    bounds = [draw.choice((-1, 0, 1, block - 1, block, block + 1, 2 * block + 3)) for _ in range(2)]
    left, right = fixed.get("bounds", bounds)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    own = {"one": (1, 1), "batch": (batch, 1), "groups": (1, groups), "heads": (1, heads), "all": (batch, heads)}
    columns, blocks = None, torch.ones(1, 1, rows, rows, dtype=torch.bool)
    if pick["table"] != "none":
        blocks = torch.rand(*own[pick["table"]], rows, rows, generator=generator) < pick["density"]
        each = [BlockLayout.of_blocks(b, block).blocks(b.shape[0]) for b in blocks]
        assert torch.equal(torch.stack(each), blocks)
        order = torch.argsort((~blocks).int(), dim=-1, stable=True).int()
        columns = order.masked_fill(torch.arange(rows) >= blocks.sum(-1, keepdim=True), -1)
        blocks = blocks.repeat_interleave(heads // blocks.shape[1], 1)
    ahead = torch.arange(tokens) - torch.arange(tokens)[:, None]
    mask = blocks.repeat_interleave(block, 2).repeat_interleave(block, 3).expand(batch, heads, -1, -1)
    mask = mask & ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))
    documents = None
    if pick["documents"]:
        documents = torch.randint(-1, 3, (batch, tokens), generator=generator).sort(1).values.int()
        if draw.random() < 0.3:
            documents = documents[:, torch.randperm(tokens, generator=generator)]
        same = (documents[:, None, :, None] == documents[:, None, None]) & (documents >= 0)[:, None, None]
        mask = mask & same
    tensors = (
        normal(batch, heads, tokens, pick["dim"]), normal(batch, groups, tokens, pick["dim"]),
        normal(batch, groups, tokens, pick["value_dim"]), normal(batch, heads, tokens, pick["value_dim"]),
    )  # fmt: skip
    return SparseCall(
        tensors, columns, documents, (block, left, right, draw.choice((0.5, 1.0)) * pick["dim"] ** -0.5), mask
    )


def masked(call: SparseCall, dtype: torch.dtype) -> list[Tensor]:
    """The result and the gradients of q, k, v by `scaled_dot_product_attention`; rows without a key are 0."""
    q, k, v, grad = (x.to(dtype, copy=True) for x in call.tensors)
    own = [x.requires_grad_() for x in (q, k, v)]
    seen = call.mask.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(
        *own, attn_mask=call.mask | ~seen, scale=call.numbers[-1], enable_gqa=True
    )  # fmt: skip
    out = torch.where(seen, out, 0)
    return [out.detach(), *torch.autograd.grad(out, own, grad)]


def ours(call: SparseCall) -> list[Tensor]:
    """The same by the op, its backward by autograd."""
    own = [x.detach().clone().requires_grad_() for x in call.tensors[:3]]
    out = torch.ops.fzero.block_sparse_attention(*own, *call.args[3:])
    return [out.detach(), *torch.autograd.grad(out, own, call.tensors[3])]
