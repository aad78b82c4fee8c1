"""What saving in the background costs the demo: windows of 10 steps in which a save runs and windows without, in turns.

    python -m benchmarks.saving [--saves 8] [--foreground]

The demo's model, batch and optimizer on two local ranks, zero=3; steps and the copy that begins the save are timed, and
a save that outlasts its window ends before the next. Prints what each save cost, the median as a share of 50 steps (the
demo saves every 50), and how long the call took that begins a save.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import fzero
import ranks
from gpt import init_gpt, loss_fn, sizes

WINDOW, EVERY = 10, 50  # steps
BATCH, SEQUENCE = 24, 128


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--foreground", action="store_true", help="write in the loop, for comparison")
    args = parser.parse_args()
    if ranks.here() is None:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.saving", *sys.argv[1:], "--out", folder]
            return ranks.launch(command, 2, Path(folder))
    measure(args.saves, args.foreground, args.out / "checkpoints")
    torch.distributed.destroy_process_group()
    return 0


def measure(saves: int, foreground: bool, folder: Path) -> None:
    config = sizes(SEQUENCE)["small"]
    spec = fzero.Spec(loss=loss_fn, optimizer=fzero.optim.adamw(1e-3), zero=3, clip_norm=1.0)
    state = fzero.init(lambda key: init_gpt(key, config), spec)
    text = torch.randint(0, 256, (1 << 20,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    batches = fzero.data.Tokens(text, sequence=SEQUENCE).batches(BATCH)
    copies = []

    def window(saver: fzero.Checkpointer | None) -> float:
        """Seconds of WINDOW steps; with `saver` a save begins after the first."""
        nonlocal state
        start = time.perf_counter()
        for i in range(WINDOW):
            state = fzero.step(state, next(batches))
            if saver is not None and i == 0:
                called = time.perf_counter()
                saver.after(state, {"position": batches.position})
                copies.append(time.perf_counter() - called)
        return time.perf_counter() - start

    without, with_save = [], []
    with fzero.Checkpointer(folder, every=1, keep=2, background=not foreground) as saver:
        for _ in range(1 + saves):
            without.append(window(None))
            with_save.append(window(saver))
            saver.close()
    for found in (without, with_save, copies):
        del found[0]  # the first step traces, the first save makes its memory and its group
    if state.runtime.rank == 0:
        plain = statistics.median(without)
        cost = [seconds - plain for seconds in with_save]
        share = statistics.median(cost) / (plain / WINDOW * EVERY)
        print(f"a step takes {1e3 * plain / WINDOW:.1f} ms (windows {[round(x, 3) for x in without]} s)")
        print(f"a save costs {[round(1e3 * x) for x in cost]} ms, median {1e3 * statistics.median(cost):.0f} ms")
        print(f"of which the call that begins it: median {1e3 * statistics.median(copies):.1f} ms")
        print(f"one save every {EVERY} steps: {share:+.2%}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
