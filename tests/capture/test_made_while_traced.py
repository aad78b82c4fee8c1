"""Parameters that a loss makes at its first call, and keeps: a program would draw them anew at each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero.errors import CaptureError
from fzero.interop import from_module

X = torch.ones(2, 4)
kept: dict[str, Any] = {}
teacher: Any = None


def stepped(loss: Any, params: Any) -> fzero.State:
    state = fzero.init(params, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0)), key=fzero.random.key(0))
    return fzero.step(state, X)


def in_a_dict(params: Any, batch: Tensor) -> Tensor:
    if "teacher" not in kept:
        kept["teacher"] = nn.Linear(4, 4)
    return (batch @ params["w"] - kept["teacher"](batch).detach()).square().mean()


def in_a_global(params: Any, batch: Tensor) -> Tensor:
    global teacher
    if teacher is None:
        teacher = nn.Sequential(nn.Linear(4, 4))
    return (batch @ params["w"] - teacher(batch).detach()).square().mean()


@pytest.mark.parametrize(("loss", "name"), [(in_a_dict, r"kept\['teacher'\]"), (in_a_global, "teacher")])
def test_a_module_that_is_made_at_the_first_call(loss: Any, name: str) -> None:
    with pytest.raises(
        CaptureError, match=rf"^{name}, which {loss.__name__} .* has parameters that {loss.__name__} .*:"
    ):
        stepped(loss, {"w": torch.ones(4, 4)})
    kept.clear()


def test_a_parameter_in_an_attribute() -> None:
    held = SimpleNamespace(scale=None)

    def loss(params: Any, batch: Tensor) -> Tensor:
        if held.scale is None:
            held.scale = nn.Parameter(torch.randn(4))
        return (batch @ params["w"] * held.scale).square().mean()

    with pytest.raises(
        CaptureError, match=r"held\.scale, which .* Make it before fzero\.init, and give what it trains"
    ):
        stepped(loss, {"w": torch.ones(4, 4)})


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        if self.head is None:
            self.head = nn.Linear(4, 1)  # type: ignore[assignment]
        result: Tensor = self.head(self.body(x))  # type: ignore[misc]
        return result


def test_a_layer_that_a_module_makes_in_its_forward() -> None:
    params, buffers, apply = from_module(Lazy())
    with pytest.raises(CaptureError, match=r"self\.head, which Lazy\.forward .* has parameters that Lazy\.forward"):
        stepped(lambda params, batch: apply(params, buffers, batch).square().mean(), params)


def test_one_that_is_made_for_the_call_alone_is_drawn_at_each() -> None:
    """As without fzero."""

    def loss(params: Any, batch: Tensor) -> Tensor:
        noise = nn.Linear(4, 4)
        return (batch @ params["w"] - noise(batch)).square().mean()

    state = stepped(loss, {"w": torch.ones(4, 4)})
    first = float(state.metrics["loss"])
    assert float(fzero.step(state, X).metrics["loss"]) != first


def test_a_cache_of_what_is_not_drawn_stays_allowed() -> None:
    held = SimpleNamespace(mask=None)

    def loss(params: Any, batch: Tensor) -> Tensor:
        if held.mask is None:
            held.mask = torch.tril(torch.ones(4, 4))
        return (batch @ (params["w"] * held.mask)).square().mean()

    assert float(stepped(loss, {"w": torch.ones(4, 4)}).metrics["loss"]) == 7.5
