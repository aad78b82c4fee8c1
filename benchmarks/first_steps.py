"""How long the first step of a small GPT takes: fresh processes, one thread each.

    python -m benchmarks.first_steps

A row is the median of the rounds: seconds of `import fzero`, of `fzero.init`, of the first `fzero.step`, of a first
step at a second length (which needs a program of its own), and of a step after that. Two sequences of each length.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

SIZES = {  # layers, width, heads, vocabulary, tokens
    "0.1M": (2, 64, 2, 256, 128),
    "1M": (4, 128, 4, 1024, 128),
    "10M": (6, 384, 6, 256, 256),
    "100M": (12, 768, 12, 16384, 64),
}


def first_steps(size: str) -> dict[str, float]:
    """The seconds of this process, by what it does in its order."""
    began = time.perf_counter()
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    import fzero

    layers, width, heads, words, tokens = SIZES[size]
    seconds = {"import": time.perf_counter() - began}

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.norm2, self.up, self.down = (
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (a.unflatten(2, (heads, -1)).transpose(1, 2) for a in self.qkv(self.norm1(x)).split(width, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.proj(y)
            out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
            return out

    torch.manual_seed(0)
    torch.set_num_threads(1)
    body = nn.Sequential(nn.Embedding(words, width), *(Block() for _ in range(layers)), nn.LayerNorm(width))
    params, buffers, apply = fzero.interop.from_module(nn.Sequential(body, nn.Linear(width, words, bias=False)))

    def loss(params: dict[str, Tensor], ids: Tensor) -> Tensor:
        return F.cross_entropy(apply(params, buffers, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(3e-4), clip_norm=1.0)
    ids = torch.randint(0, words, (2, tokens + 1))
    began = time.perf_counter()
    state = fzero.init(params, spec)
    seconds["init"] = time.perf_counter() - began
    for name, batch in (("first step", ids), ("second length", ids[:, :-8].contiguous()), ("step", ids)):
        began = time.perf_counter()
        state = fzero.step(state, batch)
        float(state.metrics["loss"])
        seconds[name] = time.perf_counter() - began
    return seconds


def measured(size: str) -> dict[str, float]:
    """`first_steps` of a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FZERO_PROGRESS": "0"}
    command = [sys.executable, "-m", "benchmarks.first_steps", "--one", size]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=SIZES, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(first_steps(given.one)))
        return
    sizes: list[str] = given.sizes.split(",")
    runs: dict[str, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(given.rounds):
        for size in sizes:
            runs[size].append(measured(size))
    for size, found in runs.items():
        row = "  ".join(f"{name} {median(one[name] for one in found):.2f}" for name in found[0])
        print(f"{size:>5}: {row}", flush=True)


if __name__ == "__main__":
    main()
