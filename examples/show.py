"""What `train_gpt.py` shows while it trains, and its loss curves as a picture."""

import argparse
import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor


@dataclass
class Curves:
    """Loss by step: of the training batches, and of the held-out ones."""

    train: list[float]
    held_out: list[tuple[int, float]]


@contextlib.contextmanager
def progress(args: argparse.Namespace, console: Console, first: int) -> Iterator[Callable[[int, Tensor, float], None]]:
    """A function to call after each step. On a terminal it moves a bar, elsewhere it prints a line now and then."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  held out {task.fields[held_out]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s  {task.fields[memory]:,.0f} MB"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task(
        "training", total=args.steps, completed=first, loss=float("nan"), held_out=float("nan"), speed=0.0, memory=0.0
    )
    every = max(1, args.steps // 10)
    shown, shown_at = first, time.perf_counter()

    def show(step: int, loss: Tensor, held_out: float) -> None:
        nonlocal shown, shown_at
        now = time.perf_counter()
        due = now - shown_at > 0.25 if console.is_terminal else step % every == 0
        if not (due or step == args.steps) or console.quiet:
            return
        speed = (step - shown) * args.batch * args.seq / (now - shown_at)
        shown, shown_at = step, now
        used = process_bytes(args.device) / 1e6
        bar.update(task, completed=step, loss=float(loss), held_out=held_out, speed=speed, memory=used)
        if not console.is_terminal:
            console.print(f"step {step:>5}  loss {float(loss):.3f}  {speed:,.0f} tokens/s  {used:,.0f} MB")

    with bar:
        yield show


def process_bytes(device: str) -> int:
    """What this process uses: the CUDA allocator's bytes, or on the CPU resident memory, libraries included."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: the peak instead, which macOS counts in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def plot(curves: Curves, path: Path, title: str) -> None:
    """The loss curves as a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    window = max(1, len(curves.train) // 50)
    smooth = torch.tensor(curves.train).unfold(0, window, 1).mean(1).tolist()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(curves.train) + 1), curves.train, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(range(window, len(curves.train) + 1), smooth, color="tab:blue", label="training")
    axes.plot(*zip(*curves.held_out, strict=True), "o-", color="tab:orange", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
