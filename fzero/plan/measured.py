"""measured: what the allocator really held, to set beside the account.

The figures are the allocator's own: `torch.profiler`'s memory events, one for every allocation and release on the
CPU or the device while a function runs. Nothing of fzero's account takes part.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def measured_peak(fn: Callable[[], Any], device: str = "cpu") -> tuple[Any, int]:
    """(`fn()`, the most bytes that tensors took beyond those already held when it began), on "cpu" or "cuda".

    >>> import torch
    >>> _, extra = measured_peak(lambda: torch.ones(1 << 20) + 1)  # the ones, and the sum
    >>> extra >> 20
    8
    """
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=kinds, profile_memory=True) as run:
        result = fn()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        run.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = 1 if device == "cuda" else 0  # the profiler's numbers of device types
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == wanted]
    live = peak = 0
    for event in sorted(memory, key=lambda e: (e["ts"], e["args"]["Ev Idx"])):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return result, peak
