"""What a save takes beside a plain copy of the same bytes: `python -m benchmarks.checkpoint [--mb 500] [--dir DIR]`, or
under torchrun.

In turn, `--rounds` times each, all ranks at one time and every file new: the ranks' bytes written from memory in blocks
of 4 MiB, without a sync and with one at the end (the plain copy); the same with SHA-256 of every block in between; a
save; a snapshot; a snapshot in memory that is there; reading back what was saved, dropped from the cache, and hashing
it. Prints the median and the best of each, and the ratio of copy to save.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import fzero
from fzero.checkpoint import snapshot

BLOCK = 4 << 20


def copy(data: memoryview, path: Path, *, sync: bool, hashed: bool = False) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for at in range(0, len(data), BLOCK):
        if hashed:
            hashlib.sha256(data[at : at + BLOCK]).digest()
        os.write(fd, data[at : at + BLOCK])
    if sync:
        os.fsync(fd)
    os.close(fd)


def read_back(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    while block := os.read(fd, BLOCK):
        hashlib.sha256(block).digest()
    os.close(fd)


def timed(call: Callable[[], object]) -> float:
    """Seconds until every rank is done."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    call()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmark-checkpoint"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    elements = given.mb * 10**6 // 12  # a parameter and two moments in fp32
    params = {f"w{i}": torch.full((elements // 10,), float(i)) for i in range(10)}
    spec = fzero.Spec(
        loss=lambda p, b: sum(x.sum() for x in p.values()) * b.sum(), optimizer=fzero.optim.adamw(1e-3), device="cpu"
    )
    state = fzero.init(params, spec)
    rank, world = state.runtime.rank, state.runtime.world_size
    for i in range(10):  # bytes that do not repeat
        state.params[f"w{i}"].local.normal_()
    taken = snapshot(state)
    data = taken.block.numpy().data
    found: dict[str, list[float]] = {}

    def note(name: str, call: Callable[[], object]) -> None:
        timed(os.sync)
        found.setdefault(name, []).append(timed(call))

    for number in range(given.rounds):
        if rank == 0:
            shutil.rmtree(given.dir, ignore_errors=True)
            given.dir.mkdir(parents=True)
        timed(lambda: None)
        writes: dict[str, Callable[[], object]] = {
            "copy": lambda: copy(data, given.dir / f"a{rank}", sync=True),
            "save": lambda: fzero.save(state, given.dir / "run"),
            "copy, no sync": lambda: copy(data, given.dir / f"b{rank}", sync=False),
            "copy, hashed": lambda: copy(data, given.dir / f"c{rank}", sync=True, hashed=True),
        }
        for name in [*writes][number % 4 :] + [*writes][: number % 4]:  # none is always the first
            note(name, writes[name])
        shard = given.dir / "run" / "step-00000000" / f"shard-{rank:05d}.safetensors"
        note("read back", lambda shard=shard: read_back(shard))  # type: ignore[misc]
        note("snapshot", lambda: snapshot(state))
        note("snapshot, memory reused", lambda: snapshot(state, reuse=taken))
    if rank == 0:
        total = world * len(data)
        for name, seconds in found.items():
            best, middle = min(seconds), statistics.median(seconds)
            print(f"{name:24} median {middle:.3f} s  best {best:.3f} s  {total / middle / 1e9:.2f} GB/s")
        ratios = [a / b for a, b in zip(found["copy"], found["save"], strict=True)]
        print(f"{total / 1e6:.0f} MB, {world} ranks: copy/save median {statistics.median(ratios):.2f}")
        shutil.rmtree(given.dir, ignore_errors=True)


if __name__ == "__main__":
    main()
