"""fuzz: random losses, through eager PyTorch and through fzero.

`draw` makes a case from the tables of `ops` and `modules`: leaves, lines of a loss, options. `oracle` is eager PyTorch;
`runs` lowers the case and runs it, bound and interpreted, every rank in this process. `check` compares: loss and
gradients, or the state after a step, with eager's own error as the measure; bits across stages, schedules and the two
executors. `shrink` makes a failing case small.

    fzero fuzz --count 1000 --seed 0 --out runs/fuzz.jsonl
    fzero fuzz --case 0:17 --shrink
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch

from fzero.fuzz.case import Case
from fzero.fuzz.check import Outcome, check
from fzero.fuzz.draw import draw
from fzero.fuzz.report import Report, append, line_of, read
from fzero.fuzz.shrink import shrink

__all__ = ["Case", "Outcome", "Report", "check", "draw", "run", "shrink"]


def run(numbers: Iterable[int], seed: int = 0, out: Path | None = None) -> Report:
    """Checks these cases of a seed, but those that the file `out` has, to which it appends. What it adds up to."""
    report = Report() if out is None else read(out)
    with nullcontext() if out is None else out.open("a", encoding="utf-8") as file:
        for number in numbers:
            if f"{seed}:{number}" in report.done:
                continue
            start = time.process_time()
            case = draw(seed, number)
            line = line_of(case, outcome := check(case), time.process_time() - start, report)
            if outcome.end in ("wrong", "crashed"):
                print(f"{case.name} {outcome.end}: {outcome.what[:300]}", file=sys.stderr, flush=True)
            report.add(line)
            if file is not None:
                append(file, line)
            if number % 50 == 0:
                gc.collect()
    return report


# --- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=1000, help="cases (default 1000)")
    parser.add_argument("--start", type=int, default=0, help="the first case's number (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn (default 0)")
    parser.add_argument(
        "--out", type=Path, help="a file of outcomes, one JSON line a case: what it has is not run again"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, with files FILE.0, FILE.1, ... (default 1)")
    parser.add_argument("--case", metavar="SEED:NUMBER", help="print this case's script and how it ends, and stop")
    parser.add_argument("--shrink", action="store_true", help="with --case: print the smallest script that fails so")


def command(arguments: argparse.Namespace) -> int:
    """Prints what was counted; 1 where a case was wrong or crashed."""
    torch.set_num_threads(1)
    if arguments.case:
        return _one(arguments.case, arguments.shrink)
    numbers = range(arguments.start, arguments.start + arguments.count)
    if arguments.jobs > 1:
        return _many(arguments, numbers)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report = run(numbers, arguments.seed, arguments.out)
    print(report)
    return 0 if report.good else 1


def _one(name: str, smaller: bool) -> int:
    seed, number = map(int, name.split(":"))
    case = draw(seed, number)
    outcome = check(case)
    if smaller and outcome.end != "equal":
        case = shrink(case, outcome)
        outcome = check(case)
    print(case.script)
    print(f"# {outcome.end}: {outcome.what}")
    return 1 if outcome.end in ("wrong", "crashed") else 0


def _many(arguments: argparse.Namespace, numbers: range) -> int:
    """One process for every job-th case."""
    if arguments.out is None:
        raise ValueError("--jobs needs --out FILE, for the files that the processes write")
    each = -(-len(numbers) // arguments.jobs)
    own = [numbers[n * each : (n + 1) * each] for n in range(arguments.jobs)]
    command = [sys.executable, "-m", "fzero.cli", "fuzz", "--seed", str(arguments.seed)]
    processes = [
        subprocess.Popen(
            [*command, "--start", str(part.start), "--count", str(len(part)), "--out", f"{arguments.out}.{n}"]
        )
        for n, part in enumerate(own)
        if part
    ]
    return max(process.wait() for process in processes)
