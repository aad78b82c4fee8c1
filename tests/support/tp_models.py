"""Models for tests of tensor parallelism: a GPT by hand, and the architectures of `hf_models`, with their rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import P, groups, tree
from fzero.ir.mesh import Mesh
from fzero.shard.placements import Placement, Replicated

WIDTH, HEADS, SEQUENCE, VOCAB, LAYERS = 32, 8, 16, 64, 2
APART = {
    "wte": P("tp", None), "blocks/*/[qkv]/w": P("tp", None), "blocks/*/[qkv]/b": P("tp"),
    "blocks/*/o/w": P(None, "tp"), "blocks/*/up/w": P("tp", None), "blocks/*/up/b": P("tp"),
    "blocks/*/down/w": P(None, "tp"),
}  # fmt: skip
FUSED = {
    **{rule: dims for rule, dims in APART.items() if "qkv" not in rule},
    "blocks/*/qkv/w": P(groups("tp", 3), None), "blocks/*/qkv/b": P(groups("tp", 3)),
}  # fmt: skip


class Model(NamedTuple):
    """`zero_gradient`: path rules of leaves whose true gradient is zero: they are only to stay small."""

    params: Any
    loss: Callable[[Any, Any], Any]
    batch: Callable[[int, int], Any]
    rules: Mapping[str, P]
    zero_gradient: tuple[str, ...] = ()


def gpt(fused: bool = False, layers: int = LAYERS, width: int = WIDTH, rows: int = 4) -> Model:
    """A GPT with a tied embedding. Key biases have a gradient of zero: scores that shift alike change no softmax."""
    g = torch.Generator().manual_seed(0)

    def linear(out: int, inner: int) -> dict[str, Tensor]:
        return {"w": torch.randn(out, inner, generator=g) * 0.2, "b": torch.randn(out, generator=g) * 0.1}

    def norm() -> dict[str, Tensor]:
        return {"w": 1 + 0.1 * torch.randn(width, generator=g), "b": 0.1 * torch.randn(width, generator=g)}

    def block() -> dict[str, Any]:
        heads = {"qkv": linear(3 * width, width)} if fused else {name: linear(width, width) for name in "qkv"}
        up, down = linear(4 * width, width), linear(width, 4 * width)
        return {"ln1": norm(), "ln2": norm(), "o": linear(width, width), "up": up, "down": down, **heads}

    def at(x: Tensor, p: dict[str, Tensor]) -> Tensor:
        return F.linear(x, p["w"], p["b"])

    def loss(p: Any, batch: Any) -> Tensor:
        x, y = batch["x"], batch["y"]
        z = F.embedding(x, p["wte"]) + p["wpe"][: x.shape[1]]
        for k in p["blocks"]:
            a = F.layer_norm(z, (width,), k["ln1"]["w"], k["ln1"]["b"])
            shape = (*x.shape, HEADS, width // HEADS)
            if fused:
                q, key, v = at(a, k["qkv"]).view(*x.shape, 3, *shape[2:]).permute(2, 0, 3, 1, 4).unbind(0)
            else:
                q, key, v = (at(a, k[name]).view(shape).transpose(1, 2) for name in "qkv")
            a = F.scaled_dot_product_attention(q, key, v, is_causal=True).transpose(1, 2).reshape(z.shape)
            z = z + at(a, k["o"])
            a = F.layer_norm(z, (width,), k["ln2"]["w"], k["ln2"]["b"])
            z = z + at(F.gelu(at(a, k["up"]), approximate="tanh"), k["down"])
        z = F.layer_norm(z, (width,), p["lnf"]["w"], p["lnf"]["b"])
        return F.cross_entropy(F.linear(z, p["wte"]).view(-1, VOCAB), y.reshape(-1))

    params = {"wte": torch.randn(VOCAB, width, generator=g) * 0.5, "wpe": torch.randn(SEQUENCE, width, generator=g),
              "lnf": norm(), "blocks": [block() for _ in range(layers)]}  # fmt: skip

    def batch(rank: int, step: int) -> Any:
        drawn = torch.randint(VOCAB, (rows, SEQUENCE + 1), generator=torch.Generator().manual_seed(1000 * step + rank))
        return {"x": drawn[:, :-1].contiguous(), "y": drawn[:, 1:].contiguous()}

    return Model(params, loss, batch, FUSED if fused else APART, () if fused else ("**/k/b",))


def of_hf(name: str, **options: Any) -> Model:
    """An architecture of `hf_models`, with the rules of `interop.tp_plan`. options: other values of its config."""
    from hf_models import CASES

    return of_case(CASES[name], **options)[0]


def of_case(case: Any, **options: Any) -> tuple[Model, Any]:
    """A case in the form of `hf_models`, with the rules of `interop.tp_plan`, and its module."""
    from fzero.interop import from_module, tp_plan

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = case.make(**options).eval()
    params, buffers, apply = from_module(module)

    def loss(p: Any, batch: Any) -> Any:
        return fzero.Mean(*case.loss(apply(p, buffers, **{k: x for k, x in batch.items() if k != "labels"}), batch))

    return Model(params, loss, case.batch, tp_plan(module), case.zero_gradient), module


def placements(model: Model, n: int) -> dict[str, Placement]:
    """Of each leaf, by its path, as its first rule says."""
    paths, leaves, _ = tree.flatten(model.params)
    found: dict[str, Placement] = {path: Replicated() for path in paths}
    for path, leaf in zip(paths, leaves, strict=True):
        dims = next((dims for rule, dims in model.rules.items() if tree.matches(rule, path)), P())
        found[path] = dims.layout(path, leaf.shape, Mesh((("tp", n),))).on("tp")
    return found
