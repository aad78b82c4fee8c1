"""ZeRO's own table, from lowered programs: model state per rank of a 7.5B-parameter GPT with AdamW on 64 ranks.

Nothing is allocated and nothing runs: the step is captured on fake tensors and lowered for each stage. ZeRO's
accounting (2 bytes of bf16 parameters, 2 of gradients, 12 of fp32 master and moments) gives 120 / 31.4 / 16.6 / 1.9 GB;
beside it what fzero's program holds at its fullest, copies and buffers in flight included, and between steps.

    python examples/zero_table.py              # under a minute on two cores
    python examples/zero_table.py --tensors    # every tensor that is counted, by name
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch
from torch.nn import functional as F

import fzero
from fzero.cost.model_states import model_states

HEADS = 32


def params(width: int, layers: int, vocab: int, context: int) -> dict:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def block() -> dict:
        return {
            "norm1": {"scale": empty(width), "bias": empty(width)},
            "attn": {"qkv": empty(width, 3 * width), "out": empty(width, width)},
            "norm2": {"scale": empty(width), "bias": empty(width)},
            "mlp": {"up": empty(width, 4 * width), "down": empty(4 * width, width)},
        }

    blocks = [block() for _ in range(layers)]
    norm = {"scale": empty(width), "bias": empty(width)}
    return {"wte": empty(vocab, width), "wpe": empty(context, width), "blocks": blocks, "norm": norm}


def loss_fn(params: dict, batch: dict) -> torch.Tensor:
    x = batch["x"]
    rows, length = x.shape
    width = params["wte"].shape[1]
    h = params["wte"][x] + params["wpe"][:length]
    for b in params["blocks"]:
        a = F.layer_norm(h, (width,), b["norm1"]["scale"], b["norm1"]["bias"])
        q, k, v = (a @ b["attn"]["qkv"]).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        h = h + a @ b["attn"]["out"]
        a = F.layer_norm(h, (width,), b["norm2"]["scale"], b["norm2"]["bias"])
        h = h + F.gelu(a @ b["mlp"]["up"]) @ b["mlp"]["down"]
    h = F.layer_norm(h, (width,), params["norm"]["scale"], params["norm"]["bias"])
    return F.cross_entropy((h @ params["wte"].T).float().flatten(0, 1), batch["y"].flatten())


def lowered(stage: int, world: int, width: int, layers: int, vocab: int, context: int) -> fzero.Lowered:
    spec = fzero.Spec(
        loss=loss_fn,
        optimizer=fzero.optim.adamw(3e-4),
        zero=stage,
        precision=fzero.Precision(compute="bf16", reduce="bf16"),
        remat="full",
    )
    batch = {name: torch.empty(1, context, dtype=torch.int64, device="meta") for name in ("x", "y")}
    return fzero.lower(spec, params(width, layers, vocab, context), batch, world_size=world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=60_160)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tensors", action="store_true", help="name every tensor that is counted")
    args = parser.parse_args()
    began = time.perf_counter()
    size = (args.width, args.layers, args.vocab, args.context)
    print("stage  parameters  ZeRO counts    fzero at most  between steps   (GB per rank)")
    for stage in (0, 1, 2, 3):
        one = lowered(stage, args.world, *size)
        count = sum(torch.Size(leaf.shape).numel() for leaf in one.plan.leaves if leaf.path.startswith("params/"))
        held = model_states(one.program)
        gb = [f"{n / 1e9:.4g}" for n in (held.zero_bytes, held.own_bytes, held.between_steps_bytes)]
        print(f"{stage:5}  {count / 1e9:9.2f}B  {gb[0]:>11}  {gb[1]:>15}  {gb[2]:>13}", flush=True)
        kinds: Counter[str] = Counter()
        for tensor in held.own:
            kinds[tensor.kind] += tensor.nbytes
            if args.tensors:
                print(f"         {tensor.nbytes:>15,}  {tensor.kind:26} {tensor.name}")
        print("         " + ", ".join(f"{kind} {n / 1e9:.4g}" for kind, n in kinds.items()))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
