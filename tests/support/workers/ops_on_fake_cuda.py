"""The ops of small losses on CUDA, by name, as one line of JSON: run by test_fake_cuda_command.py in the process of
`fzero fake-cuda`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fzero
from fzero.ir import fx_nodes

ROWS, WIDTH = 4, 16
CLOSED_OVER = torch.ones(WIDTH)


def heads(x: Tensor, count: int = 2, width: int = 8) -> Tensor:
    """x (ROWS, WIDTH) as heads: (1, count, ROWS, width)."""
    return x.repeat(1, count * width // WIDTH + 1)[:, : count * width].view(1, ROWS, count, width).transpose(1, 2)


def gru_cell(x: Tensor) -> Tensor:
    weights = x.new_ones(3 * WIDTH, WIDTH), x.new_ones(3 * WIDTH, WIDTH), x.new_ones(3 * WIDTH), x.new_ones(3 * WIDTH)
    return torch.gru_cell(x, x.tanh(), *weights)


def ctc_loss(x: Tensor) -> Tensor:
    scores = x[None].expand(6, -1, -1).log_softmax(-1)
    return F.ctc_loss(scores, torch.ones(ROWS, 3, dtype=torch.int64, device=x.device), [6] * ROWS, [3] * ROWS)


def margin_loss(x: Tensor) -> Tensor:
    return F.multi_margin_loss(x, torch.zeros(ROWS, dtype=torch.int64, device=x.device))


def by_products(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), dropout_p=0.5)


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return F.scaled_dot_product_attention(heads(x), heads(x), heads(x))


def attended(count: int = 2, width: int = 8, **options: Any) -> Callable[[Tensor], Tensor]:
    """Attention of 2 heads in k and v, in bf16."""

    def call(x: Tensor) -> Tensor:
        x = x.bfloat16()
        given = {name: value(x) if callable(value) else value for name, value in options.items()}
        return F.scaled_dot_product_attention(heads(x, count, width), heads(x, 2, width), heads(x, 2, width), **given)

    return call


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "the device by name": lambda x: x.to("cuda").tanh(),
    "gru cell": gru_cell,
    "ctc": ctc_loss,
    "margin": margin_loss,
    "attention": attended(),
    "shared heads": attended(4, enable_gqa=True),
    "mask": attended(attn_mask=lambda x: torch.ones(ROWS, ROWS, dtype=torch.bool, device=x.device).tril()),
    "mask with a gradient": attended(attn_mask=lambda x: x[:, :ROWS]),
    "wide": attended(width=256),
    "dropout by products": by_products,
    "autocast": autocast,
    "capability": lambda x: x.tanh() if torch.cuda.get_device_capability(x.device)[0] == 9 else x.exp(),
    "closed over": lambda x: x + CLOSED_OVER,
}


def ops(fn: Callable[[Tensor], Tensor]) -> list[str]:
    """The names of the ops of a step with a loss, or its error."""
    spec = fzero.Spec(loss=lambda p, x: fn(p * x).float().sum(), optimizer=fzero.optim.sgd(0.1), device="cuda")
    state = torch.empty(ROWS, WIDTH)
    try:
        low = fzero.lower(spec, state, torch.empty(ROWS, WIDTH), world_size=1, key=fzero.random.key(0))
    except fzero.FzeroError as error:
        return [str(error)]
    nodes = [n for gm in low.program.segments.values() for n in gm.graph.nodes if fx_nodes.is_compute(n)]
    return sorted({str(n.target) for n in nodes})


if __name__ == "__main__":
    print(json.dumps({name: ops(fn) for name, fn in LOSSES.items()}))
