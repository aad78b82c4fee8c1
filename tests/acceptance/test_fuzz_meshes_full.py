"""The fuzzer of meshes at its full count, and a part of it on real ranks. Its file is kept: a run that was cut off goes
on where it ended, at one commit."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import gloo

from fzero.errors import FzeroError
from lab.fuzz.__main__ import main
from lab.fuzz_meshes import Case, check, draw, read, runs
from tests.acceptance.__main__ import commit

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(6 * 3600)]

CASES, REAL = 5_000, 100
FILE = Path(__file__).parents[2] / "runs" / "fuzz_meshes.jsonl"


def test_five_thousand_random_meshes_train_as_one_rank() -> None:
    at = commit() or f"changed {time.time_ns()}"  # changed files: nothing of before counts
    main(["--meshes", "--count", str(CASES), "--jobs", "2", "--out", str(FILE), "--commit", at])
    report = read(*FILE.parent.glob(f"{FILE.name}.[0-9]"), commit=at)
    print(report)
    assert report.failed == []
    assert sum(report.ends.values()) >= CASES
    assert report.ends["equal"] >= 0.7 * CASES


@pytest.mark.parametrize("number", range(REAL))
def test_real_ranks_train_as_one(number: int, folder: Path) -> None:
    """In processes over gloo, on worlds of up to four: `fzero.init` and `fzero.step`."""
    case = next(case for k in range(8) if (case := draw(9, 8 * number + (number + k) % 8)).world <= 4 or k == 7)
    if "nvme_path" in case.place:
        case = replace(case, place={**case.place, "nvme_path": str(folder)})
    outcome = check(case, on_real_ranks)
    assert not outcome.is_fault, (outcome, case)


def on_real_ranks(case: Case) -> runs.Result:
    """The result of rank 0. Raises FzeroError where all ranks refuse the case, and AssertionError for other errors."""
    outcomes = gloo(case.world, runs.trained, case)
    errors = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    if errors and all(error.startswith(("SpecError:", "CaptureError:", "TreeError:")) for error in errors):
        raise FzeroError(errors[0].split("\n\n")[0])
    assert not errors, errors[0]
    result: runs.Result = outcomes[0].value
    return result
