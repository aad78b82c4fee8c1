"""Schedules beside torch's own, step by step, and optax's where it is installed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from fzero import optim
from fzero.errors import SpecError

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


CYCLES: list[dict[str, Any]] = [
    {},
    {"anneal_strategy": "linear", "pct_start": 0.55},
    {"three_phase": True, "base_momentum": 0.1, "max_momentum": 0.7},
    {"three_phase": True, "pct_start": 0.45, "anneal_strategy": "linear", "div_factor": 3.0, "final_div_factor": 7.0},
    {"pct_start": 0.0},
]


@pytest.mark.parametrize("given", CYCLES)
@pytest.mark.parametrize("total", [STEPS, 10, 7])
def test_a_cycle_is_that_of_torch(given: dict[str, Any], total: int) -> None:
    """The rate and the momentum, at every step, and then the last ones."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, expected = lr_scheduler.OneCycleLR(optimizer, PEAK, total, **given), []
    for _ in range(total):
        group = optimizer.param_groups[0]
        expected.append((group["lr"], group["betas"][0]))
        optimizer.step()
        scheduler.step()
    expected += [expected[-1]] * (STEPS - total)
    cycle = optim.one_cycle(PEAK, total, **given)
    assert values(cycle.rate) == pytest.approx([rate for rate, _ in expected], rel=1e-9, abs=1e-15)
    assert values(cycle.momentum) == pytest.approx([momentum for _, momentum in expected], rel=1e-9)


@pytest.mark.parametrize("stairs", [(0, 0), (3, 2)])
def test_a_triangle_is_a_cycle_of_deepspeed(stairs: tuple[int, int]) -> None:
    """Its formula (0.19.8): floor(iteration * stairs / size) / stairs on both sides."""

    def height(count: int) -> float:
        done, size, number = (count, 6, stairs[0]) if count <= 6 else (max(10 - count, 0), 4, stairs[1])
        return math.floor(done * number / size) / number if number else done / size

    expected = [0.1 + 0.4 * height(count) for count in range(STEPS)]
    assert values(optim.triangle(0.1, 0.5, 6, 4, stairs)) == pytest.approx(expected, rel=1e-12)
    falling = [0.9 - 0.1 * height(count) for count in range(STEPS)]
    assert values(optim.triangle(0.9, 0.8, 6, 4, stairs)) == pytest.approx(falling, rel=1e-12)


def one_update(tx: optim.GradientTransformation) -> None:
    params = [torch.ones(1)]
    tx.update(params, tx.init(params), params)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: optim.one_cycle(0.1, 10, anneal_strategy="exp"), "anneal_strategy is 'exp', but it must be 'cos'"),
        (lambda: optim.one_cycle(0.1, 10, pct_start=0.6, three_phase=True), "pct_start is 0.6, .* less than 0.5"),
        (lambda: optim.one_cycle(0.1, 10, max_momentum=1.0), "max_momentum is 1.0, .* less than 1"),
        (lambda: optim.one_cycle(0.1, 1.5), "total_steps is 1.5"),
        (lambda: optim.triangle(0.1, 0.2, 0, 3), "rise is 0, but it must be at least 1"),
        (
            lambda: one_update(optim.adamw(0.1, betas=(lambda count: 0.9, 0.99))),
            r"the schedule returned 0\.9 \(float\)",
        ),
        (lambda: one_update(optim.sgd(0.1, lambda count: 0.9)), r"the schedule returned 0\.9 \(float\)"),
        (lambda: optim.adam(0.1, betas=(lambda count: count, 1.0)), r"betas\[1\] is 1\.0"),
    ],
)
def test_what_is_no_cycle_is_said(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        call()


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
