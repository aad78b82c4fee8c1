"""longest: the longest sequence that a budget of bytes holds, found by lowering: nothing is allocated, nothing runs.

Lengths double until one does not fit. Between the longest that fits and the shortest that does not, the next to be
tried is where a line through their peaks meets the budget. It ends when the two are one step apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fzero import tree
from fzero.capture.short_tracebacks import short_tracebacks
from fzero.compile.ahead import lower
from fzero.errors import SpecError, leaf_name
from fzero.spec import Spec

MOST = 1 << 24  # tokens: what needs no more than the budget there does not grow with the length


@dataclass(frozen=True)
class Longest:
    """The answer of `fzero.longest`, in tokens and bytes of the device.

    length: the longest that fits. peak: what it needs. refused: the next length, a step longer. needed: the least that
    it needs, more than `budget`.
    """

    length: int
    peak: int
    refused: int
    needed: int
    budget: int

    def __str__(self) -> str:
        return (
            f"{self.length:,} tokens need {self.peak:,} bytes of {self.budget:,}; {self.refused:,} tokens need "
            f"{self.needed:,}"
        )


@short_tracebacks
def longest(
    spec: Spec | Callable[[int], Spec],
    params_like: Any,
    batch_like: Any,
    *,
    dim: int = 1,
    device_bytes: int | None = None,
    step: int = 16,
    world_size: int | None = None,
    key: torch.Tensor | None = None,
) -> Longest:
    """The longest sequence whose step fits into `device_bytes` of a rank, before anything runs.

    spec: a Spec, or a function of the length that returns one, for a loss that depends on it (a layout of
    `fzero.sparse`). params_like, world_size, key: as in `fzero.lower`. batch_like: one rank's batch.
    dim: of the tokens; tensors that have it have one length there, from which the search begins.
    device_bytes: None is `Spec(device_bytes=)`.
    step: lengths are multiples of it.

    The answer is exact: the program of its length is planned and verified within the budget, and a step more is
    refused. Under the budget less is brought ahead, as in any step. Raises SpecError if not even one step fits, and as
    `fzero.lower`, with the length that was tried as a note: lengths are tried that are longer than the answer, so a
    table of positions in `params_like` needs rows for them.

    >>> import torch, fzero
    >>> spec = fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1))
    >>> like = {"w": torch.empty(64, 64, device="meta")}
    >>> found = fzero.longest(spec, like, torch.empty(1, 128, 64, device="meta"), device_bytes=1_000_000)
    >>> found.length % 16, found.peak <= 1_000_000 < found.needed
    (0, True)
    """
    if type(step) is not int or step < 1:
        raise SpecError(f"fzero.longest(step={step!r}): needed a positive int")
    if type(dim) is not int:
        raise SpecError(f"fzero.longest(dim={dim!r}): needed a dim of the batch's tensors, as 1")
    batch_like = tree.plain(batch_like)
    start = _length(batch_like, dim)
    first = _spec_of(spec, max(step, start // step * step))
    budget = first.device_bytes if device_bytes is None else device_bytes
    if type(budget) is not int or budget < 1:
        raise SpecError(f"fzero.longest(device_bytes={budget!r}): needed a positive int, bytes of a rank's device")

    def needed(length: int) -> int:
        one = _spec_of(spec, length)
        batch = tree.map(lambda x: _resized(x, dim, length), batch_like)
        given: dict[str, Any] = {"world_size": world_size, "key": key}
        with _told(length, dim):
            peak = lower(replace(one, device_bytes=None), params_like, batch, **given).memory.peak
        if peak <= budget:
            return peak
        try:  # with less brought ahead
            return lower(replace(one, device_bytes=budget), params_like, batch, **given).memory.peak
        except SpecError:  # of the budget: without it, it was lowered
            return peak

    return _Steps(needed, step, budget).searched(max(1, start // step))


@dataclass
class _Steps:
    """The search over numbers of steps. peaks: what was found; only `peak` writes it."""

    needed: Callable[[int], int]
    step: int
    budget: int
    peaks: dict[int, int] = field(default_factory=dict)

    def peak(self, number: int) -> int:
        """Bytes that so many steps need."""
        if number not in self.peaks:
            self.peaks[number] = self.needed(number * self.step)
        return self.peaks[number]

    def fits(self, number: int) -> bool:
        return self.peak(number) <= self.budget

    def searched(self, start: int) -> Longest:
        """The answer. start: where the search begins."""
        low, high = (start, 2 * start) if self.fits(start) else (start // 2, start)
        while low and not self.fits(low):
            low, high = low // 2, low
        if not low:
            raise SpecError(
                f"fzero.longest(device_bytes={self.budget}): {self.step} tokens need {self.peak(1):,} bytes, so none "
                f"fit. The least that works is device_bytes={self.peak(1)}; or offload more, use remat='full' or more "
                "ranks"
            )
        while self.fits(high):
            low, high = high, 2 * high
            if high * self.step > MOST:
                raise SpecError(
                    f"fzero.longest: {low * self.step:,} tokens need {self.peak(low):,} of {self.budget:,} bytes. "
                    f"Needed a step whose memory grows with the length: less than {MOST:,} tokens"
                )
        while high - low > 1:
            share = (self.budget - self.peak(low)) / (self.peak(high) - self.peak(low))
            between = low + int(share * (high - low))
            middle = min(max(between, low + 1), high - 1)
            if self.fits(middle):  # the line went through it or below: the next one is likely to be too long
                low = middle
                if middle + 1 < high and not self.fits(middle + 1):
                    high = middle + 1
            else:
                high = middle
                if middle - 1 > low and self.fits(middle - 1):
                    low = middle - 1
            if high - low > 1:
                half = (low + high) // 2
                low, high = (half, high) if self.fits(half) else (low, half)
        return Longest(low * self.step, self.peak(low), high * self.step, self.peak(high), self.budget)


@contextmanager
def _told(length: int, dim: int) -> Iterator[None]:
    """Adds the length to an error: the loss may be one of fewer tokens."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"fzero.longest tried {length:,} tokens: dim {dim} of the batch's tensors had that length, other dims were "
            "as given. If a leaf of params_like has a row for each position, give it more rows"
        )
        raise


def _spec_of(spec: Spec | Callable[[int], Spec], length: int) -> Spec:
    own = spec(length) if callable(spec) and not isinstance(spec, Spec) else spec
    if not isinstance(own, Spec):
        given = f"{'a function that returns ' if own is not spec else ''}a {type(own).__name__}"
        raise SpecError(f"fzero.longest(spec={given}): needed a Spec, or a function of the length that returns one")
    return own


def _length(batch: Any, dim: int) -> int:
    """The one length of the batch's tensors along a dim. Raises SpecError."""
    sizes: dict[int, str] = {}
    for path, x in zip(*tree.flatten(batch)[:2], strict=True):
        if isinstance(x, torch.Tensor) and x.ndim > dim >= 0:
            sizes.setdefault(int(x.shape[dim]), leaf_name("batch", path))
    if len(sizes) != 1:
        shown = ", ".join(f"{name} has {size}" for size, name in sizes.items()) or "no tensor has that dim"
        raise SpecError(f"fzero.longest(dim={dim}): {shown}; needed tensors of one length along dim {dim}")
    return next(iter(sizes))


def _resized(x: Any, dim: int, length: int) -> Any:
    if not isinstance(x, torch.Tensor) or x.ndim <= dim:
        return x
    return torch.empty((*x.shape[:dim], length, *x.shape[dim + 1 :]), dtype=x.dtype, device="meta")
