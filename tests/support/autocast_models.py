"""Six models that torch.autocast computes in two dtypes, and plain PyTorch's own loop under it: what is compared.

Each case is a module and its batches; `loss(module, batch)` is its mean loss. All is drawn from seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from hf_models import causal_without_mask, masked, sequences
from torch import Tensor, nn

ROWS, RATE = 4, 2e-3
Batches = Callable[[int], dict[str, Tensor]]


class ResNet(nn.Module):
    """Two residual blocks of 3x3 convolutions with group norms."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(4))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in (0, 2):
            y = self.convs[i](torch.relu(self.norms[i](x)))
            x = x + self.convs[i + 1](torch.relu(self.norms[i + 1](y)))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Recurrent(nn.Module):
    """An LSTM cell over eight steps of what a layer norm gives, and a linear head."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm, self.cell, self.head = nn.LayerNorm(8), nn.LSTMCell(8, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), self.cell.hidden_size)
        for t in range(x.shape[1]):
            h, c = self.cell(self.norm(x[:, t]), (h, c))
        logits: Tensor = self.head(h)
        return logits


def _hf(kind: str, **config: Any) -> nn.Module:
    import transformers

    settings = {"vocab_size": 64, "attn_implementation": "sdpa", **config}
    model: nn.Module = getattr(transformers, kind)._from_config(
        getattr(transformers, kind).config_class(**settings), attn_implementation=settings.pop("attn_implementation")
    )
    return model.train()


_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: _hf("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "llama": lambda: _hf("LlamaForCausalLM", **_SIZES, num_key_value_heads=1),
    "t5": lambda: _hf(
        "T5ForConditionalGeneration", d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, attn_implementation="eager",
    ),
    "bert": lambda: _hf("BertForMaskedLM", **_SIZES, **_NO_DROPOUT),
    "resnet": ResNet,
    "lstm": Recurrent,
}  # fmt: skip
_TEXT = {"gpt2": causal_without_mask, "llama": causal_without_mask, "t5": sequences, "bert": masked}


def model(name: str) -> nn.Module:
    """A model of the table, the same at each call."""
    torch.manual_seed(0)
    return MODELS[name]()


def batch(name: str, step: int) -> dict[str, Tensor]:
    """The whole batch of a step: one of four."""
    if name in _TEXT:
        drawn = [_TEXT[name](rank, step % 4) for rank in range(2)]
        return {key: torch.cat([part[key] for part in drawn]) for key in drawn[0]}
    g = torch.Generator().manual_seed(step % 4)
    labels = torch.randint(0, 5, (ROWS,), generator=g)
    shape = (ROWS, 3, 8, 8) if name == "resnet" else (ROWS, 8, 8)
    x = torch.randn(shape, generator=g) + labels.view(-1, *(1 for _ in shape[1:])) / 2
    return {"x": x, "labels": labels}


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of a batch, by the model itself or as a cross-entropy."""
    if "x" not in batch:
        return module(**batch).loss  # type: ignore[no-any-return]
    return F.cross_entropy(module(batch["x"]), batch["labels"])


def stock(name: str, steps: int, dtype: torch.dtype | None) -> list[float]:
    """Losses of plain PyTorch's loop, under torch.autocast to `dtype` if one is given."""
    module = model(name)
    optimizer = torch.optim.AdamW(module.parameters(), RATE)
    losses = []
    for step in range(steps):
        context: AbstractContextManager[Any] = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
        with context:
            value = loss(module, batch(name, step))
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(value.detach()))
    return losses
