"""Block-sparse attention beside torch's own, forward and backward, one thread: CPU seconds and memory.

    python -m benchmarks.sparse [--tokens 512,4096] [--patterns window,causal] [--rounds 3] [--mistral] [--out FILE]

`dense` is torch's flash attention over all pairs (causal where the pattern is), `masked` the same with the pattern as a
mask, which materialises tokens x tokens. A pattern looks at a tenth of the square's blocks at most. Contenders take
turns; a figure is the least of the rounds, in CPU seconds of the process. Ratios are of one run. Memory is what the
allocator gave beyond the operands.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fzero
from benchmarks.machine import describe
from fzero import sparse
from fzero.cost.allocator import measured_peak

HEADS, DIM, SHARE, MASKED = 4, 64, 0.1, 4096  # the most tokens of which a mask is tried
# (pattern, tokens): the least that dense CPU seconds over the op's are to be
WANTED = {("window", 4096): 6.0, ("causal", 4096): 3.5, ("causal", 16384): 3.5, ("causal", 512): 0.8}
WANTED |= {("window", 512): 0.8, ("bigbird", 512): 0.8}


def layout(pattern: str, tokens: int) -> sparse.BlockLayout:
    """The widest layout of a pattern that looks at `SHARE` of the square's blocks at most.

    These blocks are smaller for fewer tokens. A window is exact in tokens, so its op takes blocks of its own choice.
    """
    block = 16 if tokens <= 512 else 32 if tokens < 4096 else 64
    wide = int(SHARE * tokens / block)
    if pattern == "causal":
        return sparse.sliding_window(tokens, window=(wide - 1) * block + 1, causal=True)
    if pattern == "window":
        return sparse.sliding_window(tokens, window=(wide - 1) // 2 * 2 * block)
    drawn = max(1, wide - 6)
    return sparse.bigbird(HEADS, tokens, block=block, num_random_blocks=drawn, key=fzero.random.key(0))


def contenders(pattern: str, own: sparse.BlockLayout) -> dict[str, Callable[..., Tensor]]:
    """Functions of q, k and v."""
    found: dict[str, Callable[..., Tensor]] = {
        "dense": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=pattern == "causal"),
        "sparse": lambda q, k, v: sparse.attention(q, k, v, own),
    }
    if own.seq_len <= MASKED:
        mask = own.tokens()
        found["masked"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return found


def _both(call: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor) -> Any:
    """Forward and backward."""
    return torch.autograd.grad(call(*operands), operands, grad)


def measured(pattern: str, tokens: int, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    """CPU seconds and bytes of each contender, and the ratio."""
    own, generator = layout(pattern, tokens), torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, HEADS, tokens, DIM, generator=generator).to(dtype) for _ in range(4))
    operands = [x.requires_grad_() for x in (q, k, v)]
    calls = contenders(pattern, own)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    peaks = {}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            if number:
                _both(call, operands, grad)
                seconds[name].append(time.process_time() - start)
            else:  # warm, and the memory
                _, peaks[name] = measured_peak(partial(_both, call, operands, grad))
    best = {name: min(each) for name, each in seconds.items()}
    pairs = float(own.tokens().float().mean()) if tokens <= 4096 else float(own.blocks().float().mean())
    return {
        "pattern": pattern, "tokens": tokens, "block": own.block, "dtype": str(dtype).removeprefix("torch."),
        "share_of_pairs": round(pairs, 4), "cpu_seconds": seconds, "extra_bytes": peaks,
        "dense_over_sparse": round(best["dense"] / best["sparse"], 2),
        **({"masked_over_sparse": round(best["masked"] / best["sparse"], 2)} if "masked" in best else {}),
        "wanted": WANTED.get((pattern, tokens)),
    }  # fmt: skip


def mistral(window: int, tokens: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of a loss and its gradients, of a small Mistral with a window, by transformers' sdpa and by ours."""
    from transformers import AutoModelForCausalLM, MistralConfig

    from fzero.interop import register_attention

    config = MistralConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, sliding_window=window, max_position_embeddings=tokens,
    )  # fmt: skip
    ids = torch.randint(0, 1024, (1, tokens), generator=torch.Generator().manual_seed(0))
    models = {}
    for name in ("sdpa", register_attention()):
        torch.manual_seed(0)
        models[name] = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=name)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, model in models.items():
            start = time.process_time()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            torch.autograd.grad(loss, list(model.parameters()))
            if number:
                seconds[name].append(time.process_time() - start)
    best = {name: min(each) for name, each in seconds.items()}
    ratio = round(best["sdpa"] / best["fzero_sparse"], 2)
    step = {"window": window, "tokens": tokens, "cpu_seconds": seconds, "sdpa_over_sparse": ratio, "wanted": 1.5}
    return {**step, "attention": mistral_attention(models, window, tokens, rounds)}


def mistral_attention(models: dict[str, Any], window: int, tokens: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of one attention, forward and backward, as transformers calls it. The mask is made before."""
    from transformers import AttentionInterface

    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, 64, generator=draw).requires_grad_() for heads in (8, 4, 4))
    grad = torch.randn(1, tokens, 8, 64, generator=draw)
    seen = sparse.sliding_window(tokens, window=window, causal=True).tokens()[None]
    functions = AttentionInterface()
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, model in models.items():
            layer = model.model.layers[0].self_attn
            mask = seen if name == "sdpa" else None
            start = time.process_time()
            out, _ = functions[name](layer, q, k, v, mask, scaling=64**-0.5, sliding_window=window)
            torch.autograd.grad(out, (q, k, v), grad)
            if number:
                seconds[name].append(time.process_time() - start)
    ratio = round(min(seconds["sdpa"]) / min(seconds["fzero_sparse"]), 2)
    return {"cpu_seconds": seconds, "sdpa_over_sparse": ratio, "wanted": 5.0}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--patterns", default="causal,window,bigbird")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mistral", action="store_true", help="a step of a small Mistral too")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        "pattern", "tokens", "pairs", "dense ms", "sparse ms", "dense / sparse", "masked / sparse", "MB", "MB of dense"
    )
    cases = []
    for pattern in given.patterns.split(","):
        for tokens in map(int, given.tokens.split(",")):
            one = measured(pattern, tokens, given.rounds, getattr(torch, given.dtype))
            cases.append(one)
            print(f"{pattern} {tokens}: dense {one['dense_over_sparse']} times the CPU seconds", flush=True)
            best = {name: 1e3 * min(each) for name, each in one["cpu_seconds"].items()}
            wanted = "" if one["wanted"] is None else f" (wanted {one['wanted']})"
            masked, extra = str(one.get("masked_over_sparse", "")), one["extra_bytes"]
            table.add_row(
                pattern, f"{tokens:,}", f"{one['share_of_pairs']:.1%}", f"{best['dense']:.1f}",
                f"{best['sparse']:.1f}", f"{one['dense_over_sparse']:.2f}{wanted}", masked,
                f"{extra['sparse'] / 1e6:.1f}", f"{extra['dense'] / 1e6:.1f}",
            )  # fmt: skip
    Console().print(table)
    record: dict[str, Any] = {"machine": describe(), "cases": cases}
    if given.mistral:
        record["mistral"] = mistral(512, 4096, given.rounds)
        step, alone = record["mistral"], record["mistral"]["attention"]
        print(f"mistral: sdpa {step['sdpa_over_sparse']} times the CPU seconds of a step (wanted 1.5)")
        print(f"mistral: sdpa {alone['sdpa_over_sparse']} times the CPU seconds of attention (wanted 5.0)")
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
