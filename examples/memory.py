"""Where every byte lives: what the plan says before the run, and what the allocator says after it.

Measured is what can be measured. State and batch are the bytes of the tensors that a rank holds, padding included.
What a step allocates beside them is the allocator's peak above its start: from `torch.profiler`'s memory events on the
CPU, from the CUDA allocator's own peak on a GPU. Neither knows a gradient from an activation, so the table gives their
sum, not a split of it.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.table import Table
from torch import Tensor

T = TypeVar("T")

STEP = "made and freed by the step"


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank: what it holds between steps, and the most that one step had beside that."""

    params: int
    optimizer: int
    batch: int
    step: int

    @property
    def peak(self) -> int:
        return self.params + self.optimizer + self.batch + self.step


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once however many views it has."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def measured_peak(fn: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """`fn()`, and the most bytes that were allocated at one time while it ran beyond those allocated before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        result = fn()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - start
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes two lines about itself to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = fn()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return result, _peak([event for event in events if event.get("name") == "[memory]"])


def _peak(events: Sequence[Mapping[str, Any]]) -> int:
    """The highest running sum of allocations and frees; a free of what was there before the profile is not reported."""
    peak = level = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        level += event["args"]["Bytes"]
        peak = max(peak, level)
    return peak


def planned_table(memory: Mapping[str, int], peak: int) -> Table:
    """The plan of one rank, by kind, at the moment of its peak."""
    table = Table()
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    for kind, size in memory.items():
        table.add_row(kind, _bytes(size), f"{size / peak:.1%}")
    table.add_section()
    table.add_row("peak", _bytes(peak), "", style="bold")
    return table


def measured_table(memory: Mapping[str, int], peak: int, ranks: Sequence[Measured]) -> Table:
    """Plan and measurement side by side; the kinds that only the plan can tell apart are measured as one sum."""
    held = ("params", "optimizer", "batch")
    parts = {kind: size for kind, size in memory.items() if kind not in held and size}
    table = Table()
    table.add_column("kind")
    table.add_column("planned", justify="right")
    for rank in range(len(ranks)):
        table.add_column(f"rank {rank}", justify="right")
    for kind in held:
        table.add_row(kind, _bytes(memory[kind]), *(_bytes(getattr(rank, kind)) for rank in ranks))
    table.add_row(STEP, _bytes(sum(parts.values())), *(_bytes(rank.step) for rank in ranks))
    for kind, size in parts.items():
        table.add_row(f"  {kind}", f"({_bytes(size)})", *("" for _ in ranks), style="dim")
    table.add_section()
    table.add_row("peak", _bytes(peak), *(_bytes(rank.peak) for rank in ranks), style="bold")
    table.add_row("measured / planned", "", *(f"{rank.peak / peak:.1%}" for rank in ranks))
    return table


def _bytes(size: int) -> str:
    scale, unit = next(
        (scale, unit) for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0, "B")) if size >= scale
    )
    return f"{size / scale:,.2f} {unit}" if scale else f"{size} {unit}"
