"""Small specs for tests of the compiler: nothing here is run on real data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kept
import torch
import torch.nn.functional as F

import fzero
from fzero.capture import trace_step
from fzero.capture.graph import Graph
from fzero.compile.judged import naive as built
from fzero.compile.lowered import Lowered
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.compile.step import fakes_on
from fzero.ir.program import Program
from fzero.ir.records import Bucket
from fzero.plan.stages import batch_layout, row_of
from fzero.plan.state_plan import Plan
from fzero.training import training_of

Params = dict[str, Any]
SGD = fzero.optim.sgd(0.1, momentum=0.9)


def layers(width: int = 64, depth: int = 2) -> Params:
    """A list of equal layers between two unnumbered leaves."""
    block = {"w": torch.empty(width, width, device="meta"), "b": torch.empty(width, device="meta")}
    return {
        "first": torch.empty(8, width, device="meta"),
        "layers": [block] * depth,
        "z": torch.empty(width, device="meta"),
    }


def layers_loss(params: Params, batch: torch.Tensor) -> torch.Tensor:
    h = batch @ params["first"]
    for block in params["layers"]:
        h = torch.tanh(h @ block["w"] + block["b"])
    return (h * params["z"]).mean()


def batch(rows: int = 4) -> torch.Tensor:
    return torch.empty(rows, 8, device="meta")


def spec(**options: Any) -> fzero.Spec:
    given = {"loss": layers_loss, "optimizer": SGD, **options}
    return fzero.Spec(**given)


def lowered(world: int = 2, params: Params | None = None, **options: Any) -> Lowered:
    return kept.lower(spec(**options), params or layers(), batch(options.get("microbatches", 1) * 4), world)


def naive(world: int = 2, params: Params | None = None, **options: Any) -> Program:
    """The program before any pass."""
    one = spec(**options)
    graph, plan = captured(one, params or layers(), batch(one.microbatches * 4), world)
    return built(graph, plan, reduce=one.reduce or "end")


def captured(one: fzero.Spec, params: Any, given: Any, world: int = 1) -> tuple[Graph, Plan]:
    """A step's graph and plan alone: `fzero.lower` takes more than twice as long."""
    recipe = recipe_for(one, params, None, torch.device("cpu"))
    plan = plan_for(one, recipe.paths, recipe.values, recipe.per_rank, mesh_of(one, world))
    graph = trace_step.capture(
        training_of(one).step,
        fzero.tree.unflatten(recipe.treedef, recipe.values),
        fakes_on(given, torch.device("cpu")),
        axis=plan.axis,
        microbatches=one.microbatches,
        fns=(one.loss,),
    )
    return graph, plan


def bf16_loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    """`layers_loss` with its own casts: every use of a parameter begins with one."""
    low = fzero.tree.map(lambda p: p.to(torch.bfloat16), params)
    return layers_loss(low, x.to(torch.bfloat16)).float()


def tied(vocab: int = 64, width: int = 16, depth: int = 2) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(init(key), loss) of `depth` equal layers and a tied embedding. `gpt` takes thrice as long to lower."""

    def init(key: torch.Tensor) -> Params:
        first, *keys = fzero.random.split(key, depth + 1)
        blocks = [{"w": fzero.random.normal(k, (width, width)) * 0.3, "b": torch.zeros(width)} for k in keys]
        return {"embed": fzero.random.normal(first, (vocab, width)) * 0.02, "blocks": blocks}

    def loss(params: Params, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        h = F.embedding(tokens["x"], params["embed"])
        for p in params["blocks"]:
            h = h + torch.tanh(h @ p["w"] + p["b"])
        return F.cross_entropy((h @ params["embed"].T).flatten(0, 1), tokens["y"].flatten())

    return init, loss


def translating(vocab: int = 64, width: int = 16, depth: int = 4) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(init(key), loss) of an encoder and a decoder of half the `depth` each: three readers share one embedding, and
    every layer of the decoder reads the encoder's result."""

    def init(key: torch.Tensor) -> Params:
        first, *keys = fzero.random.split(key, depth + 1)
        layers = [{name: fzero.random.normal(fzero.random.fold_in(k, i), (width, width)) * 0.3
                   for i, name in enumerate("wq")} for k in keys]  # fmt: skip
        of_encoder, of_decoder = layers[: depth // 2], layers[depth // 2 :]
        return {
            "shared": fzero.random.normal(first, (vocab, width)) * 0.02,
            "encoder": {"layers": [{"w": p["w"]} for p in of_encoder]},
            "decoder": {"layers": of_decoder},
        }

    def loss(params: Params, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        memory = F.embedding(tokens["x"], params["shared"])
        for p in params["encoder"]["layers"]:
            memory = memory + torch.tanh(memory @ p["w"])
        h = F.embedding(tokens["y"].roll(1, 1), params["shared"])
        for p in params["decoder"]["layers"]:
            h = h + torch.softmax(h @ p["q"] @ memory.transpose(1, 2), -1) @ memory
            h = h + torch.tanh(h @ p["w"])
        return F.cross_entropy((h @ params["shared"].T).flatten(0, 1), tokens["y"].flatten())

    return init, loss


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention to all tokens up to the own one."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gpt(
    vocab: int = 512, width: int = 128, depth: int = 12, heads: int = 4, attend: Callable[..., Any] = causal
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(init(key), loss) of a GPT with a tied embedding and `depth` equal blocks; `attend(q, k, v)` is its attention."""

    def init(key: torch.Tensor) -> Params:
        def normal(number: int, *shape: int) -> torch.Tensor:
            return fzero.random.normal(fzero.random.fold_in(key, number), shape) * 0.02

        def block(i: int) -> Params:
            return {
                "norm1": {"g": torch.ones(width), "b": torch.zeros(width)},
                "qkv": normal(4 * i + 2, width, 3 * width),
                "out": normal(4 * i + 3, width, width),
                "norm2": {"g": torch.ones(width), "b": torch.zeros(width)},
                "up": normal(4 * i + 4, width, 4 * width),
                "down": normal(4 * i + 5, 4 * width, width),
            }

        blocks = [block(i) for i in range(depth)]
        norm = {"g": torch.ones(width), "b": torch.zeros(width)}
        return {"wte": normal(0, vocab, width), "wpe": normal(1, 1024, width), "blocks": blocks, "norm": norm}

    def norm(p: Params, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (width,), p["g"], p["b"])

    def loss(params: Params, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        x = tokens["x"]
        b, t = x.shape
        h = F.embedding(x, params["wte"]) + params["wpe"][:t]
        for p in params["blocks"]:
            q, k, v = (norm(p["norm1"], h) @ p["qkv"]).view(b, t, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            h = h + attend(q, k, v).transpose(1, 2).reshape(b, t, width) @ p["out"]
            h = h + F.gelu(norm(p["norm2"], h) @ p["up"]) @ p["down"]
        logits = norm(params["norm"], h) @ params["wte"].T
        return F.cross_entropy(logits.flatten(0, 1), tokens["y"].flatten())

    return init, loss


PLAIN: dict[str, Callable[[Params, torch.Tensor], torch.Tensor]] = {
    "tanh": lambda p, x: torch.tanh(x @ p["w"]),
    "relu with bias": lambda p, x: torch.relu(x @ p["w"] + p["b"]),
    "residual": lambda p, x: x + torch.tanh(x @ p["w"]),
    "conv": lambda p, x: torch.relu(F.conv2d(x, p["w"], p["b"], padding=1)),
    "pooled conv": lambda p, x: F.max_pool2d(torch.relu(F.conv2d(x, p["w"], p["b"], padding=1)), 2),
}


def plain(name: str, depth: int) -> tuple[Params, Callable[[Params, torch.Tensor], torch.Tensor], Any]:
    """(params, loss, batch by rank and step) of layers alone, whose backward reads no leaf in its first layer."""
    shape = (4, 4, 3, 3) if "conv" in name else (16, 16)
    keys = fzero.random.split(fzero.random.key(0), depth)
    layers = [{"w": fzero.random.normal(key, shape) * 0.3} for key in keys]
    if "bias" in name or "conv" in name:
        layers = [layer | {"b": torch.full(shape[:1], 0.1)} for layer in layers]

    def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
        for layer in params["layers"]:
            x = PLAIN[name](layer, x)
        return x.square().mean()

    def batch(rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank + 10 * step)
        return torch.randn(4, *((4, 16, 16) if "conv" in name else (16,)), generator=generator)

    return {"layers": layers}, loss, batch


def tokens(rows: int, length: int, vocab: int, seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = torch.randint(0, vocab, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return {"x": drawn[:, :-1].contiguous(), "y": drawn[:, 1:].contiguous()}


def stage_of(bucket: Bucket) -> int:
    """The ZeRO stage whose row of the plan's table a bucket has."""
    facts = bucket.updates_slices, not bucket.keeps_gathered, bucket.reduce_when
    rows = {stage: row_of(stage, batch_layout(mesh_of(spec(), 2))) for stage in range(4)}
    return next(n for n, row in rows.items() if (bool(row.rest), bool(row.params), row.reduce_when) == facts)


def turned(layers: int, contiguous: bool = False) -> tuple[Any, Any]:
    """Layers that hand on a value whose dims lie in another order in memory than in its shape, unless it is
    `contiguous`: (init, loss)."""

    def init(key: torch.Tensor) -> Any:
        return {"blocks": [[fzero.random.normal(fzero.random.fold_in(key, 2 * i + j), (8, 8)) / 3 for j in range(2)]
                           for i in range(layers)]}  # fmt: skip

    def loss(p: Any, b: torch.Tensor) -> torch.Tensor:
        x = b
        for pair in p["blocks"]:
            rows = x.transpose(1, 2).reshape(-1, 8)
            one, two = (torch.tanh(rows @ w) for w in pair)
            one, two = (x.view(-1, 8, 4) if contiguous else x.view(-1, 4, 8).transpose(1, 2) for x in (one, two))
            x = torch.maximum(one, two)
        return x.square().mean()

    return init, loss


def turned_rows(rank: int, step: int) -> torch.Tensor:
    """A batch of `turned`."""
    return torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(rank + 10 * step))


GOLDEN_CASES: dict[str, dict[str, Any]] = {
    "zero3": {"zero": 3},
    "zero1_clip": {"zero": 1, "clip_norm": 1.0, "optimizer": fzero.optim.adamw(1e-3)},
    "zero1_accumulate": {"zero": 1, "microbatches": 2, "reduce": "end"},
    "zero2_accumulate": {"zero": 2, "microbatches": 2, "reduce": "each"},
    "zero3_remat": {"zero": 3, "remat": {"layers/**": "full"}},
}
