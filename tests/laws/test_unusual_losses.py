"""What a schedule of an unusual loss costs under ZeRO-3: no more gathers, and no more memory, than an expert's would.

Eight layers on four ranks, each layer a bucket. A plain step gathers each layer for its forward and its backward, but
the last one once for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fzero

WIDTH, LAYERS = 64, 8
LAYER = 2 * 4 * WIDTH**2 * 4  # bytes
ONCE = 2 * LAYERS - 1  # gathers of a plain step


def meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


def layers() -> list[dict[str, Tensor]]:
    return [{"w": meta(WIDTH, 4 * WIDTH), "v": meta(4 * WIDTH, WIDTH)} for _ in range(LAYERS)]


def tower(p: Any, x: Tensor) -> Tensor:
    for layer in p:
        x = x + torch.tanh(x @ layer["w"]) @ layer["v"]
    return x


def error(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


def plain(p: Any, b: Any) -> Tensor:
    return error(tower(p["l"], b["x"]), b["y"])


def of_two_views(p: Any, b: Any) -> Tensor:
    first, second = tower(p["l"], torch.cat([b["x"], b["y"]])).chunk(2)
    return error(first, second)


def of_a_teacher(p: Any, b: Any) -> Tensor:
    return error(tower(p["l"], b["x"]), tower(p["t"], b["x"]).detach())


def with_low_ranks(p: Any, b: Any) -> Tensor:
    x = b["x"]
    for layer, low in zip(p["l"], p["low"], strict=True):
        x = x + torch.tanh(x @ layer["w"] + x @ low["a"] @ low["b"]) @ layer["v"]
    return error(x, b["y"])


def of_heads_in_the_middle(p: Any, b: Any) -> Tensor:
    x, total = b["x"], torch.zeros(())
    for layer, head in zip(p["l"], p["h"], strict=True):
        x = tower([layer], x)
        total = total + error(x @ head, b["y"])
    return total


def of_shared_layers(p: Any, b: Any) -> Tensor:
    return error(tower([p] * LAYERS, b["x"]), b["y"])


def of_ternary_weights(p: Any, b: Any) -> Tensor:
    x = b["x"]
    for layer in p["l"]:
        size = layer["w"].abs().mean()
        w = layer["w"] + ((layer["w"] / (size + 1e-5)).round().clamp(-1, 1) * size - layer["w"]).detach()
        x = x + torch.tanh(x @ w) @ layer["v"]
    return error(x, b["y"])


def penalty(of: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda p, b: plain(p, b) + sum(of(w) for layer in p["l"] for w in layer.values())


class Loss(NamedTuple):
    """gathers: at most. held: bytes at most beside the state, in layers of a plain step's parameters."""

    fn: Callable[[Any, Any], Tensor]
    gathers: int
    held: float
    more: Callable[[], dict[str, Any]] = dict
    trained: str | None = None


LOSSES = {
    "plain": Loss(plain, ONCE, 7),
    "L2": Loss(penalty(lambda w: w.square().sum()), ONCE, 8),
    "L1": Loss(penalty(lambda w: w.abs().mean()), ONCE, 8.5),
    "to a point": Loss(penalty(lambda w: ((w - 0.5) ** 2 * 1.5).sum()), ONCE, 8.5),
    "two views": Loss(of_two_views, ONCE, 7.5),
    "a teacher": Loss(of_a_teacher, 3 * LAYERS, 7.5, lambda: {"t": layers()}, "l/**"),
    "low ranks": Loss(with_low_ranks, 2 * ONCE, 4, lambda: {
        "low": [{"a": meta(WIDTH, 4), "b": meta(4, 4 * WIDTH)} for _ in range(LAYERS)]}, "low/**"),
    "heads in the middle": Loss(of_heads_in_the_middle, 2 * ONCE + 1, 8, lambda: {
        "h": [meta(WIDTH, WIDTH) for _ in range(LAYERS)]}),
    "shared layers": Loss(of_shared_layers, 6, 4),
    "ternary weights": Loss(of_ternary_weights, ONCE, 9.5),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_costs(name: str) -> None:
    case = LOSSES[name]
    params = layers()[0] if case.fn is of_shared_layers else {"l": layers(), **case.more()}
    spec = fzero.Spec(
        loss=case.fn,
        optimizer=fzero.optim.adamw(1e-3),
        mesh={"dp": 4},
        zero=3,
        bucket_bytes=LAYER,
        trainable=case.trained,
    )
    low = fzero.lower(spec, params, {"x": meta(8, WIDTH), "y": meta(8, WIDTH)}, world_size=4)
    gathers = sum(op.gathers for op in low.program.ops)
    held = (low.memory.peak - low.memory.state) / LAYER
    print(f"{name}: {gathers} gathers, {held:.1f} layers")
    assert gathers <= case.gathers
    assert held <= case.held
