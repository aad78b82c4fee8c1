"""Schedules beside torch's own, step by step, and optax's where it is installed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from fzero import optim

STEPS = 24
PEAK = 0.25


def values(schedule: optim.Schedule) -> list[float]:
    counts = [torch.tensor(c) for c in range(STEPS)]
    rates = [schedule(count) for count in counts]
    assert all(rate.dim() == 0 and rate.dtype == torch.float64 for rate in rates)
    return [float(rate) for rate in rates]


def by_torch(make: Callable[[Any], Any]) -> list[float]:
    """The rate of each step under a scheduler of torch."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler, rates = make(optimizer), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def halves(o: Any) -> Any:
    parts = [lr_scheduler.LinearLR(o, 0.2, 1.0, 5), lr_scheduler.PolynomialLR(o, 10, power=2.0)]
    return lr_scheduler.SequentialLR(o, parts, [5])


TORCH: dict[str, tuple[optim.Schedule, Callable[[Any], Any]]] = {
    "polynomial": (optim.polynomial(PEAK, 10, power=2.0), lambda o: lr_scheduler.PolynomialLR(o, 10, power=2.0)),
    "linear": (optim.polynomial(PEAK, 10, end=PEAK / 4), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, 10)),
    "exponential": (optim.exponential(PEAK, 1, 0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "staircase": (optim.exponential(PEAK, 4, 0.5, staircase=True), lambda o: lr_scheduler.StepLR(o, 4, 0.5)),
    "piecewise": (optim.piecewise(PEAK, {3: 0.1, 9: 0.1}), lambda o: lr_scheduler.MultiStepLR(o, [3, 9], 0.1)),
    "warmup": (optim.warmup(PEAK / 5, PEAK, 6), lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 6)),
    "joined": (optim.joined([optim.warmup(PEAK / 5, PEAK, 5), optim.polynomial(PEAK, 10, power=2.0)], [5]), halves),
    "shift": (
        optim.shift(optim.polynomial(PEAK, 10), 3),
        lambda o: lr_scheduler.LambdaLR(o, lambda c: max(0.0, 1 - (c + 3) / 10)),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_a_schedule_is_that_of_torch(name: str) -> None:
    schedule, scheduler = TORCH[name]
    assert values(schedule) == pytest.approx(by_torch(scheduler), rel=1e-12, abs=1e-15)


def test_an_end_is_not_passed() -> None:
    falling, rising = optim.exponential(1.0, 1, 0.5, end=0.2), optim.exponential(1.0, 1, 2.0, end=3.0)
    assert values(falling)[:5] == [1.0, 0.5, 0.25, 0.2, 0.2]
    assert values(rising)[:4] == [1.0, 2.0, 3.0, 3.0]


def test_a_logarithmic_warmup() -> None:
    expected = [0.1 + 0.9 * min(1.0, math.log(c + 1) / math.log(6)) for c in range(STEPS)]
    assert values(optim.warmup(0.1, 1.0, 6, "log")) == pytest.approx(expected, rel=1e-12)
    assert values(optim.warmup(0.1, 1.0, 1, "log"))[:3] == [0.1, 1.0, 1.0]


def test_three_joined_schedules_each_start_at_their_boundary() -> None:
    schedule = optim.joined([optim.constant(1.0), optim.polynomial(4.0, 4), optim.constant(9.0)], [2, 4])
    assert values(schedule)[:6] == [1.0, 1.0, 4.0, 3.0, 9.0, 9.0]


def test_a_shift_back_repeats_the_first_value() -> None:
    assert values(optim.shift(optim.polynomial(4.0, 4), -2))[:5] == [4.0, 4.0, 4.0, 3.0, 2.0]
