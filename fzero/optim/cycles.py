"""Schedules of one cycle: a rate that rises and falls, and a momentum that does the opposite (Smith 2018).

A momentum is a schedule too, with values in [0, 1). `sgd(momentum=)` and the betas of `adam` and `adamw` take it. As in
torch, Adam's correction of the bias at step t is `1 - beta^t` with the beta of that step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero.errors import SpecError
from fzero.optim import _check
from fzero.optim._named import named
from fzero.optim.schedules import Schedule, half_cosine


class OneCycle(NamedTuple):
    """The schedules of a cycle: of the learning rate, and of the momentum (beta1 in Adam).

    >>> cycle = one_cycle(0.1, 10)
    >>> float(cycle.rate(torch.tensor(2))), float(cycle.momentum(torch.tensor(2)))
    (0.1, 0.85)
    """

    rate: Schedule
    momentum: Schedule


@named
def one_cycle(
    max_lr: float,
    total_steps: int,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    base_momentum: float = 0.85,
    max_momentum: float = 0.95,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> OneCycle:
    """The schedules of `torch.optim.lr_scheduler.OneCycleLR`, with its arguments and defaults.

    max_lr, total_steps, pct_start, anneal_strategy, base_momentum, max_momentum, div_factor, final_div_factor,
    three_phase: as there. The rate rises from `max_lr / div_factor` to `max_lr` in the part `pct_start` of the steps,
    and then falls to the first rate over `final_div_factor`. `three_phase` puts a fall to the first rate between, as
    long as the rise. The momentum moves between `max_momentum`, at low rates, and `base_momentum`, at the highest.
    `anneal_strategy` is "cos" or "linear". After `total_steps` the last values stay. Raises `SpecError` for a value out
    of range.

    >>> cycle = one_cycle(1.0, 11, pct_start=0.55, anneal_strategy="linear", div_factor=5.0)
    >>> [round(float(cycle.rate(torch.tensor(count))), 4) for count in (0, 5, 10)]
    [0.2, 0.9921, 0.0]
    >>> [round(float(cycle.momentum(torch.tensor(count))), 4) for count in (0, 5, 10)]
    [0.95, 0.851, 0.95]
    """
    peak = _check.number("one_cycle: max_lr", max_lr)
    total = _check.steps("one_cycle: total_steps", total_steps, low=1)
    part = _check.number("one_cycle: pct_start", pct_start, high=0.5 if three_phase else 1.0)
    low, high = (
        _check.number(f"one_cycle: {name}", value, high=1.0)
        for name, value in (("base_momentum", base_momentum), ("max_momentum", max_momentum))
    )
    first = peak / _check.number("one_cycle: div_factor", div_factor, above=True)
    last = first / _check.number("one_cycle: final_div_factor", final_div_factor, above=True)
    if anneal_strategy not in ("cos", "linear"):
        raise SpecError(f"one_cycle: anneal_strategy is {anneal_strategy!r}, but it must be 'cos' or 'linear'")
    _check.flag("one_cycle: three_phase", three_phase)
    rise, end = part * total - 1, float(total - 1)
    ends = (rise, 2 * part * total - 2, end) if three_phase else (rise, end)
    rates = (first, peak, first, last) if three_phase else (first, peak, last)
    momenta = (high, low, high, high) if three_phase else (high, low, high)
    cosine = anneal_strategy == "cos"
    return OneCycle(_phases(rates, ends, cosine), _phases(momenta, ends, cosine))


@named
def triangle(low: float, peak: float, rise: int, fall: int, stairs: tuple[int, int] = (0, 0)) -> Schedule:
    """From `low` at count 0 to `peak` at count `rise`, back to `low` at count `rise + fall`, and `low` from there on.

    low, peak: values. rise, fall: steps of each. stairs: the steps in which it rises and falls, of equal height; 0: it
    moves at every count. `peak` may be the smaller one, as a momentum's is. It is the cycle of DeepSpeed's OneCycle.
    Raises `SpecError` for a negative value and `rise < 1`.

    >>> [float(triangle(0.0, 1.0, 4, 2)(torch.tensor(count))) for count in (0, 1, 4, 5, 6, 9)]
    [0.0, 0.25, 1.0, 0.5, 0.0, 0.0]
    >>> [float(triangle(0.0, 1.0, 4, 2, stairs=(2, 0))(torch.tensor(count))) for count in (0, 1, 2, 3, 4)]
    [0.0, 0.0, 0.5, 0.5, 1.0]
    """
    low, peak = _check.number("triangle: low", low), _check.number("triangle: peak", peak)
    rise, fall = _check.steps("triangle: rise", rise, low=1), _check.steps("triangle: fall", fall)
    up, down = (_check.steps(f"triangle: stairs[{i}]", number) for i, number in enumerate(stairs))

    def side(done: Tensor, steps: int, number: int) -> Tensor:
        done = done.to(torch.float64).clamp(0, steps)
        return torch.floor(done * number / steps) / number if number else done / steps

    def schedule(count: Tensor) -> Tensor:
        falling = side(rise + fall - count, max(fall, 1), down)
        return low + (peak - low) * torch.where(count <= rise, side(count, rise, up), falling)

    return schedule


@named
def inverse_time(peak: float, steps: int, rate: float) -> Schedule:
    """`peak / (1 + rate * count / steps)`. peak: the first value. steps, rate: of the decay. Raises `SpecError` for a
    negative value and `steps < 1`.

    >>> [float(inverse_time(1.0, 2, 0.5)(torch.tensor(count))) for count in (0, 2, 4)]
    [1.0, 0.6666666666666666, 0.5]
    """
    peak = _check.number("inverse_time: peak", peak)
    steps = _check.steps("inverse_time: steps", steps, low=1)
    rate = _check.number("inverse_time: rate", rate)
    return lambda count: peak / (1 + rate * count.to(torch.float64) / steps)


@named
def linear_growth(start: float, steps: int, rate: float, staircase: bool = False) -> Schedule:
    """`start * (1 + rate * count / steps)`, without an end; with `staircase` it grows every `steps` at once.

    start: the first value. steps, rate: of the growth. staircase: a bool.
    It is DeepSpeed's LRRangeTest, a search for the highest rate. Raises `SpecError` for a negative value, `steps < 1`.

    >>> [float(linear_growth(1.0, 2, 0.5)(torch.tensor(count))) for count in (0, 1, 4)]
    [1.0, 1.25, 2.0]
    """
    start = _check.number("linear_growth: start", start)
    steps = _check.steps("linear_growth: steps", steps, low=1)
    rate = _check.number("linear_growth: rate", rate)
    _check.flag("linear_growth: staircase", staircase)

    def schedule(count: Tensor) -> Tensor:
        times = count // steps if staircase else count.to(torch.float64) / steps
        return start * (1 + rate * times.to(torch.float64))

    return schedule


def _phases(values: tuple[float, ...], ends: tuple[float, ...], cosine: bool) -> Schedule:
    """From each value to the next one, which is there at the end of its phase. Ends may be no whole numbers."""

    def schedule(count: Tensor) -> Tensor:
        at, result = count.to(torch.float64), torch.full((), values[-1], dtype=torch.float64, device=count.device)
        starts = (0.0, *ends[:-1])
        for i in reversed(range(len(ends))):
            done = ((at - starts[i]) / ((ends[i] - starts[i]) or 1.0)).clamp(0.0, 1.0)
            begin, end = values[i : i + 2]
            value = half_cosine(begin, end, done) if cosine else begin + (end - begin) * done
            result = torch.where(at <= ends[i], value, result)
        return result

    return schedule
