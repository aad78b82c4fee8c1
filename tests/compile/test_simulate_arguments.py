"""What simulate, simulation, roofline, longest and verify are given: presets by name, and what is none is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.errors import FzeroError, SpecError

LIKE = {"w": torch.empty(2048, 2048, device="meta")}
SPEC = fzero.Spec(loss=lambda p, x: (x @ p["w"]).square().mean(), optimizer=optim.sgd(0.1), mesh={"dp": 2})


@pytest.fixture(scope="module")
def lowered() -> fzero.Lowered:
    return fzero.lower(SPEC, LIKE, torch.empty(2048, 2048, device="meta"))


def test_a_preset_by_its_name_is_the_machine(lowered: fzero.Lowered) -> None:
    machine = fzero.hardware.load("h100")
    assert fzero.simulate(lowered, "h100").seconds == fzero.simulate(lowered, machine).seconds
    assert fzero.simulation(lowered, "h100").seconds == fzero.simulation(lowered, machine).seconds
    assert lowered.roofline("h100").seconds == lowered.roofline(machine).seconds
    assert lowered.roofline("h100").seconds < lowered.roofline("v100-32gb").seconds


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda low: fzero.simulate(low, "h10"), SpecError, "Did you mean 'h100'"),
        (lambda low: fzero.simulate(low, None), SpecError, "hardware=None: needed a preset"),
        (lambda low: fzero.simulate(low.program, "h100"), SpecError, "simulate: needed what fzero.lower returned"),
        (lambda low: fzero.simulation(SPEC, "h100"), SpecError, "needed what fzero.lower returned, got Spec"),
        (lambda low: low.roofline(3), SpecError, "hardware=3"),
        (lambda low: fzero.verify(3), FzeroError, "needed a Program or .*got int"),
        (
            lambda low: fzero.longest(SPEC, LIKE, torch.empty(2048, 2048, device="meta"), dim="1", device_bytes=10**6),
            SpecError,
            r"longest\(dim='1'\): needed a dim",
        ),
    ],
)
def test_what_is_none_is_named(
    call: Callable[[Any], Any], error: type[Exception], message: str, lowered: fzero.Lowered
) -> None:
    with pytest.raises(error, match=message):
        call(lowered)
