"""`python -m lab.fuzz`, for both fuzzers: of losses (`lab.fuzz`) and of meshes (`lab.fuzz_meshes`)."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fzero import progress
from lab import commands, fuzz, fuzz_meshes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `python -m lab.fuzz`."""
    parser.add_argument("--count", type=int, default=1000, help="cases (default 1000)")
    parser.add_argument("--start", type=int, default=0, help="the first case's number (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn (default 0)")
    parser.add_argument(
        "--out", type=Path, help="a file of outcomes, one JSON line a case: what it has is not run again"
    )
    parser.add_argument(
        "--commit", default="", help="a text in each line of FILE: lines with another are not counted, and run again"
    )
    parser.add_argument("--jobs", type=int, default=0, help="run in so many processes, with files FILE.0, FILE.1, ...")
    parser.add_argument("--device", default="cpu", help="where eager PyTorch and fzero run: cpu (default) or cuda")
    parser.add_argument("--case", metavar="SEED:NUMBER", help="print this case's script and how it ends, and stop")
    parser.add_argument("--shrink", action="store_true", help="with --case: print the smallest script that fails so")
    parser.add_argument("--meshes", action="store_true", help="random models, trained on random meshes (docs/fuzz.md)")


@progress.quietly()
def command(arguments: argparse.Namespace) -> int:
    """Runs `python -m lab.fuzz` and prints the counts. Returns 1 if a case was wrong or crashed."""
    torch.set_num_threads(1)
    if arguments.device != "cpu":
        torch.set_default_device(arguments.device)
        torch.use_deterministic_algorithms(True, warn_only=True)  # bits are compared
    tool: Any = fuzz_meshes if arguments.meshes else fuzz
    if arguments.case:
        return _one(tool, arguments.case, arguments.shrink)
    numbers = range(arguments.start, arguments.start + arguments.count)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    if arguments.jobs:
        return _many(tool, arguments, numbers)
    report = tool.run(numbers, arguments.seed, arguments.out, arguments.commit)
    print(report)
    return 0 if report.good else 1


def _one(tool: Any, name: str, smaller: bool) -> int:
    seed, number = map(int, name.split(":"))
    case = tool.draw(seed, number)
    outcome = tool.check(case)
    if smaller and outcome.end != "equal":
        case = tool.shrink(case, outcome)
        outcome = tool.check(case)
    print(case.script)
    print(f"# {outcome.end}: {outcome.what}")
    return 0 if outcome.end in ("equal", "refused") else 1


def _many(tool: Any, arguments: argparse.Namespace, numbers: range) -> int:
    """So many processes, each with its part of the cases. One that a signal ended starts again."""
    if arguments.out is None:
        raise ValueError("--jobs needs --out FILE, for the files that the processes write")
    each = -(-len(numbers) // arguments.jobs)
    parts = [numbers[n * each : (n + 1) * each] for n in range(arguments.jobs)]
    files = [Path(f"{arguments.out}.{n}") for n in range(arguments.jobs)]
    base = [sys.executable, "-m", "lab.fuzz", "--seed", str(arguments.seed), "--device", arguments.device]
    base += ["--commit", arguments.commit, *(["--meshes"] if arguments.meshes else [])]
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
    report = tool.read(*files, commit=arguments.commit)
    print(report)
    return 0 if report.good else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's own) and returns the exit status."""
    about = "Run random losses through eager PyTorch and fzero and compare."
    return commands.main("python -m lab.fuzz", about, add_arguments, command, argv)


if __name__ == "__main__":
    sys.exit(main())
