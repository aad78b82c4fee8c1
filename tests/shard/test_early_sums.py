"""A gradient that is a sum over an axis of layers is summed when it is made: its bucket is reduced beside the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import P, optim
from fzero.ir.op import StepPhase

LAYERS, WIDTH = 4, 64


def loss(p: Any, x: Tensor) -> Tensor:
    for k in p["layers"]:
        h = F.layer_norm(x, (WIDTH,), k["norm"])
        x = x + F.linear(F.gelu(F.linear(h, k["up"])), k["down"])
    return x.square().mean()


@pytest.mark.parametrize("given", [{"sequence": "tp"}, {"sequence": "tp", "remat": "full"}, {}], ids=str)
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.sampled(2)
def test_buckets_are_reduced_while_the_backward_goes_on(zero: int, given: dict[str, Any]) -> None:
    """With tokens in parts each norm's gradient is a sum over tp. Without, it is not: both reduce layer by layer."""
    shapes = {"norm": (WIDTH,), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    params = {"layers": [{name: torch.empty(shape) for name, shape in shapes.items()} for _ in range(LAYERS)]}
    rules = {"layers/*/up": P("tp"), "layers/*/down": P(None, "tp")}
    spec = fzero.Spec(
        loss=loss, optimizer=optim.adamw(1e-3), mesh={"dp": 2, "tp": 2}, shard=rules, zero=zero, bucket_bytes=1, **given
    )
    program = fzero.lower(spec, params, torch.empty(4, 16, WIDTH), world_size=4).program
    backward = [i for i, op in enumerate(program.ops) if op.computes and op.phase is StepPhase.BACKWARD]
    reduced = [
        i for i, op in enumerate(program.ops)
        if op.reduces and not op.row.small and program.buffers[op.reads[0].name].kind == "grad"
    ]  # fmt: skip
    assert len(reduced) >= LAYERS
    early = [sum(i < at for at in backward) for i in reduced]  # of the backward's runs, how many come after
    assert sorted(early, reverse=True) == early
    assert early[0] >= len(backward) // 2
    assert sum(left > 0 for left in early) >= len(reduced) - len(reduced) // LAYERS
