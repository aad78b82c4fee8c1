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
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

import torch

from fzero import progress
from fzero.tools.fuzz.case import Case
from fzero.tools.fuzz.check import Outcome, apart, check, check_together
from fzero.tools.fuzz.draw import draw
from fzero.tools.fuzz.report import Report, append, line_of, lost, note, read
from fzero.tools.fuzz.shrink import shrink

__all__ = ["Case", "Outcome", "Report", "check", "draw", "run", "shrink"]

TOGETHER = 16  # losses in one program


def run(numbers: Iterable[int], seed: int = 0, out: Path | None = None) -> Report:
    """Checks these cases of a seed and appends the outcomes to `out`; returns the report.

    Cases that the file `out` already has are left out. A case that ends the process is found when the next run starts:
    a file beside `out` holds the last action.
    """
    report = Report() if out is None else read(out)
    with nullcontext() if out is None else out.open("a", encoding="utf-8") as file:
        lines, suspects = ([], set()) if out is None else lost(out, report)
        for line in lines:
            report.add(line)
            append(file, line)
        group: list[Case] = []
        for number in numbers:
            if (name := f"{seed}:{number}") in report.done:
                continue
            note(out, f"drawn {name}")
            case = draw(seed, number)
            if apart(case) or name in suspects:
                _checked([case], report, out, file)
            else:
                group.append(case)
            if len(group) == TOGETHER:
                _checked(group, report, out, file)
                group = []
        _checked(group, report, out, file)
    return report


def _checked(cases: list[Case], report: Report, out: Path | None, file: TextIO | None) -> None:
    start = time.process_time()
    note(out, "checked " + " ".join(case.name for case in cases))
    outcomes = check_together(cases) if len(cases) > 1 else [check(case) for case in cases]
    seconds = (time.process_time() - start) / max(len(cases), 1)
    for case, outcome in zip(cases, outcomes, strict=True):
        line = line_of(case, outcome, seconds, report)
        if outcome.end in ("wrong", "crashed"):
            print(f"{case.name} {outcome.end}: {outcome.what[:300]}", file=sys.stderr, flush=True)
        report.add(line)
        append(file, line)


# --- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero fuzz`."""
    parser.add_argument("--count", type=int, default=1000, help="cases (default 1000)")
    parser.add_argument("--start", type=int, default=0, help="the first case's number (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn (default 0)")
    parser.add_argument(
        "--out", type=Path, help="a file of outcomes, one JSON line a case: what it has is not run again"
    )
    parser.add_argument("--jobs", type=int, default=0, help="run in so many processes, with files FILE.0, FILE.1, ...")
    parser.add_argument("--device", default="cpu", help="where eager PyTorch and fzero run: cpu (default) or cuda")
    parser.add_argument("--case", metavar="SEED:NUMBER", help="print this case's script and how it ends, and stop")
    parser.add_argument("--shrink", action="store_true", help="with --case: print the smallest script that fails so")


@progress.quietly()
def command(arguments: argparse.Namespace) -> int:
    """Runs `fzero fuzz` and prints the counts. Returns 1 if a case was wrong or crashed."""
    torch.set_num_threads(1)
    if arguments.device != "cpu":
        torch.set_default_device(arguments.device)
        torch.use_deterministic_algorithms(True, warn_only=True)  # bits are compared
    if arguments.case:
        return _one(arguments.case, arguments.shrink)
    numbers = range(arguments.start, arguments.start + arguments.count)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.jobs:
        return _many(arguments, numbers)
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
    """So many processes, each with its part of the cases. One that a signal ended starts again."""
    if arguments.out is None:
        raise ValueError("--jobs needs --out FILE, for the files that the processes write")
    each = -(-len(numbers) // arguments.jobs)
    parts = [numbers[n * each : (n + 1) * each] for n in range(arguments.jobs)]
    files = [Path(f"{arguments.out}.{n}") for n in range(arguments.jobs)]
    base = [sys.executable, "-m", "fzero.cli", "fuzz", "--seed", str(arguments.seed), "--device", arguments.device]
    commands = [
        [*base, "--start", str(part.start), "--count", str(len(part)), "--out", str(file)]
        for part, file in zip(parts, files, strict=True)
    ]
    waiting = {n: subprocess.Popen(words, stdout=subprocess.DEVNULL) for n, words in enumerate(commands)}
    while waiting:
        for n, process in list(waiting.items()):
            if process.wait() < 0:
                waiting[n] = subprocess.Popen(commands[n], stdout=subprocess.DEVNULL)
            else:
                del waiting[n]
    report = read(*files)
    print(report)
    return 0 if report.good else 1
