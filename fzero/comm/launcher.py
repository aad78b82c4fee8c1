"""launcher: finds out whether a launcher other than torchrun started this process as one task of several.

`srun python train.py` and `mpirun python train.py` start one process per task, without RANK and WORLD_SIZE. Each
process would be a world of one and train a model of its own. A task can see how many tasks its own step has
(`LAUNCHERS`).

A batch script and a shell of salloc are one process in an allocation for many. They have SLURM_NTASKS too: it says how
many tasks an srun within would start. SLURM_STEP_NUM_TASKS is set by srun, for the step that it started. WORLD_SIZE=1,
which torchrun sets for one process, says that a world of one is meant.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import NamedTuple

from fzero.errors import SpecError


class Launcher(NamedTuple):
    """A launcher: its command, and the variables that give a task its place.

    first_host: the shell text that names the first host; "" if the shell cannot find it.
    """

    command: str
    size: str
    rank: str
    local_rank: str
    local_size: str
    first_host: str = ""


SLURM_HOST = "$(scontrol show hostnames $SLURM_STEP_NODELIST | head -n 1)"
PLACE = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
LAUNCHERS = (
    Launcher("mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in PLACE)),  # Open MPI
    Launcher("mpirun", *(f"MV2_COMM_WORLD_{name}" for name in PLACE)),  # MVAPICH
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "", SLURM_HOST),
    Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
)


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def crowded(world_size: int, environ: Mapping[str, str]) -> bool:
    """Whether this machine has more ranks than cores that this process may use. Without LOCAL_WORLD_SIZE all ranks are
    on it.

    >>> crowded(1 << 20, {}), crowded(1 << 20, {"LOCAL_WORLD_SIZE": "1"})
    (True, False)
    """
    return (_number(environ, "LOCAL_WORLD_SIZE") or world_size) > usable_cores()


def first_here(rank: int, environ: Mapping[str, str]) -> bool:
    """Whether a rank is the first of its machine.

    >>> first_here(8, {"LOCAL_RANK": "0"}), first_here(8, {"LOCAL_RANK": "1"}), first_here(0, {}), first_here(8, {})
    (True, False, True, False)
    """
    return (_number(environ, "LOCAL_RANK") if environ.get("LOCAL_RANK") else rank) == 0


def check(environ: Mapping[str, str]) -> None:
    """Raises SpecError if this process is one of several tasks and has no RANK."""
    if _number(environ, "WORLD_SIZE") == 1:
        return
    for variable, least in (("WORLD_SIZE", 2), ("RANK", 1)):
        if _number(environ, variable) >= least:
            other = "RANK" if variable == "WORLD_SIZE" else "WORLD_SIZE"
            raise SpecError(
                f"{variable}={environ[variable]} says that there are several ranks, and {other} is not set: each would "
                f"train a model of its own. Start them with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT. For a world of one unset it"
            )
    for launcher in LAUNCHERS:
        if _number(environ, launcher.size) > 1:
            raise SpecError(_refusal(launcher, environ))
    if _number(environ, "PMIX_RANK") > 0:  # which knows no size
        raise SpecError(
            f"PMIX_RANK={environ['PMIX_RANK']}: this is one task of several, and RANK is not set: each would train a "
            "model of its own. Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each, or start the "
            "ranks of each machine with torchrun. To train separate models set WORLD_SIZE=1 RANK=0"
        )


def line(launcher: Launcher, size: int, host: str, command: str) -> str:
    """Returns the shell line that starts the same tasks as ranks."""
    place = (
        f"RANK=${launcher.rank} WORLD_SIZE=${launcher.size} LOCAL_RANK=${launcher.local_rank} "
        f"MASTER_ADDR={host} MASTER_PORT=29500"
    )
    return f"{launcher.command} -n {size} bash -c {shlex.quote(f'{place} exec {command}')}"


def _refusal(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """The message for a task of `launcher` without a rank."""
    script, size = shlex.join(sys.argv), _number(environ, launcher.size)
    one_machine = _number(environ, launcher.local_size) == size
    host = launcher.first_host or ("127.0.0.1" if one_machine else "FIRST_HOST")
    where = "" if host != "FIRST_HOST" else " (for FIRST_HOST the first host of the hostfile, on one machine 127.0.0.1)"
    return (
        f"{launcher.size}={size}: {launcher.command} started {size} tasks, and none was told its RANK: each would "
        f"train a model of its own. Type{where}\n    {line(launcher, size, host, f'python {script}')}\nor, on one "
        f"machine,\n    torchrun --nproc-per-node {size} {script}\n"
        f"To train {size} separate models set WORLD_SIZE=1 RANK=0"
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    """A variable as a number; 0 if it is not set or is no number."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
