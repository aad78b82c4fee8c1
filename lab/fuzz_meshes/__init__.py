"""fuzz_meshes: random models on random meshes, through plain PyTorch on one process and through fzero.

`draw` makes a case: a model (`model`, `layers`), what is computed (`case.Recipe`), and a mesh with rules, stages, a
schedule, homes. `oracle` trains it in plain PyTorch. `runs` lowers, verifies and interprets it, all ranks in this
process. `check` compares, follows the remedy of a refusal (`refusals`), and classifies the end.

    python -m lab.fuzz --meshes --count 1000 --seed 0 --out runs/fuzz_meshes.jsonl
    python -m lab.fuzz --meshes --case 0:17 --shrink
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from lab.fuzz.report import append, lost, note
from lab.fuzz_meshes.case import Case
from lab.fuzz_meshes.check import Outcome, check
from lab.fuzz_meshes.draw import draw
from lab.fuzz_meshes.report import Report, line_of, read
from lab.fuzz_meshes.shrink import shrink

__all__ = ["Case", "Outcome", "Report", "check", "draw", "read", "run", "shrink"]


def run(numbers: Iterable[int], seed: int = 0, out: Path | None = None, commit: str = "") -> Report:
    """Checks these cases of a seed and appends the outcomes to `out`, which is gone on with (its lines of this commit,
    if one is named); returns the report."""
    report = Report() if out is None else read(out, commit=commit)
    with nullcontext() if out is None else out.open("a", encoding="utf-8") as file:
        for line in [] if out is None else lost(out, report, commit)[0]:
            report.add(line)
            append(file, line, commit)
        for number in numbers:
            if (name := f"{seed}:{number}") in report.done:
                continue
            note(out, f"checked {name}", commit)
            start = time.process_time()
            case = draw(seed, number)
            outcome = check(case)
            line = line_of(case, outcome, time.process_time() - start)
            if outcome.is_fault:
                print(f"{case.name} {outcome.end}: {outcome.what[:300]}", file=sys.stderr, flush=True)
            report.add(line)
            append(file, line, commit)
    return report
