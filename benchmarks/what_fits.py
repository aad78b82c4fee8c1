"""The longest sequence that a budget of bytes holds, by the attention of the model: planned, and confirmed by a run.

    python -m benchmarks.what_fits [--shapes small,bert] [--budgets 1] [--held] [--out FILE]

One GPT by functions, fp32, AdamW, one sequence, on one device. Its attention is one of

- `scores`: softmax(q k^T + mask) v in PyTorch's ops, which keeps tokens x tokens for each head;
- `masked`: `scaled_dot_product_attention` with the window as a mask of tokens x tokens;
- `flash`: `scaled_dot_product_attention(is_causal=True)`, which keeps no scores;
- `window`: `fzero.sparse.attention` with a causal window of 512 tokens.

All else is equal on all sides: `remat` ("none" keeps what the backward needs, "full" computes each layer again) and
chunks of the loss. `fzero.longest` lowers the step at some lengths; nothing is allocated. `--held` then runs the
longest step of `scores` and `window` in the smallest budget, and compares the allocator's bytes with the plan.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from fzero import optim, progress, sparse
from fzero.cost.allocator import measured_peak

WINDOW, STEP = 512, 64  # tokens that a token sees; lengths are multiples of this
LINEAR_STEP = 1024  # of attention that is linear in memory
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """A model. chunks: of the loss."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    chunks: int = 16


SHAPES = {"small": Shape(2, 128, 4, 256), "bert": Shape(12, 768, 12, 30522)}  # bert: BERT-base's sizes
REMAT: dict[str, Any] = {"none": "none", "full": {"blocks/**": "full"}}


def seen(tokens: int) -> Tensor:
    """bool (tokens, tokens): which keys a query sees."""
    number = torch.arange(tokens)
    back = number[:, None] - number
    return (back >= 0) & (back < WINDOW)


def by_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen(q.shape[2]), -torch.inf).softmax(-1) @ v


def attention(name: str, tokens: int) -> Attend:
    """The attention of a contender for a length."""
    if name == "window":
        layout = sparse.sliding_window(tokens, window=WINDOW, causal=True)
        return lambda q, k, v: sparse.attention(q, k, v, layout)
    return {
        "scores": by_scores,
        "masked": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen(tokens)),
        "flash": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }[name]


CONTENDERS = {"scores": STEP, "masked": STEP, "flash": LINEAR_STEP, "window": LINEAR_STEP}


def params_like(shape: Shape) -> Any:
    """The parameters on the meta device."""

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, device="meta")

    d = shape.width
    block = {"norm1": (d,), "qkv": (3 * d, d), "out": (d, d), "norm2": (d,), "up": (4 * d, d), "down": (d, 4 * d)}
    blocks = [{name: empty(*sizes) for name, sizes in block.items()} for _ in range(shape.layers)]
    return {"tokens": empty(shape.vocabulary, d), "blocks": blocks, "norm": empty(d)}


def batch_like(tokens: int, device: str = "meta") -> dict[str, Tensor]:
    return {name: torch.zeros(1, tokens, dtype=torch.int64, device=device) for name in "xy"}


def spec(shape: Shape, name: str, remat: str, tokens: int) -> fzero.Spec:
    """The step of a contender for a length."""
    attend, d = attention(name, tokens), shape.width

    def loss(p: Any, batch: dict[str, Tensor]) -> Tensor:
        h = F.embedding(batch["x"], p["tokens"])
        for block in p["blocks"]:
            qkv = F.linear(F.layer_norm(h, (d,), block["norm1"]), block["qkv"])
            q, k, v = qkv.unflatten(-1, (3, shape.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            h = h + F.linear(attend(q, k, v).transpose(1, 2).flatten(2), block["out"])
            up = F.linear(F.layer_norm(h, (d,), block["norm2"]), block["up"])
            h = h + F.linear(F.gelu(up), block["down"])
        logits = F.linear(F.layer_norm(h, (d,), p["norm"]), p["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    return fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), remat=REMAT[remat], loss_chunks=shape.chunks)


@progress.quietly()
def longest(shape: Shape, name: str, remat: str, budget: int) -> fzero.planner.Longest:
    """The longest sequence of a contender."""
    like = params_like(shape)
    step = CONTENDERS[name]
    return fzero.longest(
        lambda tokens: spec(shape, name, remat, tokens), like, batch_like(4096), device_bytes=budget, step=step,
        world_size=1,
    )  # fmt: skip


@progress.quietly()
def held(shape: Shape, name: str, remat: str, tokens: int) -> dict[str, int]:
    """Bytes of a step that runs: planned, and of state, batch, arena and what the allocator gave beside them."""
    draw = torch.Generator().manual_seed(0)
    params = fzero.tree.map(lambda x: torch.randn(x.shape, generator=draw) * 0.02, params_like(shape))
    batch = batch_like(tokens, "cpu")
    state = fzero.init(params, spec(shape, name, remat, tokens))
    state = fzero.step(state, batch)
    state, extra = measured_peak(partial(fzero.step, state, batch))
    runtime: Any = state.runtime
    own = sum(x.nbytes for x in runtime.memory.values()) + runtime.arena.numel()
    own += sum(x.nbytes for x in batch.values())
    return {"tokens": tokens, "planned": runtime.compiled(batch).memory.peak, "held": own + extra}


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="small", help="of " + ", ".join(SHAPES))
    parser.add_argument("--budgets", default="0.25,1,4", help="in GB")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--held", action="store_true", help="run the longest step of two contenders")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    names, budgets = given.contenders.split(","), [int(float(x) * 1e9) for x in given.budgets.split(",")]
    table = Table("model", "GB", "remat", *names, "window / scores")
    cases: list[dict[str, Any]] = []
    for shape in given.shapes.split(","):
        for budget in budgets:
            for remat in REMAT:
                found = {name: longest(SHAPES[shape], name, remat, budget) for name in names}
                lengths = {name: one.length for name, one in found.items()}
                ratio = round(lengths["window"] / lengths["scores"], 1) if {"window", "scores"} <= set(names) else None
                cases.append({"shape": shape, "budget": budget, "remat": remat, "window_over_scores": ratio})
                cases[-1] |= {"found": {name: asdict(one) for name, one in found.items()}}
                table.add_row(shape, f"{budget / 1e9:g}", remat, *[f"{x:,}" for x in lengths.values()], str(ratio))
                print(cases[-1], flush=True)
    Console().print(table)
    record: dict[str, Any] = {"machine": describe(), "shapes": {k: asdict(v) for k, v in SHAPES.items()}}
    record["cases"] = cases
    if given.held:
        record["held"] = []
        for name in ("scores", "window"):
            one = held(SHAPES[cases[0]["shape"]], name, cases[0]["remat"], cases[0]["found"][name]["length"])
            record["held"].append({"contender": name, "remat": cases[0]["remat"], **one})
            print(record["held"][-1], flush=True)
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
