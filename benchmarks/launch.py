"""Starts the ranks of one contender as fresh processes and collects their records."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.link import Link, free_port
from benchmarks.machine import ROOT

LARGE = "100000000000"
MALLOC = {
    "default": {},
    "keep": {"MALLOC_MMAP_THRESHOLD_": LARGE, "MALLOC_TRIM_THRESHOLD_": LARGE},  # freed memory stays the process's
}
CACHE = ROOT / "benchmarks" / ".cache"  # compiled code, kept between processes
LOG_LINES = 12


class RunError(RuntimeError):
    """A contender did not finish; the message ends with what its rank said last."""


@dataclass(frozen=True)
class Job:
    """One contender's processes: `warmup` untimed steps and `steps` timed ones, and with `memory` one more.

    `world` is the number of processes where it is not the contender's own; `cache` is where compiled code is kept."""

    contender: str
    size: str
    dtype: str
    malloc: str
    warmup: int
    steps: int
    memory: bool = False
    world: int | None = None
    cache: Path = CACHE

    @property
    def num_ranks(self) -> int:
        return self.world or CONTENDERS[self.contender].world


def environment(job: Job, link: Link, rank: int, port: int) -> dict[str, str]:
    """What every process gets, whoever it is: one thread, the same malloc, the same wire."""
    return variables_of(job.num_ranks, link, rank, port, job.malloc, job.cache)


def variables_of(
    num_ranks: int, link: Link, rank: int, port: int, malloc: str = "default", cache: Path = CACHE
) -> dict[str, str]:
    """The environment of a rank, by the size of its world."""
    world = str(num_ranks)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCH_EXTENSIONS_DIR": str(CACHE / "extensions"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]),
        **MALLOC[malloc],
        **link.variables[rank],
        **ranks,
        "MASTER_PORT": str(port),
    }


def _busy_s() -> tuple[float, float]:
    """(CPU seconds that all processes of the machine have used, those that our ended processes have used)."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = ticks  # interrupts are our own network's, mostly
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
    return whole, ours.ru_utime + ours.ru_stime


def run(job: Job, link: Link, timeout_s: float) -> list[dict[str, Any]]:
    """The record of each rank, with the cores that others (and the host) took meanwhile. Raises RunError where one
    failed or the time was up."""
    return beside_others(lambda: _run(job, link, timeout_s))


def beside_others(run: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The records that `run` returns, with the cores that others took meanwhile."""
    began, (busy, ours) = time.monotonic(), _busy_s()
    records = run()
    busy_after, ours_after = _busy_s()
    others = (busy_after - busy) - (ours_after - ours)
    return [record | {"others_cores": max(0.0, others / (time.monotonic() - began))} for record in records]


def _run(job: Job, link: Link, timeout_s: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.worker", "--contender", job.contender, "--size", job.size]
    command += ["--dtype", job.dtype, "--warmup", str(job.warmup), "--steps", str(job.steps)]
    command += ["--memory"] if job.memory else []
    port = free_port()
    environments = [environment(job, link, rank, port) for rank in range(job.num_ranks)]
    return run_ranks(job.contender, command, environments, link, timeout_s)


def run_ranks(
    name: str, command: Sequence[str], environments: Sequence[dict[str, str]], link: Link, timeout_s: float
) -> list[dict[str, Any]]:
    """Starts a process for each environment, with `--out FOLDER` after the command. Returns what each wrote to
    rankN.json there. Raises RunError where one failed or the time was up."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        ranks = []
        for rank, variables in enumerate(environments):
            with (out / f"log{rank}.txt").open("w") as log:
                ranks.append(
                    subprocess.Popen(
                        [*link.prefixes[rank], *command, "--out", folder],
                        cwd=ROOT,
                        env=variables,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # so that a rank that hangs takes its compile workers along
                    )
                )
        try:
            failed = _wait(ranks, timeout_s)
        finally:
            _kill(ranks)
        if failed is not None:
            rank, how = failed
            lines = (out / f"log{rank}.txt").read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise RunError("\n".join([f"{name}: rank {rank} {how}", *lines]))
        return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(len(environments))]


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> tuple[int, str] | None:
    """None once all ended well; else the first rank that did not, and how."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in ranks]
        bad = next(((rank, status) for rank, status in enumerate(statuses) if status), None)
        if bad is not None:
            return bad[0], f"ended with exit status {bad[1]}"
        if None not in statuses:
            return None
        time.sleep(0.05)
    return 0, f"was not done after {timeout_s:.0f} s"


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
