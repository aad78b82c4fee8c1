"""Plans a GPT for a world of some card, without any of them: mesh, stage, microbatches, remat and offload.

    python examples/plan.py --model gpt2-xl --ranks 2 --hardware rtx4090 --rows 16

prints the step's predicted seconds, the planned bytes of the fullest rank, why each field has its value, and the
candidates that were lowered. The last line is the answer as Python.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import P, groups, hardware, optim

MODELS = {  # layers, width, heads, words
    "gpt2": (12, 768, 12, 50_257),
    "gpt2-xl": (48, 1_600, 25, 50_257),
    "1.3b": (24, 2_048, 16, 50_257),
    "7b": (32, 4_096, 32, 50_257),
    "7.5b": (36, 4_096, 32, 50_257),
    "13b": (40, 5_120, 40, 50_257),
    "70b": (80, 8_192, 64, 32_000),
    "405b": (126, 16_384, 128, 128_256),
    "1t": (128, 25_600, 160, 51_200),
}
MEGATRON = {  # where a mesh with `tp` is given: else the planner finds them
    "blocks/*/qkv": P(groups("tp", 3)),
    "blocks/*/out": P(None, "tp"),
    "blocks/*/up": P("tp"),
    "blocks/*/down": P(None, "tp"),
    "words": P("tp"),
}


def empty(layers: int, width: int, words: int) -> Any:
    """The parameters, as shapes."""

    def of(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    block = {"norm1": (width,), "qkv": (3 * width, width), "out": (width, width), "norm2": (width,),
             "up": (4 * width, width), "down": (width, 4 * width)}  # fmt: skip
    blocks = [{name: of(*shape) for name, shape in block.items()} for _ in range(layers)]
    return {"words": of(words, width), "blocks": blocks, "norm": of(width)}


def loss_of(heads: int) -> Any:
    """Cross entropy of the next word."""

    def attend(p: Any, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = F.linear(x, p["qkv"]).view(rows, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).reshape(x.shape), p["out"])

    def loss(params: Any, batch: Any) -> Tensor:
        x = F.embedding(batch["x"], params["words"])
        for p in params["blocks"]:
            x = x + attend(p, F.layer_norm(x, x.shape[-1:], p["norm1"]))
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], p["norm2"]), p["up"])), p["down"])
        logits = F.linear(F.layer_norm(x, x.shape[-1:], params["norm"]), params["words"])
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    return loss


def axes(text: str) -> dict[str, int]:
    """`pp=10,dp=5` as a mesh."""
    return {name: int(size) for name, _, size in (axis.partition("=") for axis in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hardware", default="h100", help=f"a TOML file, or one of {', '.join(hardware.presets())}")
    parser.add_argument("--rows", type=int, default=64, help="of the global batch (default 64)")
    parser.add_argument("--length", type=int, default=1_024, help="tokens of a row (default 1,024)")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--mesh", type=axes, help="as pp=10,dp=5,tp=16, the slowest axis first (default: left open)")
    parser.add_argument("--zero", type=int, choices=range(4), help="the stage (default: left open)")
    parser.add_argument("--microbatches", type=int, help="of a rank's rows (default: left open)")
    parser.add_argument("--reduce", choices=("each", "end"), help="of microbatches' gradients (default: by a rule)")
    parser.add_argument(
        "--memory-gb", type=float, help="what a rank may use (default: the hardware's less its headroom)"
    )
    given = parser.parse_args()
    layers, width, heads, words = MODELS[given.model]
    if given.rows < 1 or given.length < 1:
        parser.error("--rows and --length: needed positive numbers")
    tokens = torch.empty(given.rows, given.length, dtype=torch.int64, device="meta")
    fields = ("mesh", "zero", "microbatches", "reduce")
    pinned: dict[str, Any] = {name: x for name in fields if (x := getattr(given, name)) is not None}
    pinned |= {"shard": MEGATRON} if "tp" in pinned.get("mesh", {}) else {}
    began = time.perf_counter()
    try:
        spec = fzero.Spec(
            loss=loss_of(heads),
            optimizer=optim.adamw(1e-4),
            precision=given.precision,
            clip_norm=1.0,
            **pinned,
        )
        planned = fzero.plan(
            spec,
            empty(layers, width, words),
            {"x": tokens, "y": tokens},
            world_size=given.ranks,
            hardware=given.hardware,
            memory=None if given.memory_gb is None else int(given.memory_gb * 1e9),
        )
    except fzero.SpecError as error:
        raise SystemExit(str(error)) from None
    print(planned)
    elements = sum(leaf.numel() for leaf in optree.tree_leaves(empty(layers, width, words)))
    flops = planned.machine.device.flops
    peak = given.ranks * flops.get(given.precision, flops["fp32"])
    mfu = 6 * elements * tokens.numel() / planned.seconds / peak
    print(f"\n{elements / 1e9:.1f} billion parameters: MFU {mfu:.0%} (6 operations a parameter and token)")
    print(f"planned in {time.perf_counter() - began:.0f} s, {time.process_time():.0f} of them on the processor")


if __name__ == "__main__":
    main()
