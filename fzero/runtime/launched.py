"""launched: whether a launcher other than torchrun started this process as one task of several.

`srun python train.py` and `mpirun python train.py` start it once for each task, without RANK and WORLD_SIZE. Each would
be a world of one, and train a model of its own. A task knows the tasks of its own step (`LAUNCHERS`).

A batch script and a shell of salloc are one process in an allocation for many: SLURM_NTASKS, which they have too, says
what an srun within would start. SLURM_STEP_NUM_TASKS is srun's, of the step it started. WORLD_SIZE=1, which torchrun
sets for one process, says that a world of one is meant.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import NamedTuple

from fzero.errors import SpecError


class Launcher(NamedTuple):
    """How tasks are started, and the variables that tell a task its place."""

    command: str
    size: str
    rank: str
    local_rank: str
    first_host: str = "<host of task 0>"


SLURM_HOST = "$(scontrol show hostnames $SLURM_STEP_NODELIST | head -n 1)"
LAUNCHERS = (
    Launcher("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    Launcher("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),  # MVAPICH
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", SLURM_HOST),
    Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),  # MPICH and Intel MPI
)


def check(environ: Mapping[str, str]) -> None:
    """Raises SpecError where this process is one of several tasks and was not told its RANK."""
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
            raise SpecError(_told(launcher, environ[launcher.size]))
    if _number(environ, "PMIX_RANK") > 0:  # which knows no size
        raise SpecError(
            f"PMIX_RANK={environ['PMIX_RANK']}: this is one task of several, and RANK is not set: each would train a "
            "model of its own. Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each, or start the "
            "ranks of each machine with torchrun. To train separate models set WORLD_SIZE=1 RANK=0"
        )


def line(launcher: Launcher, command: str) -> str:
    """The line that starts the same tasks as ranks."""
    place = (
        f"RANK=${launcher.rank} WORLD_SIZE=${launcher.size} LOCAL_RANK=${launcher.local_rank} "
        f"MASTER_ADDR={launcher.first_host} MASTER_PORT=29500"
    )
    return f"{launcher.command} bash -c {shlex.quote(f'{place} exec {command}')}"


def _told(launcher: Launcher, size: str) -> str:
    script = shlex.join(sys.argv)
    return (
        f"{launcher.size}={size}: {launcher.command} started {size} tasks, and none was told its RANK: each would "
        f"train a model of its own. Type\n    {line(launcher, f'python {script}')}\nor, on one machine,\n"
        f"    torchrun --nproc-per-node {size} {script}\nTo train {size} separate models set WORLD_SIZE=1 RANK=0"
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    """What a variable says, 0 where it is not set or no number."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
