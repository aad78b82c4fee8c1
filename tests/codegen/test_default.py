"""What `Spec(compile=None)` means: the device says it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fzero
from fzero import backend


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["w"]) * 2.0).exp().sum()


def clusters(how: str | None) -> int:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1), compile=how)
    like = {"w": torch.empty(256, 256, device="meta")}
    return fzero.lower(spec, like, torch.empty(512, 256, device="meta"), world_size=1).roofline().clusters


def test_the_device_decides_where_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.CUDA.compiles == "auto"
    assert clusters(None) == clusters("none") == 0
    monkeypatch.setitem(backend.BACKENDS, "cpu", replace(backend.CPU, compiles="auto"))
    assert clusters(None) == clusters("auto") == 1
    assert clusters("none") == 0
