"""200 steps of the demo's GPT on the demo's text in every precision, beside fp32. Minutes: fp16 is slow on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import run
from torch import Tensor

import fzero
import gpt
from fzero.precision import PRESETS
from tests.api.test_precision import NARROW, text_of

STEPS, SEQUENCE = 200, 32
BOUNDS = {"bf16": (0.006, 0.0015), "fp16": (0.001, 0.0002), "bf16_params": (0.012, 0.003)}  # (largest, mean) of a loss


def losses(name: str) -> Tensor:
    given: Any = name
    if name == "fp16":
        given = replace(PRESETS["fp16"], loss_scale=fzero.LossScale(initial=2.0**10))
    params = gpt.init_gpt(fzero.random.key(0), gpt.sizes(SEQUENCE)["tiny"])
    spec = fzero.Spec(loss=gpt.loss_fn, optimizer=fzero.optim.adamw(1e-3), zero=3, precision=given)
    result = run(spec, params, text_of(2, STEPS, SEQUENCE), world=2, steps=STEPS, poison=False)
    return torch.tensor(result.losses(), dtype=torch.float64)


@pytest.fixture(scope="module")
def fp32_losses() -> Tensor:
    return losses("fp32")


@pytest.mark.acceptance
@pytest.mark.parametrize("name", NARROW)
def test_200_steps_track_fp32(name: str, fp32_losses: Tensor) -> None:
    gap = (losses(name) - fp32_losses).abs()
    print(
        f"{name}: largest {gap.max():.4f}, mean {gap.mean():.4f}, of the last 20 {gap[-20:].mean():.4f}; "
        f"fp32 {fp32_losses[0]:.3f} -> {fp32_losses[-10:].mean():.3f}"
    )
    most, mean = BOUNDS[name]
    assert 0 < float(gap.max()) <= most
    assert float(gap.mean()) <= mean
    assert fp32_losses[-10:].mean() < 2.6
