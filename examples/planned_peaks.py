"""How large a batch fits: planned peaks of Hugging Face models on a CUDA device, by ZeRO stage and offload.

No device is needed and no weight is drawn: the step is captured on fake tensors and lowered for the world that is asked
for. A peak is linear in the rows of a batch, so two lowerings give the largest batch, and a
third, of that batch, is what is shown.

    pip install "fzero[hf]"
    python examples/planned_peaks.py                             # the table of docs/migration.md (about ten minutes)
    python examples/planned_peaks.py --model bert-large --gb 16  # one model, another device
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fzero
from fzero.interop import from_module

CONTEXT_BYTES = 1.0e9  # of a device's memory that is not torch's: CUDA's context, NCCL's buffers, cuBLAS's workspaces
SETTINGS: dict[str, dict[str, Any]] = {
    "zero=0": {"zero": 0},
    "zero=2": {"zero": 2},
    "zero=3": {"zero": 3},
    "zero=3, offload='optimizer+params'": {"zero": 3, "offload": "optimizer+params", "update_on": "device"},
}


@dataclass(frozen=True)
class Model:
    """`make()` is a module, `batch(rows)` what its forward is given. precision: as people run
    it."""

    make: Callable[[], torch.nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    precision: str
    settings: tuple[str, ...] = tuple(SETTINGS)


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.int64)


def causal(layers: int, width: int, heads: int) -> Model:
    """GPT-2 of a size, on 1,024 tokens a row."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, use_cache=False)
    return Model(lambda: GPT2LMHeadModel(config), lambda n: {"input_ids": ids(n, 1024), "labels": ids(n, 1024)}, "fp16")


def models() -> dict[str, Model]:
    """The models, by the name of their weights."""
    from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

    bert = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    t5 = T5Config(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, use_cache=False)
    return {
        "gpt2-large": causal(36, 1280, 20),
        "gpt2-xl": causal(48, 1600, 25),
        "t5-large": Model(
            lambda: T5ForConditionalGeneration(t5), lambda n: {"input_ids": ids(n, 512), "labels": ids(n, 128)}, "fp16",
            ("zero=0", "zero=2", "zero=3"),
        ),
        "bert-large": Model(
            lambda: BertForSequenceClassification(bert),
            lambda n: {"input_ids": ids(n, 128), "attention_mask": ids(n, 128), "labels": ids(n, 1)[:, 0]}, "fp16",
            ("zero=0", "zero=2", "zero=3"),
        ),
    }  # fmt: skip


def planned(model: Model, rows: int, world: int, options: dict[str, Any]) -> dict[str, int]:
    """The planned peak of a rank in bytes, by space, for so many rows a rank."""
    from transformers.initialization import no_init_weights

    with no_init_weights():  # memory that nobody writes is none
        module = model.make()
    params, buffers, apply = from_module(module)
    params = {name: value.to("meta") for name, value in params.items()}
    spec = fzero.Spec(
        loss=lambda p, batch: apply(p, buffers, **batch).loss,
        optimizer=fzero.optim.adamw(1e-5),
        precision=model.precision,
        device="cuda",
        **options,
    )
    lowered = fzero.lower(spec, params, model.batch(rows), world_size=world, key=fzero.random.key(0))  # for dropout
    return dict(lowered.memory.spaces)


def largest(model: Model, world: int, options: dict[str, Any], room: float) -> tuple[int, dict[str, int]]:
    """(the most rows whose planned peak fits `room` bytes of the device, the peaks with them). 0 rows: with one."""
    one, two = (planned(model, rows, world, options) for rows in (1, 2))
    row = two["device"] - one["device"]
    rows = max(int((room - one["device"]) / row) + 1, 0) if one["device"] <= room else 0
    found = planned(model, rows, world, options) if rows > 2 else two if rows == 2 else one
    while rows > 2 and found["device"] > room:  # rounding of places
        rows -= 1
        found = planned(model, rows, world, options)
    return rows, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ("gpt2-large", "gpt2-xl", "t5-large", "bert-large")
    parser.add_argument("--model", action="append", choices=known, help="one of the models (default: all)")
    parser.add_argument("--world", type=int, default=2, help="ranks (2)")
    parser.add_argument("--gb", type=float, default=24.0, help="memory of the device in 1e9 bytes (24)")
    args = parser.parse_args()
    found = models()
    print(f"| model | {args.world} ranks | rows a rank | device GB | host GB |\n|---|---|---|---|---|")
    for name in args.model or known:
        for setting in found[name].settings:
            rows, peaks = largest(found[name], args.world, SETTINGS[setting], args.gb * 1e9 - CONTEXT_BYTES)
            shown = str(rows) if rows else "none"
            print(
                f"| {name} | {setting} | {shown} | {peaks['device'] / 1e9:.1f} | {peaks['host'] / 1e9:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
