"""fuzz: random losses, through eager PyTorch and through fzero.

`draw` makes a case from the tables of `ops` and `modules`: leaves, lines of a loss, options. `oracle` is eager PyTorch;
`runs` lowers the case and runs it, bound and interpreted, every rank in this process. `check` compares: loss and
gradients, or the state after a step, with eager's own error as the measure; bits across stages, schedules and the two
executors. `shrink` makes a failing case small.

    python -m lab.fuzz --count 1000 --seed 0 --out runs/fuzz.jsonl
    python -m lab.fuzz --case 0:17 --shrink
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from lab.fuzz.case import Case
from lab.fuzz.check import Outcome, apart, check, check_together
from lab.fuzz.draw import draw
from lab.fuzz.report import Report, append, line_of, lost, note, read
from lab.fuzz.shrink import shrink

__all__ = ["Case", "Outcome", "Report", "check", "draw", "read", "run", "shrink"]

TOGETHER = 16  # losses in one program


def run(numbers: Iterable[int], seed: int = 0, out: Path | None = None, commit: str = "") -> Report:
    """Checks these cases of a seed and appends the outcomes to `out`; returns the report.

    Cases that the file `out` already has (of this commit, if one is named) are left out. A case that ends the process
    is found when the next run starts:     a file beside `out` holds the last action.
    """
    report = Report() if out is None else read(out, commit=commit)
    with nullcontext() if out is None else out.open("a", encoding="utf-8") as file:
        lines, suspects = ([], set()) if out is None else lost(out, report, commit)
        for line in lines:
            report.add(line)
            append(file, line, commit)
        group: list[Case] = []
        for number in numbers:
            if (name := f"{seed}:{number}") in report.done:
                continue
            note(out, f"drawn {name}", commit)
            case = draw(seed, number)
            if apart(case) or name in suspects:
                _checked([case], report, out, file, commit)
            else:
                group.append(case)
            if len(group) == TOGETHER:
                _checked(group, report, out, file, commit)
                group = []
        _checked(group, report, out, file, commit)
    return report


def _checked(cases: list[Case], report: Report, out: Path | None, file: TextIO | None, commit: str) -> None:
    start = time.process_time()
    note(out, "checked " + " ".join(case.name for case in cases), commit)
    outcomes = check_together(cases) if len(cases) > 1 else [check(case) for case in cases]
    seconds = (time.process_time() - start) / max(len(cases), 1)
    for case, outcome in zip(cases, outcomes, strict=True):
        line = line_of(case, outcome, seconds, report)
        if outcome.end in ("wrong", "crashed"):
            print(f"{case.name} {outcome.end}: {outcome.what[:300]}", file=sys.stderr, flush=True)
        report.add(line)
        append(file, line, commit)
