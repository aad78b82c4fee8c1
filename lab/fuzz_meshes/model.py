"""model: a random model as data, and its loss in plain PyTorch; nothing of fzero.

Leaves are {"emb", "blocks": [...], "encoder": [...], "head", ...}, paths are joined by "/". A loss returns (total,
count): the loss itself with a count of None, or the terms of an exact mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.fuzz_meshes.layers import KINDS, Layer, Leaf, Leaves, Side

CLASSES = 8


@dataclass(frozen=True)
class Model:
    """A model. Immutable.

    input: "tokens" or "floats". head: "tied" (the embedding's words), "words", "values" (a square error), "classes"
    (of the mean over the sequence), "contrast" (rows against rows of the batch). aux: after which layers a summand of
    the loss is taken, and of what kind: "square", "head" or "spread" (over the rows of the batch). second: how a second
    input goes in: "add", "join" (along the sequence), "cross" (the encoder's) or None. shared: layer -> an earlier
    layer whose leaves it uses. mean: the loss is an exact mean.
    """

    width: int
    seq: int
    vocab: int
    input: str
    head: str
    layers: tuple[Layer, ...]
    encoder: tuple[Layer, ...] = ()
    aux: tuple[tuple[int, str], ...] = ()
    second: str | None = None
    shared: Mapping[int, int] | None = None
    mean: bool = False

    @property
    def length(self) -> int:
        """The length of the sequence inside the layers."""
        return 2 * self.seq if self.second == "join" else self.seq

    def leaves(self) -> dict[str, Leaf]:
        """By path, every leaf."""
        found: dict[str, Leaf] = dict(_flat(self._tree()))
        return found

    def has_rows(self, n: int) -> bool:
        """Whether a layer has a leaf of one dim or more: else no rule of a pipeline or of remat can name it."""
        return any(leaf.shape for leaf in dict(_flat(self._layer(n, self.layers[n]))).values())

    def _tree(self) -> dict[str, Any]:
        w = self.width
        tree: dict[str, Any] = {"blocks": [self._layer(n, layer) for n, layer in enumerate(self.layers)]}
        if self.encoder:
            tree["encoder"] = [KINDS[x.kind].leaves(x.options, w, self.seq) for x in self.encoder]
        if self.input == "tokens":
            tree["emb"] = Leaf((self.vocab, w), 0)
            tree["pos"] = Leaf((self.seq, w))
        else:
            tree["stem"] = Leaf((w, w), 1)
        if self.second is not None:
            tree["stem2"] = Leaf((w, w), 1)
        tree["last"] = Leaf((w,), init="one")
        wide = {"words": self.vocab, "values": w, "classes": CLASSES, "contrast": w}.get(self.head)
        if wide is not None:
            tree["head"] = Leaf((w, wide), 1)
            tree["head_b"] = Leaf((wide,), 0, init="bias")
        if any(kind == "head" for _, kind in self.aux):
            tree["aux"] = Leaf((w, CLASSES), 1)
        return tree

    def _layer(self, n: int, layer: Layer) -> Leaves:
        if n in (self.shared or {}):
            return {"gain": Leaf((self.width,), init="one")}
        return KINDS[layer.kind].leaves(layer.options, self.width, self.length)

    def params(self, dtype: torch.dtype) -> Any:
        """The first values, as a tree; the same in every run."""
        draw = torch.Generator().manual_seed(11)

        def made(leaf: Leaf) -> Tensor:
            value = torch.randn(leaf.shape, generator=draw, dtype=torch.float64)
            if leaf.init == "one":
                return (1 + 0.1 * value).to(dtype)
            inner = max(leaf.shape[-1:], default=1)
            return (value * (0.1 if leaf.init == "bias" else 0.8 / math.sqrt(inner))).to(dtype)

        return _map(self._tree(), made)

    def batch(self, place: int, step: int, rows: int, dtype: torch.dtype, bad: bool = False) -> dict[str, Tensor]:
        """What the data rank `place` is given in a step. bad: one element is infinite."""
        draw = torch.Generator().manual_seed(1000 * step + place)

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

        batch: dict[str, Tensor] = {}
        if self.input == "tokens":
            batch["x"] = torch.randint(self.vocab, (rows, self.seq), generator=draw)
        else:
            batch["x"] = floats(rows, self.seq, self.width)
            if bad:
                batch["x"][-1, 0, 0] = math.inf
        if self.second is not None:
            batch["x2"] = floats(rows, self.seq, self.width)
        if self.head == "values":
            batch["y"] = floats(rows, self.seq, self.width)
        elif self.head in ("tied", "words"):
            batch["y"] = torch.randint(self.vocab, (rows, self.seq), generator=draw)
        batch["c"] = torch.randint(CLASSES, (rows,), generator=draw)
        batch["weight"] = (torch.rand((rows, self.seq), generator=draw, dtype=torch.float64) < 0.7).to(dtype) + 0.25
        return batch

    # --- the loss

    def loss(self, p: Any, b: Any) -> tuple[Tensor, Tensor | None]:
        """(the loss, None), or (total, count) of an exact mean."""
        side = Side()
        x = self._entered(p, b, side)
        for n, layer in enumerate(self.layers):
            x = self._through(n, layer, p, x, side)
            side.terms += [self._aux(kind, p, x, b) for at, kind in self.aux if at == n]
        x = x[:, : self.seq] * torch.rsqrt(x[:, : self.seq].square().mean(-1, keepdim=True) + 1e-5) * p["last"]
        total, count = self._ended(p, x, b)
        for term in side.terms:
            total = total + (term if count is None else term * count)
        return total, count

    def _entered(self, p: Any, b: Any, side: Side) -> Tensor:
        x = F.embedding(b["x"], p["emb"]) + p["pos"] if self.input == "tokens" else b["x"] @ p["stem"]
        if self.second is None:
            return x
        other = torch.tanh(b["x2"] @ p["stem2"])
        for n, layer in enumerate(self.encoder):
            other = KINDS[layer.kind].run(layer.options, p["encoder"][n], other, side)
        if self.second == "cross":
            side.context = other
            return x
        return x + other if self.second == "add" else torch.cat([x, other], 1)

    def _through(self, n: int, layer: Layer, p: Any, x: Tensor, side: Side) -> Tensor:
        own, options = p["blocks"][n], layer.options
        if n in (self.shared or {}):
            assert self.shared is not None
            first = self.shared[n]
            return KINDS[self.layers[first].kind].run(
                self.layers[first].options, p["blocks"][first], x * own["gain"], side
            )
        return KINDS[layer.kind].run(options, own, x, side)

    def _aux(self, kind: str, p: Any, x: Tensor, b: Any) -> Tensor:
        if kind == "square":
            return 0.05 * x.square().mean()
        if kind == "spread":
            return 0.05 * (x.mean(1) - x.mean((0, 1))).square().sum(-1).mean()
        return 0.3 * F.cross_entropy(x.mean(1) @ p["aux"], b["c"])

    def _ended(self, p: Any, x: Tensor, b: Any) -> tuple[Tensor, Tensor | None]:
        if self.head == "tied":
            each = F.cross_entropy(F.linear(x, p["emb"]).flatten(0, 1), b["y"].flatten(), reduction="none")
        else:
            pooled = x.mean(1) if self.head in ("classes", "contrast") else x
            out = pooled @ p["head"] + p["head_b"]
            if self.head == "words":
                each = F.cross_entropy(out.flatten(0, 1), b["y"].flatten(), reduction="none")
            elif self.head == "values":
                each = (out - b["y"]).square().mean(-1).flatten()
            elif self.head == "classes":
                each = F.cross_entropy(out, b["c"], reduction="none")
            else:
                scores = F.normalize(out, dim=-1, eps=1e-3) @ x.mean(1).t()
                each = F.cross_entropy(scores, torch.arange(x.shape[0]), reduction="none")
        wide = torch.promote_types(each.dtype, torch.float32)  # a sum of many terms needs more bits
        each, weight = each.to(wide), b["weight"].to(wide)
        weight = weight.flatten() if each.numel() == weight.numel() else weight.mean(1)
        return ((each * weight).sum(), weight.sum()) if self.mean else ((each * weight).mean(), None)


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield path, tree
        return
    for name, value in items:
        yield from _flat(value, f"{path}/{name}" if path else str(name))


def _map(tree: Any, fn: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map(value, fn) for name, value in tree.items()}
    return [_map(value, fn) for value in tree] if isinstance(tree, list) else fn(tree)


def flat(tree: Any) -> dict[str, Any]:
    """By path, the leaves of a tree of dicts and lists."""
    return dict(_flat(tree))


def mapped(tree: Any, fn: Any) -> Any:
    """The tree with fn(leaf) in place of each leaf."""
    return _map(tree, fn)
