"""simulate: what a lowered step takes on a machine of given rates, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fzero.compile.lowered import Lowered
from fzero.cost.rates import SEND, Rates
from fzero.cost.step_time import StepTime, roles_time
from fzero.errors import SpecError
from fzero.hardware import Hardware
from fzero.hardware.toml_file import rates_over
from fzero.ir.program import lane_bytes
from fzero.ir.records import DISK


def simulate(lowered: Lowered, rates: Rates | Hardware | str | Path, rank: int = 0) -> StepTime:
    """Returns the predicted time of a step on one rank, by lane, with the bytes that it writes to disk.

    lowered: of `fzero.lower`. rank: the one whose time is returned.
    rates: a machine (a preset's name, a TOML file or a `Hardware`), or figures of your own, as
    `fzero.cost.rates.H100`. A transfer is priced by its kind, its axis and the ranks of that. The roles of a pipeline
    are simulated together: a role waits for the messages of others. A lane of the device that has no rate takes no
    time. Raises SpecError where a lane of the disk has none, or a kind of transfer between ranks.

    >>> import torch, fzero
    >>> from fzero.cost.rates import H100
    >>> spec = fzero.Spec(
    ...     loss=lambda p, x: (x @ p["w"]).square().mean(),
    ...     optimizer=fzero.optim.adamw(1e-3),
    ...     offload="optimizer",
    ...     update_on="device",
    ...     device="cuda",
    ... )
    >>> found = fzero.simulate(fzero.lower(spec, {"w": torch.zeros(512, 512)}, torch.zeros(64, 512)), H100)
    >>> sorted(found.busy), found.written
    (['device→host', 'host→device'], 0)
    >>> round(found.busy["host→device"] * 45e9)  # two moments of 4 bytes an element
    2097152
    """
    check_lowered("simulate", lowered)
    if not 0 <= rank < lowered.plan.mesh.world_size:
        raise SpecError(f"simulate: rank {rank} of a world of {lowered.plan.mesh.world_size}")
    rates = checked_rates(lowered, rates)
    return roles_time(lowered.programs, rates)[lowered.plan.mesh.role(rank)]


def check_lowered(name: str, lowered: Any) -> None:
    """Raises SpecError for what `fzero.lower` did not return."""
    if not isinstance(lowered, Lowered):
        raise SpecError(f"fzero.{name}: needed what fzero.lower returned, got {type(lowered).__name__}")


def checked_rates(lowered: Lowered, rates: Rates | Hardware | str | Path) -> Rates:
    """The rates for a step. Raises SpecError for a lane of a disk, or a kind of transfer, that has none."""
    rates = rates_over(rates, lowered.plan.mesh, lowered.asked.compile)
    moved = [name for program in lowered.programs.values() for name in lane_bytes(program).items()]
    for name, nbytes in moved:
        if DISK not in name or name in rates.lanes:
            continue
        raise SpecError(
            f"simulate: the step moves {nbytes:,} bytes on {name}, a lane without a rate. Needed in "
            f"rates.lanes (bytes a second), as `fzero doctor` measures it: dataclasses.replace(rates, "
            f"lanes={{**rates.lanes, {name!r}: 2e9}})"
        )
    ops = [op for role in lowered.programs.values() for op in role.ops]
    wanted = {(op.row.rate or SEND, str(op.axis)) for op in ops if op.is_collective or op.is_message}
    if lacking := sorted({kind for kind, axis in wanted if rates.link(kind, axis) is None}):
        raise SpecError(
            f"simulate: the step has transfers of a kind without a rate: {', '.join(lacking)}. Needed in "
            "rates.latency (seconds) and rates.wire_bytes (bytes a second): "
            f"dataclasses.replace(rates, latency={{{lacking[0]!r}: 1e-5}}, wire_bytes={{{lacking[0]!r}: 4e11}})"
        )
    return rates
