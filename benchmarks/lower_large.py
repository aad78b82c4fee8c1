"""What it takes to lower the step of a 405B-shaped model for 16,384 ranks: one process, no device, no weights.

The layers have the shapes of Llama 3.1 405B: width 16,384, 128 heads of which 8 hold keys, 53,248 in the MLP, a
vocabulary of 128,256. A rank's batch is 16 sequences of 8,192 tokens in 16 microbatches. Capture, the programs of all
roles and their joint verification count.

    python -m benchmarks.lower_large                        # 126 layers, pp=16, dp=128
    python -m benchmarks.lower_large --tp 8                 # and tp=8
    python -m benchmarks.lower_large --layers 8 --pp 2      # a small part of it
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from benchmarks import machine

WIDTH, HIDDEN, HEADS, KEY_HEADS, VOCABULARY = 16_384, 53_248, 128, 8, 128_256
HEAD = WIDTH // HEADS
SHARD = {
    "embed": fzero.P("tp", None), "head": fzero.P(None, "tp"), "blocks/*/[qkv]": fzero.P(None, "tp"),
    "blocks/*/gate": fzero.P(None, "tp"), "blocks/*/up": fzero.P(None, "tp"), "blocks/*/o": fzero.P("tp", None),
    "blocks/*/down": fzero.P("tp", None),
}  # fmt: skip


def parameters(layers: int) -> Any:
    """The parameters on the meta device."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    def layer() -> dict[str, Tensor]:
        keys = KEY_HEADS * HEAD
        attention = {"q": empty(WIDTH, WIDTH), "k": empty(WIDTH, keys), "v": empty(WIDTH, keys)}
        mlp = {"gate": empty(WIDTH, HIDDEN), "up": empty(WIDTH, HIDDEN), "down": empty(HIDDEN, WIDTH)}
        return {**attention, "o": empty(WIDTH, WIDTH), **mlp, "norm1": empty(WIDTH), "norm2": empty(WIDTH)}

    ends = {"embed": empty(VOCABULARY, WIDTH), "norm": empty(WIDTH), "head": empty(WIDTH, VOCABULARY)}
    return {**ends, "blocks": [layer() for _ in range(layers)]}


def rotated(x: Tensor) -> Tensor:
    """Rotary positions, on (..., tokens, head)."""
    half = torch.arange(HEAD // 2, dtype=torch.float32) / (HEAD // 2)
    angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * torch.pow(500_000.0, -half)[None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def loss(params: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean cross entropy of a decoder with grouped keys, rotary positions and a gated MLP."""
    x = F.embedding(batch["x"], params["embed"])
    rows, length, _ = x.shape

    def heads(h: Tensor, number: int) -> Tensor:
        return h.view(rows, length, number, HEAD).transpose(1, 2)

    for layer in params["blocks"]:
        h = F.rms_norm(x, (WIDTH,), layer["norm1"])
        q, k, v = heads(h @ layer["q"], HEADS), heads(h @ layer["k"], KEY_HEADS), heads(h @ layer["v"], KEY_HEADS)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(1, 2).reshape(rows, length, WIDTH) @ layer["o"]
        h = F.rms_norm(x, (WIDTH,), layer["norm2"])
        x = x + (F.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    logits = F.rms_norm(x, (WIDTH,), params["norm"]) @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten())


def step(layers: int, pp: int, dp: int, tp: int, microbatches: int, length: int) -> tuple[fzero.Spec, Any, Any]:
    """(the spec, the parameters, a rank's batch): 1F1B, ZeRO 1 over `dp`, layers over `tp`, bf16, clipped gradients."""
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.adamw(1e-4), mesh={"pp": pp, "dp": dp, "tp": tp}, microbatches=microbatches,
        shard=SHARD if tp > 1 else None,
        pipeline="1f1b", zero=1, precision="bf16", reduce="end", clip_norm=1.0,
    )  # fmt: skip
    tokens = torch.empty(microbatches, length, dtype=torch.int64, device="meta")
    return spec, parameters(layers), {"x": tokens, "y": tokens}


def lowered(layers: int, pp: int, dp: int, tp: int, microbatches: int, length: int) -> fzero.Lowered:
    """The verified programs of all roles."""
    return fzero.lower(*step(layers, pp, dp, tp, microbatches, length))


def problem() -> tuple[fzero.Spec, Any, Any]:
    """The step of 16,384 ranks in a form that fits them, with the batch of all: `fzero explain` reads it."""
    spec, params, batch = step(126, 16, 128, 8, 16, 8192)
    rows = {name: torch.empty(128 * len(x), *x.shape[1:], dtype=x.dtype, device="meta") for name, x in batch.items()}
    return spec.but(remat="full", sequence="tp"), params, rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 126), ("pp", 16), ("dp", 128), ("tp", 1), ("microbatches", 16), ("length", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", help="the record is benchmarks/results/<OUT>.json")
    args = parser.parse_args(argv)
    cpu, began = time.process_time(), time.perf_counter()
    made = lowered(args.layers, args.pp, args.dp, args.tp, args.microbatches, args.length)
    record = {
        **{name: value for name, value in vars(args).items() if name != "out"},
        "ranks": made.plan.world_size,
        "cpu_s": round(time.process_time() - cpu, 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "ops": [len(program.ops) for program in made.programs.values()],
        "planned_peak_gb": [round(memory.peak / 1e9, 1) for memory in made.memories.values()],
        "commit": machine.commit(),
    }
    print(json.dumps(record, indent=1))
    if args.out:
        (machine.ROOT / "benchmarks" / "results" / f"{args.out}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
