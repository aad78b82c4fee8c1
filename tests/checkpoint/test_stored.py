"""A checkpoint that was written on 2026-11-26, by a program of that day, loads: on as many ranks, and on others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, values
from torch import Tensor

import fzero

STORED = Path(__file__).with_name("stored")


def loss(params: Any, batch: Tensor) -> Tensor:
    return ((batch @ params["layer"]["w"]).sum(-1) + params["bias"]).square().mean()


def resumed(folder: str, world: int) -> tuple[dict[str, Any], float]:
    """The parameters as loaded, and the loss of a step after it."""
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), clip_norm=1.0, mesh={"dp": world})
    state = fzero.load(folder, spec)
    assert state.step == 3
    assert int(state.opt_state.count.full()) == 3
    held = fzero.unshard(state.params)
    return held, float(fzero.step(state, torch.ones(2, 4)).metrics["loss"])


def _rank(folder: str) -> tuple[list[float], float]:
    held, after = resumed(folder, 2)
    return held["layer"]["w"].flatten().tolist(), after


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_an_earlier_program(world: int, tmp_path: Path) -> None:
    folder = shutil.copytree(STORED, tmp_path / "run")
    before = sorted(os.listdir(folder))
    if world == 1:
        held, after = resumed(str(folder), 1)
        w = held["layer"]["w"].flatten().tolist()
        assert float(held["bias"]) == pytest.approx(0.4717, abs=5e-5)
    else:
        w, after = values(gloo(2, _rank, str(folder)))[0]
    expected = [-0.03, 0.07, 0.1699, 0.2699, 0.3699, 0.4698, 0.5698, 0.6698, 0.7697, 0.8697, 0.9697, 1.0697]
    assert w == pytest.approx(expected, abs=5e-5)
    assert after == pytest.approx(45.017887115478516, rel=1e-6)
    assert set(before) <= set(os.listdir(folder))
