"""How much of the disk's time an update hides: AdamW with its moments on disk, beside the same in memory and the bytes
alone.

One process. In each round, in turn: a step that is an update and nothing else (the parameters stand for gradients), the
same with the moments on disk, and their bytes alone: tiles of the same size read and written through a file of the same
kind, reads and writes at once. Prints medians, and the ratio of the second to the larger of the other two.

    python -m benchmarks.overlap --folder /local_nvme
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fzero
from benchmarks.contenders import nvme_path
from fzero.disk.direct import aligned
from fzero.disk.disk_file import DiskFile
from fzero.ir.decisions import TILE_BYTES
from fzero.passes.offload.place_moves import IN_FLIGHT

LEAVES = 6


def update(elements: int, offload: dict[str, Any]) -> Callable[[], None]:
    """A step that is the update of so many elements."""
    tx = fzero.optim.adamw(1e-3)

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        updates, opt_state = tx.update(state["params"], state["opt_state"], state["params"])
        return {"params": fzero.optim.apply_updates(state["params"], updates), "opt_state": opt_state}, {}

    params = {f"w{n}": torch.ones(elements // LEAVES) for n in range(LEAVES)}
    state = fzero.init({"params": params, "opt_state": tx.init(params)}, fzero.Spec(step=step, **offload))

    def run() -> None:
        nonlocal state
        state = fzero.step(state, torch.ones(()))

    return run


def bytes_alone(elements: int, folder: str) -> Callable[[], None]:
    """The moments' bytes, read and written in tiles, with as many in flight as a step has."""
    size = 8 * elements // TILE_BYTES * TILE_BYTES
    file = DiskFile(folder, size)
    tiles = [aligned(TILE_BYTES) for _ in range(2 * IN_FLIGHT)]

    def move() -> None:
        reads: list[tuple[int, Any, Any]] = []
        writes: list[Any] = []
        for number, at in enumerate(range(0, size, TILE_BYTES)):
            if len(reads) == IN_FLIGHT:
                write_next(reads, writes)
            tile = tiles[number % len(tiles)]
            reads.append((at, tile, file.read(at, tile)))
        while reads:
            write_next(reads, writes)
        file.wait(*writes)

    def write_next(reads: list[tuple[int, Any, Any]], writes: list[Any]) -> None:
        at, tile, read = reads.pop(0)
        file.wait(read)
        writes.append(file.write(at, tile))
        if len(writes) >= IN_FLIGHT:
            file.wait(writes.pop(0))

    return move


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=nvme_path(), help="on a disk")
    parser.add_argument("--elements", type=int, default=100_000_000, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="overlap", help="the record is benchmarks/results/<OUT>.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    away = {"offload": {"optimizer": "nvme"}, "nvme_path": args.folder}
    runs = {
        "in memory": update(args.elements, {}),
        "on disk": update(args.elements, away),
        "bytes alone": bytes_alone(args.elements, args.folder),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(args.rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if number:  # the first lowers the step, and touches memory
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    ratio = median["on disk"] / max(median["in memory"], median["bytes alone"])
    table = Table("", "s", "rounds", title=f"AdamW of {args.elements / 1e6:.0f}M parameters, moments on {args.folder}")
    for name, taken in seconds.items():
        table.add_row(name, f"{median[name]:.3f}", f"{min(taken):.3f} to {max(taken):.3f}")
    Console().print(table, f"on disk / the larger of the others: {ratio:.2f}")
    record = {"elements": args.elements, "seconds": seconds, "ratio": ratio, "torch": torch.__version__}
    out = Path(__file__).parent / "results" / f"{args.out}.json"
    out.write_text(json.dumps({**record, "cpus": os.cpu_count()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
