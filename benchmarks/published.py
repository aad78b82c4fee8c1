"""Published steps: rows of a table of other people's runs, and what a layer of each does, read off fzero's own program.

A row names a model, a world and a step's seconds. Its work is read off four programs of a rank: two and three layers,
`micro_batch` sequences and one more. The difference of depths is a layer. Bytes that do not grow with the sequences
(casts and sums of weight gradients) are left out: the programs of these rows fuse them into products.

How the row's software differs from fzero's is a `Stack`, by its family and device.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero.cost.fused_loops import fused_works
from fzero.cost.node_work import CallWork, works
from fzero.ir.op import Op, StepPhase

TABLE = Path(__file__).parent / "data" / "published_steps.csv"


@dataclass(frozen=True)
class Stack:
    """What a family's software does otherwise. fused: loops over elements are fused. attention: speed of its kernel, of
    that in the machine's file, which is today's; 0: scores are materialised. exposed: the part of tensor parallelism's
    transfers that nothing hides. eager: Python starts each kernel."""

    fused: bool
    attention: float
    exposed: float
    eager: bool = False


# attention: the paper of FlashAttention-2 finds its first version, which the rows of 2023 ran, at 25 to 40 % of an
# A100's peak, and itself at 50 to 73 %. exposed: assumed, for Transformer Engine, of the H100, overlaps gathers with
# products, and what ran on the A100 before it did not. All were set with rows in view.
FOUNDRY, MEGATRON, ENGINE = Stack(False, 0.55, 1.0, eager=True), Stack(True, 0.0, 1.0), Stack(True, 1.0, 0.3)
FLASH = Stack(True, 1.0, 1.0)


@dataclass(frozen=True)
class Shape:
    """What a layer's programs depend on. family: "llama", "gpt", "nemotron" or "mpt"."""

    family: str
    width: int
    heads: int
    key_heads: int
    inner: int
    words: int
    length: int
    rows: int
    tp: int
    sequence: bool
    recomputed: bool
    scores: bool


@dataclass(frozen=True)
class Published:
    """A row. layers, world, tp, pp, cp, dp, chunks (of a role), microbatches: counts. seconds: of a step, measured."""

    shape: Shape
    name: str
    device: str
    layers: int
    world: int
    pp: int
    cp: int
    dp: int
    chunks: int
    zero: int
    microbatches: int
    fp8: bool
    seconds: float

    @property
    def stack(self) -> Stack:
        """Its software."""
        if self.shape.family == "mpt":
            return FOUNDRY
        if self.shape.scores:
            return MEGATRON
        return FLASH if "A100" in self.device else ENGINE

    @property
    def params(self) -> tuple[int, int]:
        """Parameters of a layer, and of all else."""
        s = self.shape
        keys = s.width // s.heads * s.key_heads
        mlp = (3 if s.family == "llama" else 2) * s.width * s.inner
        return 2 * s.width * (s.width + keys) + mlp, s.width * s.words * (1 if _tied(s) else 2)


def published(path: Path = TABLE) -> Iterator[Published]:
    """The rows of a table with the columns of `TABLE`.

    Where a column is empty: an MLP four times as wide, heads of 128, 8 key heads of a Nemotron, 51,200 words, and up to
    four sequences in a microbatch.
    """
    with path.open() as file:
        for row in csv.DictReader(file):
            yield _published(row)


def _published(row: dict[str, str]) -> Published:
    def number(name: str, default: int = 1) -> int:
        return int(row[name] or default)

    model, width = row["model"], number("hidden")
    family = next((name for name in ("llama", "nemotron", "mpt") if model.startswith(name)), "gpt")
    heads, h100 = number("heads", width // 128), "A100" not in row["gpu"]
    own = number("global_batch") // number("dp")
    rows = number("micro_batch", max(n for n in (1, 2, 4) if own % n == 0))
    shape = Shape(
        family, width, heads, number("kv_heads", 8 if family == "nemotron" else heads), number("ffn", 4 * width),
        number("vocab", 51_200), number("seq"), rows, number("tp"), h100 or "sequence" in row["recompute"],
        row["recompute"] == "full", family == "gpt" and not h100,
    )  # fmt: skip
    return Published(
        shape, model, row["gpu"], number("layers"), number("world"), number("pp"), number("cp"), number("dp"),
        number("vp"), number("zero", 1 if h100 else 0), own // rows, row["precision"] == "fp8",
        float(row["measured_step_s"] or 0),
    )  # fmt: skip


def _tied(shape: Shape) -> bool:
    return shape.family in ("gpt", "mpt")


def parameters(shape: Shape, layers: int) -> Any:
    """On the meta device."""

    def empty(*size: int) -> Tensor:
        return torch.empty(size, device="meta")

    def layer() -> dict[str, Tensor]:
        width, keys, inner = shape.width, shape.width // shape.heads * shape.key_heads, shape.inner
        attention = {"q": empty(width, width), "k": empty(width, keys), "v": empty(width, keys)}
        mlp = {"up": empty(width, inner), "down": empty(inner, width)}
        made = {**attention, "o": empty(width, width), **mlp, "norm1": empty(width), "norm2": empty(width)}
        return {**made, "gate": empty(width, inner)} if shape.family == "llama" else made

    made = {"embed": empty(shape.words, shape.width), "norm": empty(shape.width)}
    head = {} if _tied(shape) else {"head": empty(shape.width, shape.words)}
    return {**made, **head, "blocks": [layer() for _ in range(layers)]}


def loss_of(shape: Shape) -> Any:
    """The mean cross entropy of a decoder of the row's family."""
    head = shape.width // shape.heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        size = (shape.width,)
        return F.rms_norm(x, size, weight) if shape.family == "llama" else F.layer_norm(x, size, weight)

    def rotated(x: Tensor) -> Tensor:
        if _tied(shape):
            return x
        half = torch.arange(head // 2, dtype=torch.float32, device=x.device) / (head // 2)
        angles = (
            torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)[:, None] * torch.pow(500_000.0, -half)[None]
        )
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., : head // 2], x[..., head // 2 :]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not shape.scores:
            grouped = shape.heads != shape.key_heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        seen = torch.ones(shape.length, shape.length, dtype=torch.bool, device=q.device).tril()
        return torch.softmax(((q @ k.transpose(-1, -2)) / head**0.5).masked_fill(~seen, -1e4), -1) @ v

    def mlp(p: Any, x: Tensor) -> Tensor:
        up = x @ p["up"]
        if shape.family == "llama":
            return (F.silu(x @ p["gate"]) * up) @ p["down"]
        return (torch.relu(up).square() if shape.family == "nemotron" else F.gelu(up, approximate="tanh")) @ p["down"]

    def loss(params: Any, batch: Any) -> Tensor:
        x = F.embedding(batch["x"], params["embed"])
        for p in params["blocks"]:
            h = norm(x, p["norm1"])
            q, k, v = ((h @ p[name]).view(*x.shape[:2], -1, head).transpose(1, 2) for name in "qkv")
            x = x + attend(rotated(q), rotated(k), v).transpose(1, 2).reshape(x.shape) @ p["o"]
            x = x + mlp(p, norm(x, p["norm2"]))
        last = norm(x, params["norm"])
        logits = F.linear(last, params["embed"]) if _tied(shape) else last @ params["head"]
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten())

    return loss


@dataclass(frozen=True)
class Part:
    """What one layer does, or all that is in no layer, of one microbatch. products: calls of which operations count.
    moved: bytes of the others, one by one and fused. sent: by kind of transfer and its bytes, over tensor parallelism's
    axis. updated: bytes of the optimizer. calls: of kernels, fused."""

    products: Counter[CallWork]
    moved: tuple[float, float]
    sent: Counter[tuple[str, int]]
    updated: float
    calls: int


@cache
def parts(shape: Shape) -> tuple[Part, Part]:
    """(a layer, the rest)."""
    more = replace(shape, rows=shape.rows + 1)
    two, three, two_more, three_more = (_counted(s, n) for s in (shape, more) for n in (2, 3))

    def grown(a: Part, b: Part) -> tuple[float, float]:
        return tuple(shape.rows * (y - x) for x, y in zip(a.moved, b.moved, strict=True))  # type: ignore[return-value]

    at_two, at_three = grown(two, two_more), grown(three, three_more)
    layer = Part(
        three.products - two.products, (at_three[0] - at_two[0], at_three[1] - at_two[1]), three.sent - two.sent,
        three.updated - two.updated, three.calls - two.calls,
    )  # fmt: skip
    twice: Counter[CallWork] = Counter({work: 2 * n for work, n in layer.products.items()})
    sent = Counter({key: 2 * n for key, n in layer.sent.items()})
    moved = at_two[0] - 2 * layer.moved[0], at_two[1] - 2 * layer.moved[1]
    updated, calls = max(two.updated - 2 * layer.updated, 0.0), max(two.calls - 2 * layer.calls, 0)
    return layer, Part(two.products - twice, moved, two.sent - sent, updated, calls)


def rules_of(shape: Shape) -> dict[str, fzero.P] | None:
    """The rules of tensor parallelism, Megatron's; None without it."""
    wide = {name: fzero.P(None, "tp") for name in ("blocks/*/[qkv]", "blocks/*/up", "blocks/*/gate", "head")}
    rules = {**wide, **{name: fzero.P("tp", None) for name in ("blocks/*/o", "blocks/*/down", "embed")}}
    lacking = {*(() if shape.family == "llama" else ("blocks/*/gate",)), *(("head",) if _tied(shape) else ())}
    return {name: dims for name, dims in rules.items() if name not in lacking} if shape.tp > 1 else None


def _counted(shape: Shape, layers: int) -> Part:
    """Of the program of one rank, with so many layers."""
    spec = fzero.Spec(
        loss=loss_of(shape), optimizer=fzero.optim.adamw(1e-4), mesh={"dp": 1, "tp": shape.tp}, zero=0,
        precision="bf16", clip_norm=1.0, remat="full" if shape.recomputed else "none",
        shard=rules_of(shape),
        sequence="tp" if shape.tp > 1 and shape.sequence else None,
    )  # fmt: skip
    tokens = torch.empty(shape.rows, shape.length, dtype=torch.int64, device="meta")
    program = fzero.lower(spec, parameters(shape, layers), {"x": tokens, "y": tokens}).program
    products: Counter[CallWork] = Counter()
    sent: Counter[tuple[str, int]] = Counter()
    moved, updated, called = [0.0, 0.0], 0.0, 0
    for op in program.ops:
        if (record := op.row.collective) is not None:
            ends = (program.buffers[ref.name].nbytes for ref in (op.reads[0], op.writes[0]))
            sent[op.kind, record.whole_bytes(*ends)] += 1
        elif op.computes:
            graph = program.segments[op.segment].graph
            calls = list(works(graph))
            if _updates(op):
                updated += sum(work.moved for work in calls)
                continue
            products.update(work for work in calls if work.flops)
            moved[0] += sum(work.moved for work in calls if not work.flops)
            fused = fused_works(program.segments[op.segment])
            moved[1] += sum(work.moved for work in fused if not work.flops)
            called += len(fused)
    return Part(products, (moved[0], moved[1]), sent, updated, called)


def _updates(op: Op) -> bool:
    return op.phase in (None, StepPhase.OUTER) or op.kind == "update"
