"""Programs by role: messages in one order at both ends, and what recomputation leaves alone at a border."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

import fzero

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


@pytest.mark.parametrize("roles", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sampled(3)
def test_receives_start_in_the_order_of_the_sends(schedule: str, roles: int) -> None:
    """A tied embedding, its gradients and a norm beside the activations: NCCL tells them apart by order alone."""
    init, loss = cases.tied(64, 16, 2 * roles if schedule in ("interleaved", "zb-v") else roles)  # a layer a chunk
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.adamw(1e-2), microbatches=4, clip_norm=1.0, transfers="p2p",
        mesh={"pp": roles}, pipeline=schedule,
    )  # fmt: skip
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    for role, program in fzero.lower(spec, init(fzero.random.key(0)), cases.tokens(4, 8, 64)).programs.items():
        for op in program.ops:
            if op.is_send:
                sent[role, op.peer].append(op.tag)
            elif op.is_recv:
                received[op.peer, role].append(op.tag)
    assert sent == received
    assert len(sent) >= 2 * (roles - 1)


def test_a_value_that_the_next_chunk_reads_is_not_made_again() -> None:
    """A layer that ends in an activation: the next one's backward reads what it was computed from."""

    def loss(p: Any, batch: Tensor) -> Tensor:
        for w in p["blocks"]:
            batch = batch + torch.tanh(torch.tanh(batch @ w) @ w)
        return batch.square().mean()

    params = {"blocks": [torch.empty(8, 8, device="meta") for _ in range(4)]}

    def made_again(**given: Any) -> int:
        spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), microbatches=2, remat="full", **given)
        programs = fzero.lower(spec, params, torch.empty(4, 8, device="meta")).programs
        return sum(name.endswith(".again") for program in programs.values() for name in program.buffers)

    whole, cut = made_again(), made_again(mesh={"pp": 2}, pipeline="1f1b")
    assert 0 < cut < whole
