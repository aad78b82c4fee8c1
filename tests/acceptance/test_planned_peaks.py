"""What Hugging Face's models take on a CUDA device by plan: the tables of docs/models.md.

`FZERO_UPDATE_PEAKS=1` writes them; without it the tests compare. Nothing is allocated and nothing runs: the models are
on the meta device. A largest batch is guessed from models of 4 and 8 layers with 8 and 16 rows, and then shown with the
whole model: it fits, and one row more does not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kept
import pytest
import torch

import fzero
from fzero.interop import from_module

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(5400)]

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
GB = 10**9
CARD = 24 * GB
RANKS = 2
ADAMW = fzero.optim.adamw(1e-4)
GPT2 = {"Large": (1280, 36, 20), "XL": (1600, 48, 25)}  # width, layers, heads
STATES: dict[str, dict[str, Any]] = {
    "zero=0": {"zero": 0},
    "zero=2": {"zero": 2},
    "zero=3": {"zero": 3},
    'zero=3, offload="optimizer+params"': {"zero": 3, "offload": "optimizer+params"},
}
TEXTS: dict[str, tuple[int, dict[str, Any]]] = {  # tokens of a row, and how activations are kept
    "512 tokens": (512, {}),
    '1,024 tokens, remat="full"': (1024, {"remat": "full"}),
}
FEW_LAYERS, FEW_ROWS = (4, 8), (8, 16)
Loss = Callable[[Any, Any], torch.Tensor]


def functional(kind: type, config: Any) -> tuple[Loss, Any]:
    """(its own loss in training mode, its parameters), without memory."""
    with accelerate.init_empty_weights():  # buffers have values
        model = kind(config)
    model.tie_weights()  # which that undid
    params, buffers, apply = from_module(model, train=True)

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return apply(params, buffers, **batch).loss

    return loss, params


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.empty(rows, length, dtype=torch.int64, device="meta")


def planned(loss: Loss, params: Any, batch: Any, world: int, **given: Any) -> int:
    """Bytes of the device on a rank, at most."""
    spec = fzero.Spec(loss=loss, optimizer=ADAMW, precision="fp16", device="cuda", **given)
    with kept.captures():
        lowered = fzero.lower(spec, params, batch, world_size=world, key=fzero.random.key(0))
    return lowered.memory.spaces["device"]


@cache
def gpt2(size: str, layers: int) -> tuple[Loss, Any]:
    """Without dropout of attention's weights, which would keep them: fused attention has none that is drawn by key."""
    width, _, heads = GPT2[size]
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, attn_pdrop=0.0)
    return functional(transformers.GPT2LMHeadModel, config)


@cache
def of_gpt2(size: str, layers: int, state: str, text: str, rows: int) -> int:
    length, saved = TEXTS[text]
    batch = {"input_ids": tokens(rows, length), "labels": tokens(rows, length)}
    return planned(*gpt2(size, layers), batch, RANKS, **STATES[state], **saved)


def line(size: str, state: str, text: str) -> tuple[float, float]:
    """(bytes without a row, bytes of a row) of the whole model, if a layer and a row always add the same."""
    (few, more), (low, high) = FEW_LAYERS, FEW_ROWS
    layers = GPT2[size][1]

    def whole(rows: int) -> float:
        a, b = (of_gpt2(size, depth, state, text, rows) for depth in FEW_LAYERS)
        return a + (b - a) / (more - few) * (layers - few)

    row = (whole(high) - whole(low)) / (high - low)
    return whole(low) - row * low, row


def largest(size: str, state: str, text: str) -> tuple[int, int]:
    """(the most rows of a rank that fit the card, the bytes that they take). One row more does not fit."""
    base, row = line(size, state, text)
    peaks, rows = {0: 0}, max(1, int((CARD - base) / row))
    while True:
        peaks[rows] = of_gpt2(size, GPT2[size][1], state, text, rows)
        print(size, state, text, rows, peaks[rows] / GB, flush=True)
        fit = max(n for n, peak in peaks.items() if peak <= CARD)
        over = min((n for n, peak in peaks.items() if peak > CARD), default=10**6)
        if over == fit + 1:
            return fit, peaks[fit]
        known = fit or over
        guess = known + math.floor((CARD - peaks[known]) / row)
        rows = min(max(guess, fit + 1), over - 1)


def of_batches() -> Iterator[str]:
    yield "| model | state | " + " | ".join(TEXTS) + " |"
    yield "|---|---|" + "---|" * len(TEXTS)
    for size in GPT2:
        for state in STATES:
            cells = []
            for text in TEXTS:
                rows, peak = largest(size, state, text)
                cells.append(f"{rows} ({peak / GB:.1f} GB)" if rows else "none")
                print(size, state, text, cells[-1], flush=True)
            yield f"| GPT-2 {size} | `{state}` | {' | '.join(cells)} |"


def of_models() -> Iterator[str]:
    t5 = transformers.T5Config(
        d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0, use_cache=False
    )
    bert = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    many = tokens(24, 128)
    rows = {
        ("T5-large", "4 rows of 512 and 128 tokens", 4): (
            functional(transformers.T5ForConditionalGeneration, t5),
            {"input_ids": tokens(4, 512), "labels": tokens(4, 128)},
        ),
        ("BERT-Large", "24 rows of 128 tokens", 8): (
            functional(transformers.BertForSequenceClassification, bert),
            {"input_ids": many, "attention_mask": many, "labels": tokens(24, 1)[:, 0]},
        ),
    }
    yield '| model | ranks | batch of a rank | zero=0 | zero=2 | zero=3 | zero=2, `remat="full"` |'
    yield "|---|---|---|---|---|---|---|"
    for (name, batch, world), ((loss, params), given) in rows.items():
        settings: tuple[dict[str, Any], ...] = ({"zero": 0}, {"zero": 2}, {"zero": 3}, {"zero": 2, "remat": "full"})
        peaks = [planned(loss, params, given, world, **setting) for setting in settings]
        print(name, peaks, flush=True)
        yield f"| {name} | {world} | {batch} | {' | '.join(f'{peak / GB:.2f} GB' for peak in peaks)} |"


@pytest.mark.parametrize("made", [of_batches, of_models], ids=lambda made: made.__name__)
def test_the_docs_have_what_models_take_by_plan(made: Callable[[], Iterator[str]]) -> None:
    first, last = f"<!-- {made.__name__} -->\n", f"<!-- to here: {made.__name__} -->\n"
    table = "\n".join(made()) + "\n"
    before, _, rest = DOCS.read_text().partition(first)
    _, _, after = rest.partition(last)
    if "FZERO_UPDATE_PEAKS" in os.environ:
        DOCS.write_text(f"{before}{first}\n{table}\n{last}{after}")
    assert f"{first}\n{table}\n{last}" in DOCS.read_text(), f"{DOCS.name} is out of date: FZERO_UPDATE_PEAKS=1 pytest"
