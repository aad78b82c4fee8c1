"""The L-BFGS of docs/recipes.md beside torch's, on two ranks that each have half of the batch."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run
from torch import Tensor

import fzero
from fzero import optim, tree

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
STEPS, ROWS = 8, 6


def recipe() -> dict[str, Any]:
    """The functions and the constants of the page, up to the end of this recipe."""
    text = PAGE.read_text(encoding="utf-8").split("## Two networks: a GAN")[0]
    names: dict[str, Any] = {"torch": torch, "fzero": fzero, "tree": tree, "optim": optim, "params": None}
    for example in doctest.DocTestParser().get_examples(text):
        if example.source.startswith(("import ", "from ", "def ", "HISTORY, RATE")):
            exec(example.source, names)
    return names


def batch(rank: int, step: int = 0) -> dict[str, Tensor]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return {"x": x, "y": torch.sin(x.sum(1))}


def parameters() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"w1": torch.randn(3, 16).double() / 2, "w2": torch.randn(16).double() / 4}


def start(names: dict[str, Any]) -> dict[str, Any]:
    params, number = parameters(), names["HISTORY"]
    zeros, wide = tree.map(torch.zeros_like, params), {"dtype": torch.float64}
    memory = {"y": [zeros] * number, "s": [zeros] * number, "inverse": [torch.zeros((), **wide) for _ in range(number)]}
    last = {"count": torch.tensor(0), "grads": zeros, "move": zeros, "scale": torch.ones((), **wide)}
    return {"params": params, "opt": memory | last}


def theirs(names: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    whole = {name: torch.cat([batch(rank)[name] for rank in range(2)]) for name in ("x", "y")}
    params = {name: leaf.requires_grad_() for name, leaf in parameters().items()}
    how = {"lr": names["RATE"], "max_iter": 1, "history_size": names["HISTORY"]}
    optimizer = torch.optim.LBFGS(params.values(), **how)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = names["mean_error"](params, whole)
        value.backward()
        return value

    losses = [float(optimizer.step(closure).detach()) for _ in range(STEPS)]
    return losses, {name: leaf.detach() for name, leaf in params.items()}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.sampled(1)
def test_its_steps_are_those_of_torch(zero: int) -> None:
    """More steps than it remembers; and nothing of its state is gathered."""
    names = recipe()
    spec = fzero.Spec(step=names["lbfgs_step"], zero=zero, bucket_bytes=64)
    result = run(spec, start(names), batch, world=2, steps=STEPS)
    losses, params = theirs(names)
    assert result.losses() == pytest.approx(losses, rel=1e-10)
    for name, leaf in params.items():
        torch.testing.assert_close(result.final[f"params/{name}"], leaf, rtol=1e-8, atol=1e-10)
    gathered = {op.reads[0].name for op in result.lowered.program.ops if op.gathers}
    assert not any(name.startswith("opt") for name in gathered), gathered
