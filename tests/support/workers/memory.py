"""What one rank does in test_memory, under `helpers.gloo`: planned against the allocator's own figures."""

from __future__ import annotations

from typing import Any

import cases
import kept
import torch
import torch.nn.functional as F

import fzero
from fzero.cost.allocator import measured_peak


def normal(key, number, *shape):
    return fzero.random.normal(fzero.random.fold_in(key, number), shape) * 0.05


def convolutional(key):
    widths = [3, 32, 64, 128]
    convs = {
        f"c{i}": {"w": normal(key, i, widths[i + 1], widths[i], 3, 3), "b": torch.zeros(widths[i + 1])}
        for i in range(3)
    }
    return {**convs, "head": {"w": normal(key, 3, 10, 128 * 8 * 8)}}


def convolutional_loss(p, b):
    h = F.relu(F.conv2d(b["x"], p["c0"]["w"], p["c0"]["b"], padding=1))
    h = F.max_pool2d(F.relu(F.conv2d(h, p["c1"]["w"], p["c1"]["b"], padding=1)), 2)
    h = F.max_pool2d(F.relu(F.conv2d(h, p["c2"]["w"], p["c2"]["b"], padding=1)), 2)
    return F.cross_entropy(h.flatten(1) @ p["head"]["w"].T, b["y"])


def embedding(key):
    layers = [{"w": normal(key, i + 1, 64, 64)} for i in range(3)]
    return {"table": normal(key, 0, 20000, 64), "layers": layers, "out": normal(key, 9, 20000, 64)}


def embedding_loss(p, b):
    h = F.embedding(b["x"], p["table"])
    for layer in p["layers"]:
        h = h + torch.tanh(h @ layer["w"])
    return F.cross_entropy((h @ p["out"].T).flatten(0, 1), b["y"].flatten())


def images(rank):
    draw = torch.Generator().manual_seed(rank)
    return {"x": torch.randn(16, 3, 32, 32, generator=draw), "y": torch.randint(0, 10, (16,), generator=draw)}


MODELS = {
    "tied": (*cases.tied(512, 128), lambda rank: cases.tokens(8, 128, 512, rank)),
    "gpt of one layer": (*cases.gpt(512, 128, 1), lambda rank: cases.tokens(4, 64, 512, rank)),
    "gpt": (*cases.gpt(512, 128, 2), lambda rank: cases.tokens(4, 128, 512, rank)),
    "gpt of four layers": (*cases.gpt(512, 128, 4), lambda rank: cases.tokens(4, 128, 512, rank)),
    "convolutional": (convolutional, convolutional_loss, images),
    "embedding": (embedding, embedding_loss, lambda rank: cases.tokens(2, 64, 20000, rank)),
}


def rows(model: str) -> list[dict[str, Any]]:
    """This rank's planned and measured bytes of one step, by stage."""
    init, loss, batch = MODELS[model]
    optimizer = fzero.optim.adamw(1e-3)
    found = []
    for zero in (0, 1, 2, 3):
        spec = fzero.Spec(
            loss=loss, optimizer=optimizer, zero=zero, clip_norm=1.0, bucket_bytes=1 << 20,
            transfers="p2p",  # shared memory is not the allocator's
        )  # fmt: skip
        state = fzero.init(init, spec)
        runtime = state.runtime
        given = batch(runtime.rank)
        with kept.captures():
            state = fzero.step(state, given)
        held = sum(t.numel() * t.element_size() for t in runtime.memory.values())
        inputs = sum(t.numel() * t.element_size() for t in given.values())
        runtime.bound.clear()
        runtime.arena = runtime.arena.new_empty(0)  # so that the arena is mapped anew: the profiler does not see it
        state, extra = measured_peak(lambda s=state, g=given: fzero.step(s, g))
        memory = runtime.compiled(given).memory
        row = {"zero": zero, "planned": memory.peak, "measured": held + inputs + runtime.arena.numel() + extra}
        found.append({**row, "state_held": held, "state_planned": memory.state})
    return found
