"""allocator: the bytes that torch's allocator really held, to compare with the account.

On the CPU they are from the profiler's memory events: one for every allocation and release while a function runs. On
CUDA they are the caching allocator's peak. Nothing of fzero's account takes part.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import TypeVar

import torch

from fzero import backend
from fzero._torch_compat import allocations

T = TypeVar("T")


def measured_peak(fn: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, int]:
    """(`fn()`, the peak bytes of tensors on `device` while it ran, beyond those held when it began).

    >>> import torch
    >>> _, extra = measured_peak(lambda: torch.ones(1 << 20) + 1)  # the ones, and the sum
    >>> extra >> 20
    8
    """
    device = torch.device(device)
    calls = backend.of(device).calls
    calls.synchronize(device)
    start = calls.watch(device)
    if calls.peak(device) is not None:
        result = fn()
        calls.synchronize(device)
        return result, (calls.peak(device) or 0) - start
    collects = gc.isenabled()
    gc.disable()  # or it is chance which cycles of `fn` are released while it runs
    try:
        with allocations() as events:
            result = fn()
    finally:
        if collects:
            gc.enable()
    return result, max(itertools.accumulate(nbytes for _, nbytes in events), default=0)
