"""Closed-over tensors that differ between ranks: a step takes them for equal."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
from helpers import gloo, values

import fzero
from fzero import P

BATCH = torch.ones(4, 4)


def rank() -> int:
    return int(os.environ["RANK"])


def of_the_loss(where: str, shape: tuple[int, ...], at: int) -> tuple[list[str], list[float]]:
    """(warnings, new weights) of two steps, with a closed-over tensor of which one element differs."""
    noise = torch.ones(shape)
    noise.view(-1)[at] += rank()

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"] * (1 if where == "update" else noise.mean())).square().mean()

    def step(state: Any, x: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss)(state["params"], x)
        rate = noise.mean() if where == "update" else 0.1
        return {"params": {"w": state["params"]["w"] - rate * grads["w"]}}, {"loss": value}

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fzero").addHandler(handler)
    parts = {"mesh": {"dp": 1, "tp": 2}, "shard": {"params/w": P("tp")}}
    more: Any = parts if where == "parts" else {"mesh": {"dp": 2}}
    state = fzero.init({"params": {"w": torch.ones(4, 4)}}, fzero.Spec(step=step, **more))
    for _ in range(2):
        state = fzero.step(state, BATCH)
    return [text for text in told if "closed over" in text], state.tree["params"]["w"].full().flatten().tolist()


@pytest.mark.parametrize(("shape", "at"), [((), 0), ((3, 5), 7), ((300, 1000), -1)])
def test_a_loss_s_own_tensor_is_told_once(shape: tuple[int, ...], at: int) -> None:
    first, second = values(gloo(2, of_the_loss, "loss", shape, at if at >= 0 else 0))
    assert first[1] == second[1]
    (text,) = first[0]
    assert text.startswith("fzero: noise is closed over, and differs between rank 0 and rank 1")
    assert "one seed on all ranks" in text


def test_where_ranks_compute_one_batch_together_it_is_refused_on_all() -> None:
    for outcome in gloo(2, of_the_loss, "parts", (3,), 1):
        assert outcome.error is not None
        assert outcome.error.startswith(
            "DisagreementError: noise is closed over, and differs between rank 0 and rank 1"
        )
        assert "one seed on all ranks" in outcome.error


def test_what_the_update_reads_is_part_of_the_program() -> None:
    for outcome in gloo(2, of_the_loss, "update", (3,), 1):
        assert outcome.error is not None
        assert outcome.error.startswith("DisagreementError: the ranks do not run the same program")
