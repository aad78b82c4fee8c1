"""measured: what the allocator really held, to set beside the account.

The figures are the allocator's own: on the CPU `torch.profiler`'s memory events, one for every allocation and release
while a function runs; on CUDA the caching allocator's peak. Nothing of fzero's account takes part.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


def measured_peak(fn: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, int]:
    """(`fn()`, the most bytes that tensors on `device` took beyond those already held when it began).

    >>> import torch
    >>> _, extra = measured_peak(lambda: torch.ones(1 << 20) + 1)  # the ones, and the sum
    >>> extra >> 20
    8
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        result = fn()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - start
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes two lines about itself to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        result = fn()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        run.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    live = peak = 0  # a release of what was there before is not reported
    for event in sorted(memory, key=lambda e: (e["ts"], e["args"]["Ev Idx"])):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return result, peak
