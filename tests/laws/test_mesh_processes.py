"""A grid of real processes: the bits of the interpreter, which are those of no pipeline (`test_pipeline`)."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from helpers import gloo, run, values
from torch import Tensor

import fzero
from fzero import optim, tree

VOCAB, SEQUENCE, STEPS = 64, 8, 3
INIT, LOSS = cases.gpt(VOCAB, 16, 4, 2)


def tokens(rank: int, step: int) -> Any:
    return cases.tokens(4, SEQUENCE, VOCAB, rank + 10 * step)


def spec(**given: Any) -> fzero.Spec:
    made = {"loss": LOSS, "optimizer": optim.adamw(1e-2), "microbatches": 4, "reduce": "end", "clip_norm": 0.5}
    return fzero.Spec(**{**made, **given})


def trained(given: dict[str, Any]) -> tuple[dict[str, Tensor], list[float], dict[str, int]]:
    """(whole leaves by path, losses, the bytes held) of a rank of a grid."""
    torch.set_num_threads(1)
    mine = spec(**given)
    state = fzero.init(INIT, mine, key=fzero.random.key(0))
    mesh = state.runtime.plan.mesh
    losses = []
    for number in range(STEPS):
        state = fzero.step(state, tokens(mesh.coordinate(state.runtime.rank, "dp"), number))
        losses.append(float(state.metrics["loss"]))
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True)), losses, state.held_bytes


GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {"mesh": {"pp": 2}, "pipeline": "1f1b"}),
    "zb-h1 over messages": (2, {"mesh": {"pp": 2}, "pipeline": "zb-h1", "transfers": "p2p"}),
    "interleaved, zero=3": (4, {"mesh": {"pp": 2, "dp": 2}, "pipeline": "interleaved", "zero": 3}),
    "zb-v, zero=2, messages": (
        4,
        {"mesh": {"pp": 2, "dp": -1}, "pipeline": "zb-v", "zero": 2, "transfers": "p2p", "precision": "bf16"},
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_processes_have_the_bits_of_no_pipeline(name: str) -> None:
    world, given = GRIDS[name]
    ranks = values(gloo(world, trained, given))
    data = world // 2
    plain = {key: value for key, value in given.items() if key not in ("mesh", "pipeline")}
    params = INIT(fzero.random.fold_in(fzero.random.key(0), 0)) if False else INIT(fzero.random.key(0))
    expected = run(spec(**plain), params, tokens, world=data, steps=STEPS, key=fzero.random.key(0))
    for leaves, losses, _ in ranks:
        assert losses == expected.losses()
        differing = [path for path, leaf in expected.final.items() if not torch.equal(leaves[path], leaf)]
        assert differing == []
