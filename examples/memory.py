"""Where every byte lives: what the plan says before the run, and what the allocator says after it.

Measured is what can be measured. State and batch are the bytes of the tensors that a rank holds, padding included.
What a step needs beside them is its arena, and the allocator's peak above its start (`fzero.cost.allocator`), which do
not know a gradient from an activation, so the table gives their sum, not a split of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table
from torch import Tensor

import fzero
from fzero import tree
from fzero.cost.allocator import measured_peak
from fzero.cost.memory import account

STEP = "the step's arena and more"


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


class Peaks(NamedTuple):
    """The most bytes that one rank needs in a step: by the plan of its program, and by the allocator."""

    planned: int
    measured: int

    def __str__(self) -> str:
        share = self.measured / self.planned
        return f"peak: {_bytes(self.planned)} planned, {_bytes(self.measured)} measured ({share:.1%})"


def measured_step(state: fzero.State, batch: Any) -> tuple[fzero.State, Peaks]:
    """(the state after one step, the bytes of that step on this rank). It is no measure of time."""
    tensors = [leaf for leaf in tree.flatten(batch)[1] if isinstance(leaf, Tensor)]
    device = tensors[0].device
    state, step = measured_peak(lambda: fzero.step(state, batch), device)
    assert state.program is not None
    held = state.held_bytes
    kept = sum(held[kind] for kind in ("param", "optimizer", "state", "arena"))
    return state, Peaks(account(state.program).peak, kept + held_bytes(tensors) + step)


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
