"""Tasks that a launcher started without a rank: which are refused, and that the line to type is right."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fzero
from fzero.comm import group, launcher

# what a job's processes find in their environment, by how they were started
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
          "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "4(x2)"}  # fmt: skip
SRUN = {**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_RANK": "0",
}
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}

REFUSED = {
    "srun": (SRUN, "SLURM_STEP_NUM_TASKS=8: srun started 8 tasks"),
    "srun of two tasks": ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "SLURM_STEP_NUM_TASKS=2"),
    "srun, its first task": ({**SRUN, "SLURM_PROCID": "0"}, "SLURM_STEP_NUM_TASKS=8"),
    "srun with PMI2": ({**SRUN, "PMI_SIZE": "8", "PMI_RANK": "3"}, "SLURM_STEP_NUM_TASKS=8"),
    "Open MPI": (OPEN_MPI, "OMPI_COMM_WORLD_SIZE=4: mpirun started 4 tasks"),
    "Open MPI in a batch job": ({**SBATCH, **OPEN_MPI}, "OMPI_COMM_WORLD_SIZE=4"),
    "MVAPICH": ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, "MV2_COMM_WORLD_SIZE=2"),
    "MPICH": ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, "PMI_SIZE=2: mpiexec"),
    "PMIx alone, not its first task": ({"PMIX_RANK": "1"}, "PMIX_RANK=1"),
    "a size without a rank": ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 says that there are several ranks, and RANK is not"),
    "a rank without a size": ({"RANK": "1"}, "RANK=1 says that there are several ranks, and WORLD_SIZE is not"),
}
LET_PASS = {
    "a shell": {},
    "a batch script": SBATCH,
    "a batch script with a rank in vain": {**SBATCH, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967291"},
    "salloc's interactive step": {**SBATCH, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"},
    "srun of one task": {**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "torchrun of one, within srun": {**SRUN, **TORCHRUN},
    "torchrun of one": TORCHRUN,
    "separate models on purpose": {**SRUN, "WORLD_SIZE": "1", "RANK": "0"},
    "mpirun of one": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "an empty variable": {"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "many"},
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which nothing launched this process."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MV2_", "MPI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    return monkeypatch


def started(environ: dict[str, str], alone: pytest.MonkeyPatch) -> tuple[int, int]:
    for name, value in environ.items():
        alone.setenv(name, value)
    return group.open_world("cpu")


@pytest.mark.parametrize("how", REFUSED)
def test_a_task_that_was_not_told_its_rank_is_refused(how: str, alone: pytest.MonkeyPatch) -> None:
    environ, message = REFUSED[how]
    with pytest.raises(fzero.SpecError) as error:
        started(environ, alone)
    assert str(error.value).startswith(message)
    assert "of its own" in str(error.value)


@pytest.mark.parametrize("how", LET_PASS)
def test_who_is_alone_is_not_refused(how: str, alone: pytest.MonkeyPatch) -> None:
    assert started(LET_PASS[how], alone) == (0, 1)


def test_a_rank_within_srun_joins_its_world(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(group, "_start", lambda backend, seconds: None)
    alone.setattr(group, "_here", lambda: (3, 8))
    assert started({**SRUN, "RANK": "3", "WORLD_SIZE": "8"}, alone) == (3, 8)


def test_init_refuses_it(alone: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        alone.setenv(name, value)
    alone.setattr(sys, "argv", ["train.py", "--name", "a b"])
    spec = fzero.Spec(loss=lambda p, b: (p["w"] * b).sum(), optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(fzero.SpecError) as error:
        fzero.init({"w": torch.ones(2)}, spec)
    lines = [text.strip() for text in str(error.value).splitlines()]
    assert lines[1].startswith("srun -n 8 bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS ")
    assert lines[3] == "torchrun --nproc-per-node 8 train.py --name 'a b'"
    assert lines[4] == "To train 8 separate models set WORLD_SIZE=1 RANK=0"


def test_the_line_to_type_gives_a_task_its_place(tmp_path: Path) -> None:
    """As srun would run it for each task, with a `scontrol` that knows two hosts."""
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$3" = "n[1-2]" ] && printf "n1\\nn2\\n"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    slurm = next(one for one in launcher.LAUNCHERS if one.command == "srun")
    shown = "printenv RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT"
    command = launcher.line(slurm, 8, slurm.first_host, shown).removeprefix("srun -n 8 ")
    given = {**SRUN, "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", command], env=given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "8", "1", "n1", "29500"]


@pytest.mark.parametrize(
    ("environ", "started", "host"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "mpirun -n 4", "127.0.0.1"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun -n 4", "FIRST_HOST"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, "mpiexec -n 2", "FIRST_HOST"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}, "mpiexec -n 2", "127.0.0.1"),
        ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun -n 2", "127.0.0.1"),
    ],
)
def test_the_line_starts_as_many_tasks_and_a_shell_takes_it(
    environ: dict[str, str], started: str, host: str, alone: pytest.MonkeyPatch
) -> None:
    alone.setattr(sys, "argv", ["printenv.py"])
    with pytest.raises(fzero.SpecError) as error:
        launcher.check(environ)
    first, line = str(error.value).splitlines()[:2]
    assert ("the first host of the hostfile" in first) == (host == "FIRST_HOST")
    typed = line.strip().replace("exec python printenv.py", "printenv MASTER_ADDR")
    assert typed.startswith(f"{started} bash -c ")
    command = ["sh", "-c", typed.removeprefix(f"{started} ")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == host
