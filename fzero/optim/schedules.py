"""Learning-rate schedules: functions of the step count, made of tensor operations alone.

A schedule takes the number of updates already made: a 0-d integer tensor, 0 at the first update. It gives the learning
rate of the next one as a scalar float64 tensor on the same device. Nothing is read back from the device, so a schedule
is part of the compiled step and its trace serves every step. Any function of this kind is a schedule:

>>> schedule = lambda count: 0.1 * 0.5 ** (count // 1000).to(torch.float64)

| schedule | value at count c |
|---|---|
| `constant`      | value                                                                              |
| `linear_warmup` | peak * min(1, c / steps)                                                           |
| `cosine`        | end + (peak - end) * (1 + cos(pi * min(1, c / steps))) / 2                         |
| `warmup_cosine` | `linear_warmup` up to warmup_steps, then `cosine` over total_steps - warmup_steps  |
| `warmup`        | low + (peak - low) * min(1, c / steps), or * min(1, ln(c + 1) / ln(steps))          |
| `polynomial`    | end + (peak - end) * (1 - min(1, c / steps)) ^ power                               |
| `exponential`   | peak * rate ^ (c / steps), not beyond end                                          |
| `piecewise`     | value, times each factor whose boundary is <= c                                    |
| `joined`        | each schedule from its boundary on, which is its count 0                           |
| `table`         | values[c], and the last one from there on                                          |
| `shift`         | schedule(max(0, c + by))                                                           |

As in optax and in Hugging Face's schedules `linear_warmup` starts at 0: the first update of all changes
moments only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fzero._torch_compat import DataDependentOutputException
from fzero.errors import SpecError
from fzero.optim import _check
from fzero.optim._named import named

Schedule: TypeAlias = Callable[[Tensor], Tensor]


@named
def constant(value: float) -> Schedule:
    """Always the same. value: at least 0.

    >>> constant(0.5)(torch.tensor(7))
    tensor(0.5000, dtype=torch.float64)
    """
    value = _check.number("constant: value", value)
    return lambda count: torch.full((), value, dtype=torch.float64, device=count.device)


@named
def linear_warmup(peak: float, steps: int) -> Schedule:
    """From 0 at count 0 to `peak` at count `steps`, and `peak` from there on. With `steps=0` it is `constant(peak)`.

    peak: the last value. steps: until it.

    Raises `SpecError` (a `ValueError`) for a negative `peak` or `steps`, and for a value that is not a number.

    >>> [linear_warmup(1.0, 4)(torch.tensor(c)).item() for c in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """
    peak = _check.number("linear_warmup: peak", peak)
    steps = _check.steps("linear_warmup: steps", steps)
    return lambda count: peak * _progress(count + (steps == 0), max(steps, 1))


@named
def cosine(peak: float, steps: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `peak` at count 0 to `end` at count `steps` (at least 1), and `end` from there on.

    peak: the first value. steps: until the last. end: the last value.

    Raises `SpecError` (a `ValueError`) for a negative `peak` or `end`, for `steps < 1`, and for a value that is no
    number.

    >>> [round(cosine(1.0, 4, end=0.2)(torch.tensor(c)).item(), 6) for c in (0, 2, 4, 9)]
    [1.0, 0.6, 0.2, 0.2]
    """
    peak, end = _check.number("cosine: peak", peak), _check.number("cosine: end", end)
    steps = _check.steps("cosine: steps", steps, low=1)
    return lambda count: half_cosine(peak, end, _progress(count, steps))


@named
def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Schedule:
    """`linear_warmup(peak, warmup_steps)`, then half a cosine that reaches `end` at count `total_steps`.

    peak: the highest value. warmup_steps: until it. total_steps: until the last. end: the last value.

    Raises `SpecError` (a `ValueError`) for a negative value, for `warmup_steps > total_steps`, and for a value that is
    no number.

    >>> [round(warmup_cosine(1.0, 2, 6)(torch.tensor(c)).item(), 6) for c in (0, 1, 2, 4, 6, 9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    peak, end = _check.number("warmup_cosine: peak", peak), _check.number("warmup_cosine: end", end)
    warmup_steps = _check.steps("warmup_cosine: warmup_steps", warmup_steps)
    total_steps = _check.steps("warmup_cosine: total_steps", total_steps, low=1)
    if warmup_steps > total_steps:
        raise SpecError(
            f"warmup_cosine: warmup_steps is {warmup_steps}, but total_steps, which includes it, is {total_steps}: "
            f"write total_steps={warmup_steps + total_steps} if the cosine alone should take {total_steps}"
        )

    def schedule(count: Tensor) -> Tensor:
        warm = peak * _progress(count, max(warmup_steps, 1))
        decayed = half_cosine(peak, end, _progress(count - warmup_steps, max(total_steps - warmup_steps, 1)))
        return torch.where(count < warmup_steps, warm, decayed)

    return schedule


@named
def warmup(low: float, peak: float, steps: int, kind: str = "linear") -> Schedule:
    """From `low` at count 0 to `peak`, and `peak` from there on. `kind` "linear" is there at count `steps`.

    low, peak: the first and the last value. steps: between them. kind: "linear" or "log".
    `kind` "log" rises as `ln(count + 1) / ln(steps)`, with `steps` at least 2, and is there at count `steps - 1`. (It
    is DeepSpeed's default: `shift(warmup(low, peak, steps, "log"), -1)` is its WarmupLR.)

    Raises `SpecError` for a negative value, `steps < 1`, and another kind.

    >>> [round(warmup(0.0, 1.0, 4, "log")(torch.tensor(c)).item(), 4) for c in (0, 1, 2, 3, 4)]
    [0.0, 0.5, 0.7925, 1.0, 1.0]
    >>> warmup(0.5, 1.0, 4)(torch.tensor(1)).item()
    0.625
    """
    low, peak = _check.number("warmup: low", low), _check.number("warmup: peak", peak)
    steps = _check.steps("warmup: steps", steps, low=1)
    if kind not in ("linear", "log"):
        raise SpecError(f"warmup: kind is {kind!r}, but it must be 'linear' or 'log'")
    if kind == "linear":
        return lambda count: low + (peak - low) * _progress(count, steps)
    whole = math.log(max(steps, 2))
    return lambda count: low + (peak - low) * torch.clamp(torch.log(count.to(torch.float64) + 1) / whole, max=1.0)


@named
def polynomial(peak: float, steps: int, end: float = 0.0, power: float = 1.0) -> Schedule:
    """From `peak` at count 0 to `end` at count `steps`, as `(1 - count / steps) ** power`, and `end` from there on.

    peak: the first value. steps: until the last. end: the last value. power: above 0.
    With `power=1` it is linear. Raises `SpecError` for a negative value, `steps < 1` and `power <= 0`.

    >>> [polynomial(1.0, 4, end=0.2, power=2.0)(torch.tensor(c)).item() for c in (0, 2, 4, 9)]
    [1.0, 0.4, 0.2, 0.2]
    """
    peak, end = _check.number("polynomial: peak", peak), _check.number("polynomial: end", end)
    steps = _check.steps("polynomial: steps", steps, low=1)
    power = _check.number("polynomial: power", power, above=True)
    return lambda count: end + (peak - end) * (1 - _progress(count, steps)) ** power


@named
def exponential(peak: float, steps: int, rate: float, staircase: bool = False, end: float | None = None) -> Schedule:
    """`peak * rate ** (count / steps)`: multiplied by `rate` every `steps`; with `staircase` all at once.

    peak: the first value. steps: between two factors. rate: the factor. staircase: a bool. end: the value that it does
    not pass: the least if `rate < 1`, else the largest. Raises `SpecError` for a negative value, `steps < 1` and `rate
    <= 0`.

    >>> [exponential(1.0, 2, 0.25, end=0.1)(torch.tensor(c)).item() for c in (0, 1, 2, 9)]
    [1.0, 0.5, 0.25, 0.1]
    >>> exponential(1.0, 2, 0.25, staircase=True)(torch.tensor(3)).item()
    0.25
    """
    peak = _check.number("exponential: peak", peak)
    steps = _check.steps("exponential: steps", steps, low=1)
    rate = _check.number("exponential: rate", rate, above=True)
    _check.flag("exponential: staircase", staircase)
    limit = None if end is None else _check.number("exponential: end", end)

    def schedule(count: Tensor) -> Tensor:
        times = count // steps if staircase else count.to(torch.float64) / steps
        value = peak * rate ** times.to(torch.float64)
        return value if limit is None else value.clamp(min=limit) if rate < 1 else value.clamp(max=limit)

    return schedule


@named
def piecewise(value: float, factors: Mapping[int, float]) -> Schedule:
    """`value`, multiplied by each factor from its boundary on: `{30_000: 0.1, 60_000: 0.1}` divides twice by ten.

    value: the first. factors: by the count at which each begins.

    Raises `SpecError` for a negative value or factor, and for a boundary that is not an integer.

    >>> [round(piecewise(1.0, {2: 0.5, 4: 0.1})(torch.tensor(c)).item(), 6) for c in (0, 1, 2, 4, 9)]
    [1.0, 1.0, 0.5, 0.05, 0.05]
    """
    value = _check.number("piecewise: value", value)
    if not isinstance(factors, Mapping):
        raise SpecError(
            f"piecewise: factors is {_check.kind(factors)}, but it must say a factor by boundary: write {{30_000: 0.1}}"
        )
    pairs = [
        (_check.steps("piecewise: a boundary", at), _check.number(f"piecewise: factors[{at}]", factor))
        for at, factor in factors.items()
    ]

    def schedule(count: Tensor) -> Tensor:
        held = constant(value)(count)
        for at, factor in pairs:
            held = torch.where(count < at, held, held * factor)
        return held

    return schedule


def joined(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Returns the first schedule up to the first boundary, then the second, whose count is 0 there, and so on.

    schedules: in their order. boundaries: the counts at which the next begins.

    Raises `SpecError` unless there is one boundary less than schedules, in increasing order.

    >>> schedule = joined([linear_warmup(1.0, 2), polynomial(1.0, 4)], [2])
    >>> [schedule(torch.tensor(c)).item() for c in (0, 1, 2, 3, 6)]
    [0.0, 0.5, 1.0, 0.75, 0.0]
    """
    if len(boundaries) != len(schedules) - 1:
        raise SpecError(
            f"joined: {len(schedules)} schedules have {max(len(schedules) - 1, 0)} boundaries between them, but "
            f"{len(boundaries)} are given"
        )
    starts = [_check.steps(f"joined: boundaries[{i}]", at) for i, at in enumerate(boundaries)]
    if starts != sorted(starts):
        raise SpecError(f"joined: boundaries is {list(boundaries)}, but they must be in increasing order")
    parts = [as_schedule("joined", part, f"schedules[{i}]") for i, part in enumerate(schedules)]

    def schedule(count: Tensor) -> Tensor:
        value = parts[0](count)
        for start, part in zip(starts, parts[1:], strict=True):
            value = torch.where(count < start, value, part((count - start).clamp(min=0)))
        return value

    return schedule


def shift(schedule: Schedule, by: int) -> Schedule:
    """Returns the schedule read `by` counts ahead, or behind if `by` is negative: then its first value comes again.

    schedule: any. by: an int.

    >>> [shift(linear_warmup(1.0, 2), -1)(torch.tensor(c)).item() for c in (0, 1, 2, 3)]
    [0.0, 0.0, 0.5, 1.0]
    """
    by = _check.steps("shift: by", by, low=-(2**62))
    part = as_schedule("shift", schedule, "schedule")
    return lambda count: part((count + by).clamp(min=0))


def table(values: Sequence[float]) -> Schedule:
    """The value of each count, one after the other, and the last one from there on: any schedule that was computed
    before, in Python or by another library.

    values: one for each count. Raises `SpecError` for an empty table, and for a value that is negative or no number.

    >>> by_epoch = table([0.1, 0.1, 0.01])
    >>> [by_epoch(torch.tensor(c)).item() for c in (0, 1, 2, 9)]
    [0.1, 0.1, 0.01, 0.01]
    """
    rates = [_check.number(f"table: values[{i}]", value) for i, value in enumerate(values)]
    if not rates:
        raise SpecError("table: values is empty, but it must have the rate of the first update")

    def schedule(count: Tensor) -> Tensor:
        held = torch.tensor(rates, dtype=torch.float64, device=count.device)
        return held.index_select(0, count.clamp(0, len(rates) - 1).reshape(1)).reshape(())

    return schedule


def as_schedule(where: str, learning_rate: float | Tensor | Schedule, name: str = "learning_rate") -> Schedule:
    """Returns the schedule that an optimizer's `learning_rate` stands for; `where` begins its error messages.

    A 0-d tensor stands for itself at every count: `inject_hyperparams` gives such a tensor, a leaf of its state.

    >>> as_schedule("sgd", -0.1)
    Traceback (most recent call last):
    fzero.errors.SpecError: sgd: learning_rate is -0.1, but it must be at least 0 and finite
    >>> as_schedule("sgd", lambda count: 0.1)(torch.tensor(0))
    Traceback (most recent call last):
    fzero.errors.SpecError: sgd: the schedule returned 0.1 (float), but it must return a 0-d tensor computed from \
count, or the value would be baked into the compiled step
    """
    if not callable(learning_rate):
        trees = isinstance(learning_rate, Iterable) and not isinstance(learning_rate, str)
        fix = "parameters are given to fzero.init" if trees else ""
        value = _check.hyper(f"{where}: {name}", learning_rate, fix=fix)
        return constant(value) if isinstance(value, float) else lambda count: value.to(torch.float64)

    def schedule(count: Tensor) -> Tensor:
        try:
            rate: Any = learning_rate(count)
        except DataDependentOutputException:
            raise SpecError(
                f"{where}: the schedule asks for the value of count, as in `if count < 10`, which is known only when "
                "the step runs. Write torch.where(count < 10, a, b), or take fzero.optim.table, piecewise or joined"
            ) from None
        if not isinstance(rate, Tensor) or rate.dim() != 0:
            shown = f"shape {tuple(rate.shape)}" if isinstance(rate, Tensor) else _check.kind(rate)
            raise SpecError(
                f"{where}: the schedule returned {shown}, but it must return a 0-d tensor computed from count, or the "
                "value would be baked into the compiled step"
            )
        return rate.to(torch.float64)

    return schedule


def as_betas(where: str, betas: Any) -> tuple[float | Schedule, float | Schedule]:
    """Returns an optimizer's decay rates, each a number in [0, 1) or a schedule of such; `where` begins the errors.

    >>> as_betas("adam", (lambda count: 0.9, 1.5))
    Traceback (most recent call last):
    fzero.errors.SpecError: adam: betas[1] is 1.5, but it must be at least 0 and less than 1
    """
    numbers = [0.0 if callable(beta) else beta for beta in betas] if isinstance(betas, (tuple, list)) else betas
    checked = _check.two_betas(where, numbers)
    first, second = (
        as_schedule(where, beta, f"betas[{i}]") if callable(beta) else checked[i] for i, beta in enumerate(betas)
    )
    return first, second


def _progress(count: Tensor, steps: int) -> Tensor:
    """How much of `steps` is done at `count`: scalar float64 in [0, 1]."""
    return torch.clamp(count.to(torch.float64) / steps, 0.0, 1.0)


def half_cosine(peak: float, end: float, progress: Tensor) -> Tensor:
    """Half a cosine: `peak` at a progress of 0, `end` at 1.

    >>> half_cosine(1.0, 0.5, torch.tensor(0.5))
    tensor(0.7500)
    """
    return end + (0.5 * (peak - end)) * (1.0 + torch.cos(math.pi * progress))
