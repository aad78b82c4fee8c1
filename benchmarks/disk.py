"""The disk lane of a rank beside fio and beside DeepSpeed's aio op: GB/s, and seconds of CPU for a GB.

Each writes and reads the same number of bytes on the same disk, past the page cache: all of it written, all of it read,
and half of it read while the other half is written. Files are full before anything is timed. A round runs every
contender in turn; the next round starts one contender later; figures are medians of rounds. fio runs in its own process
and times itself. The others work in this process: fzero on page-aligned memory, DeepSpeed on memory that it has locked
itself, for it copies what lies elsewhere.

`fzero` compares a checksum of what it reads; `fzero-plain` does not. fio is left out where it is not installed (`--fio`
names its program), DeepSpeed where it is not, or cannot compile its op (libaio's headers, a C++ compiler, ninja).

    python -m benchmarks.disk --folder /local_nvme
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.run import write
from fzero.disk import DiskFile, aligned
from fzero.disk.blocks import BLOCK

GB = 1e9
KINDS = ("write", "read", "mixed")
Ranges = Sequence[tuple[str, int, int]]  # (direction, first byte, bytes)
Contender = Callable[[Ranges], tuple[float, float]]  # → (seconds, seconds of CPU)

FIO = {  # name → arguments of each job; how many jobs share a direction
    "fio psync x 4": (["--ioengine=psync", "--bs=8m"], 4),
    "fio libaio 16": (["--ioengine=libaio", "--iodepth=16", "--bs=8m"], 1),
    "fio libaio 64 x 1m": (["--ioengine=libaio", "--iodepth=64", "--bs=1m"], 1),
    "fio io_uring 16": (["--ioengine=io_uring", "--iodepth=16", "--bs=8m"], 1),
}
AIO = {  # name → block size, queue depth, single_submit, overlap_events, intra_op_parallelism
    "deepspeed default": (1 << 20, 8, False, True, 1),
    "deepspeed 1m 32 x 4": (1 << 20, 32, False, True, 4),
    "deepspeed 8m 32 x 2": (8 << 20, 32, False, True, 2),
    "deepspeed 8m 32 x 4": (8 << 20, 32, False, True, 4),
}


def ranges_of(kind: str, nbytes: int) -> Ranges:
    """
    >>> ranges_of("mixed", 10)
    [('read', 0, 5), ('write', 5, 5)]
    """
    half = nbytes // 2
    return [("read", 0, half), ("write", half, half)] if kind == "mixed" else [(kind, 0, nbytes)]


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """(seconds, seconds of CPU of all threads of this process) that `work` takes."""
    cpu, began = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def of_fzero(file: DiskFile, memory: torch.Tensor, tile: int) -> Contender:
    """Transfers of a tile each, as a program starts them."""

    def work(ranges: Ranges) -> None:
        running = []
        for direction, start, nbytes in ranges:
            begin = file.read if direction == "read" else file.write
            for at in range(start, start + nbytes, tile):
                running.append(begin(at, memory[at : min(at + tile, start + nbytes)]))
        for transfer in wait(running).done:
            transfer.result()

    return lambda ranges: timed(lambda: work(ranges))


def of_fio(program: str, arguments: list[str], jobs: int, path: Path) -> Contender:
    """fio's own times: all bytes over the time of its slowest job, and the CPU of its jobs."""

    def run(ranges: Ranges) -> tuple[float, float]:
        words = [program, "--output-format=json", "--thread", "--direct=1", "--fallocate=none", "--overwrite=1"]
        words += [f"--filename={path}", *arguments]
        for direction, start, nbytes in ranges:
            part = nbytes // jobs // BLOCK * BLOCK
            for job in range(jobs):
                size = part if job < jobs - 1 else nbytes - part * (jobs - 1)
                words += [f"--name={direction}{job}", f"--rw={direction}", f"--size={size}", f"--io_size={size}"]
                words += [f"--offset={start + part * job}"]
        out = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        moved = sum(job[d]["io_bytes"] for job in out["jobs"] for d in ("read", "write"))
        assert moved == sum(nbytes for _, _, nbytes in ranges), f"fio moved {moved} bytes"
        times = [(job["job_runtime"] / 1e3, (job["usr_cpu"] + job["sys_cpu"]) / 100) for job in out["jobs"]]
        return max(seconds for seconds, _ in times), sum(seconds * share for seconds, share in times)

    return run


def of_deepspeed(path: Path, nbytes: int) -> dict[str, Contender]:
    """Its op with several settings, on one buffer."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    library = AsyncIOBuilder().load(verbose=False)
    owner = library.aio_handle(*AIO["deepspeed default"])
    memory = owner.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)).random_(0, 256)
    return {name: _of_handles(library, owner, settings, path, memory) for name, settings in AIO.items()}


def _of_handles(library: Any, owner: Any, settings: Sequence[int], path: Path, memory: torch.Tensor) -> Contender:
    """One handle for each direction, as its swapper has. `owner` keeps the memory locked."""
    handles = {direction: library.aio_handle(*settings) for direction in ("read", "write")}

    def work(ranges: Ranges) -> None:
        for direction, start, nbytes in ranges:
            handle = handles[direction]
            begin = handle.async_pread if direction == "read" else handle.async_pwrite
            begin(memory[start : start + nbytes], str(path), start)
        for direction, _, _ in ranges:
            assert handles[direction].wait() == 1, owner

    return lambda ranges: timed(lambda: work(ranges))


def contenders(folder: Path, nbytes: int, memory: torch.Tensor, fio: str, tile: int) -> dict[str, Contender]:
    """Those that this machine has, each with a file that is full."""
    rows: dict[str, Contender] = {}
    for name, options in (("fzero", {}), ("fzero 2 threads", {"threads": 2}), ("fzero-plain", {"checksums": False})):
        rows[name] = of_fzero(DiskFile(folder, nbytes, **options), memory, tile)
        rows[name](ranges_of("write", nbytes))
    path = folder / "others"
    path.write_bytes(bytes(memory.numpy()))
    os.sync()
    if shutil.which(fio):
        rows |= {name: of_fio(fio, words, jobs, path) for name, (words, jobs) in FIO.items()}
    try:
        rows |= of_deepspeed(path, nbytes)
    except Exception as error:  # not installed, or its op does not compile here
        Console().print(f"without DeepSpeed: {type(error).__name__}: {error}".partition("\n")[0])
    return rows


def measure(folder: Path, nbytes: int, rounds: int, fio: str, tile: int) -> dict[str, Any]:
    """kind → contender → the GB/s and the CPU seconds a GB of every round."""
    memory = aligned(nbytes).random_(0, 256)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fzero-bench-") as inside:
        rows = contenders(Path(inside), nbytes, memory, fio, tile)
        times: dict[str, Any] = {kind: {name: {"gb_per_s": [], "cpu_s_per_gb": []} for name in rows} for kind in KINDS}
        names = list(rows)
        for n in range(rounds):
            for name in names[n % len(names) :] + names[: n % len(names)]:
                for kind in KINDS:
                    seconds, cpu = rows[name](ranges_of(kind, nbytes))
                    times[kind][name]["gb_per_s"].append(nbytes / GB / seconds)
                    times[kind][name]["cpu_s_per_gb"].append(cpu / (nbytes / GB))
    return times


def shares(times: dict[str, Any]) -> dict[str, dict[str, float]]:
    """kind → the lane's median rate over that of the best setting of fio, and of DeepSpeed.

    >>> row = lambda *rates: {"gb_per_s": rates}
    >>> shares({"read": {"fzero": row(2.0, 4.0, 3.0), "fio a": row(1.0), "fio b": row(2.0)}})
    {'read': {'fio': 1.5}}
    """
    found: dict[str, dict[str, float]] = {}
    for kind, rows in times.items():
        middle = {name: median(row["gb_per_s"]) for name, row in rows.items()}
        for other in ("fio", "deepspeed"):
            if best := [rate for name, rate in middle.items() if name.startswith(other)]:
                found.setdefault(kind, {})[other] = middle["fzero"] / max(best)
    return found


def show(times: dict[str, Any]) -> None:
    table = Table("", *[f"{kind}: GB/s (least to most), CPU s/GB" for kind in KINDS])
    for name in times["read"]:
        cells = []
        for kind in KINDS:
            rates, cpu = times[kind][name]["gb_per_s"], times[kind][name]["cpu_s_per_gb"]
            cells.append(f"{median(rates):5.2f} ({min(rates):.2f} to {max(rates):.2f}), {median(cpu):.3f}")
        table.add_row(name, *cells)
    console = Console()
    console.print(table)
    for kind, others in shares(times).items():
        told = ", ".join(f"{share:.2f} of the best of {other}" for other, share in others.items())
        console.print(f"{kind}: {told} (wanted: 0.95)")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="whose disk is used (default: this directory)")
    parser.add_argument("--megabytes", type=int, default=1024, help="written and read by each contender in a round")
    parser.add_argument("--tile-megabytes", type=int, default=32, help="of one transfer of fzero")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fio", default="fio", help="its program")
    parser.add_argument("--out", default="disk", help="the record is benchmarks/results/<OUT>.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    nbytes = args.megabytes << 20
    times = measure(args.folder.resolve(), nbytes, args.rounds, args.fio, args.tile_megabytes << 20)
    show(times)
    record = {"machine": machine.describe(), "bytes": nbytes, "tile_bytes": args.tile_megabytes << 20, "times": times}
    write(args.out, {**record, "shares": shares(times)})


if __name__ == "__main__":
    main()
