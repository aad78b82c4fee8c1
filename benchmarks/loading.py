"""How fast a checkpoint is loaded, beside plain copies of the same bytes.

One rank; fp32 matrices of 1,024 x 1,024, as many vectors, and AdamW's two moments; the file in the page cache. The
copies neither hash nor check anything. Medians of `--rounds` rounds, in which the candidates take turns.

    python -m benchmarks.loading --matrices 36        # 453 MB
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fzero

BUFFER = 4 << 20
SHAPES = {"w": (1024, 1024), "b": (1024,)}


def loss(params: dict[str, list[torch.Tensor]], batch: torch.Tensor) -> torch.Tensor:
    return sum((x.square().sum() for x in params["w"]), start=batch.sum())


def copied(source: Path, target: Path) -> None:
    """A file to a file, nothing synced."""
    with open(source, "rb", buffering=0) as read, open(target, "wb", buffering=0) as write:
        buffer = memoryview(bytearray(BUFFER))
        while count := read.readinto(buffer):
            write.write(buffer[:count])


def read(source: Path, memory: torch.Tensor) -> torch.Tensor:
    """A file to memory, which is returned."""
    view = memoryview(memory.numpy())  # type: ignore[arg-type]
    with open(source, "rb", buffering=0) as file:
        for start in range(0, len(view), BUFFER):
            file.readinto(view[start : start + BUFFER])
    return memory


def main(matrices: int, rounds: int, directory: str | None) -> None:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3))
    params = {name: [torch.randn(*shape) for _ in range(matrices)] for name, shape in SHAPES.items()}
    states = [fzero.init(params, spec)]
    with tempfile.TemporaryDirectory(dir=directory) as run:
        shard = fzero.save(states[0], run) / "shard-00000.safetensors"
        size, copy = shard.stat().st_size, Path(run) / "copy"
        fresh: list[object] = []
        held = torch.zeros(size, dtype=torch.uint8)

        def over() -> None:
            states[0] = fzero.load(run, like=states[0])

        rows: dict[str, Callable[[], object]] = {
            "plain: file to a new file": lambda: copied(shard, copy),
            "plain: file to new memory": lambda: fresh.append(read(shard, torch.empty(size, dtype=torch.uint8))),
            "plain: file to memory in use": lambda: read(shard, held),
            "load(dir, like=state)": over,
            "load(dir, spec)": lambda: fresh.append(fzero.load(run, spec)),
            "init(params, spec)": lambda: fresh.append(fzero.init(params, spec)),
        }
        times: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(rounds):
            for name, row in rows.items():
                copy.unlink(missing_ok=True)
                begun = time.perf_counter()
                row()
                times[name].append(time.perf_counter() - begun)
                fresh.clear()
        for name, found in times.items():
            middle = statistics.median(found)
            print(f"{name:30} {middle:6.3f} s  {size / middle / 1e9:5.2f} GB/s  ({min(found):.3f} to {max(found):.3f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrices", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", help="where the checkpoint lies; default: the temporary directory")
    main(**vars(parser.parse_args()))
