"""What a run keeps of its programs has a bound, and a program that was dropped is made again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fzero
from fzero._torch_compat import FakeTensorMode
from fzero.session import session


def loss(p: Any, batch: torch.Tensor) -> torch.Tensor:
    return ((batch @ p["w"]).tanh() @ p["v"]).square().mean()


def out(p: Any, batch: torch.Tensor) -> Any:
    return {"out": loss(p, batch)}


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"offload": {"**": "device"}}, "a rule that takes something off the device, or no offload="),
        ({"mesh": {"tp": 2}, "shard": {"w": fzero.P(), "v": fzero.P(None, None)}}, "a rule that cuts something over"),
    ],
)
def test_rules_that_say_nothing(fields: Any, needed: str) -> None:
    with pytest.raises(fzero.SpecError, match=needed):
        fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), **fields)
    fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), offload={"params/w": "cpu", "**": "device"})


def test_batches_of_many_lengths(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(1e-2))
    params = {"w": torch.full((4, 4), 0.5), "v": torch.full((4, 2), 0.25)}
    lengths = [1, 2, 3, 4, 5, 1, 5, 4, 2]
    plain = fzero.init(params, spec)
    for length in lengths:
        plain = fzero.step(plain, torch.ones(length, 4))
    monkeypatch.setattr(session, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(session, "MAX_FAKES", 5)
    state = fzero.init(params, spec)
    runtime: Any = state.runtime
    caplog.set_level(logging.WARNING, "fzero")
    for length in lengths:
        state = fzero.step(state, torch.ones(length, 4))
        assert len(runtime.programs) <= 3
        assert len(runtime.bound) <= 3
        assert len(FakeTensorMode.cache) <= 5
        fzero.evaluate(state, torch.ones(2, 4), out)
        assert len(runtime.programs) + len(runtime.evaluations) <= 3 + 1
        assert len(runtime.compiled_segments) <= 3
    assert "more than 3 programs: the one that was not used for the longest time is dropped" in caplog.text
    assert all(torch.equal(state.params[name].full(), plain.params[name].full()) for name in params)
