"""lower_fed: gradients in signs whose loss is sent later, compared with a loop by hand; and steps that would forget."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from coded_cases import rows, start
from naive_steps import stepped, written
from torch import Tensor

import fzero
from fzero import tree
from fzero.errors import SpecError
from fzero.kernels.codecs import CODECS, decode, encode

SIGN = fzero.Precision(reduce="sign")


def by_hand(world: int, steps: int, k: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradient descent in plain PyTorch: (the parameters, what each rank owes of each matrix)."""
    paths, leaves, treedef = tree.flatten(start())
    owed = [[torch.zeros_like(x) for x in leaves] for _ in range(world)]
    for step in range(steps):
        totals = [torch.zeros_like(x) for x in leaves]
        for rank in range(world):
            for i, grad in enumerate(_gradients(tree.unflatten(treedef, leaves), rank, step, k)):
                if grad.ndim > 1:
                    value = grad + owed[rank][i]
                    flat = value.reshape(-1)
                    grad = decode(encode(flat, CODECS["sign"]), flat.numel(), CODECS["sign"]).view(grad.shape)
                    owed[rank][i] = value - grad
                totals[i] = totals[i] + grad
        leaves = [x - 0.1 * total / world for x, total in zip(leaves, totals, strict=True)]
    errors = {path: torch.stack([own[i] for own in owed]) for i, path in enumerate(paths)}
    return dict(zip(paths, leaves, strict=True)), errors


def _gradients(params: Any, rank: int, step: int, k: int) -> list[Tensor]:
    """The means over microbatches."""
    found = []
    for part in rows(rank, step).chunk(k):
        _, leaves, treedef = tree.flatten(params)
        used = [x.clone().requires_grad_() for x in leaves]
        found.append(torch.autograd.grad(cases.layers_loss(tree.unflatten(treedef, used), part), used))
    return [sum(own[1:], own[0]) / k for own in zip(*found, strict=True)]


def step(state: Any, batch: Tensor) -> Any:
    loss, grads, error = fzero.value_and_grad(cases.layers_loss, error=state["error"])(state["params"], batch)
    return {"params": tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "error": error}, {"loss": loss}


def state() -> dict[str, Any]:
    return {"params": start(), "error": fzero.first_error(start(), SIGN)}


@pytest.mark.parametrize(("world", "k", "zero"), [(2, 1, 0), (3, 2, 2), (2, 4, 3), (1, 2, 0)])
def test_what_codes_lose_is_sent_later(world: int, k: int, zero: int) -> None:
    one = fzero.Spec(step=step, precision=SIGN, zero=zero, microbatches=k, bucket_bytes=1 << 12)
    found = stepped(one, state(), rows, world=world, steps=2)
    if world == 1:
        k = 1  # the mean of all rows: nothing travels, so nothing is lost
    params, errors = by_hand(world, 2, k)
    for path, value in params.items() if world > 1 else ():
        torch.testing.assert_close(found.leaves[f"params/{path}"], value, rtol=1e-5, atol=1e-6)
    for path, leaf in found.leaves.items():
        if path.startswith("error/"):
            wanted = errors[path.removeprefix("error/")] if world > 1 else torch.zeros_like(leaf)
            torch.testing.assert_close(leaf, wanted, rtol=1e-4, atol=1e-6)


def computed(state: Any, batch: Tensor) -> Any:
    error = tree.map(lambda e: e * 0.5, state["error"])
    loss, grads, error = fzero.value_and_grad(cases.layers_loss, error=error)(state["params"], batch)
    return {"params": grads, "error": error}, {"loss": loss}


def forgotten(state: Any, batch: Tensor) -> Any:
    loss, grads, _ = fzero.value_and_grad(cases.layers_loss, error=state["error"])(state["params"], batch)
    return {**state, "params": grads}, {"loss": loss}


def given_twice(state: Any, batch: Tensor) -> Any:
    one, two = (fzero.value_and_grad(cases.layers_loss, error=state["error"])(state["params"], batch) for _ in "ab")
    params = tree.map(lambda p, g, h: p - g - h, state["params"], one[1], two[1])
    error = tree.map(lambda a, b: a + b, one[2], two[2])
    return {"params": params, "error": error}, {"loss": one[0]}


def of_no_leaf(state: Any, batch: Tensor) -> Any:
    doubled = tree.map(lambda p: 2 * p, state["params"])
    loss, grads, error = fzero.value_and_grad(cases.layers_loss, error=state["error"])(doubled, batch)
    return {"params": grads, "error": error}, {"loss": loss}


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (computed, "is computed in the step. Give it the state's own leaf"),
        (forgotten, "does not keep the new error"),
        (given_twice, "is given twice"),
        (of_no_leaf, "a gradient is of no leaf of the state"),
    ],
)
def test_a_step_that_would_lose_errors_is_refused(of: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        written(fzero.Spec(step=of, precision=SIGN), state(), rows(0, 0), 2)
