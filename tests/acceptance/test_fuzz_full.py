"""The fuzzer at its full count. Its file is kept: a run that was cut off goes on where it ended, at one commit."""

import time
from pathlib import Path

import pytest

from lab.fuzz.__main__ import main
from lab.fuzz.report import read
from tests.acceptance.__main__ import commit
from tests.lab.test_fuzz import differing_transports

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(6 * 3600)]

CASES = 20_000
FILE = Path(__file__).parents[2] / "runs" / "fuzz.jsonl"


def test_twenty_thousand_random_losses_have_eagers_numbers() -> None:
    at = commit() or f"changed {time.time_ns()}"  # changed files: nothing of before counts
    main(["--count", str(CASES), "--jobs", "2", "--out", str(FILE), "--commit", at])
    report = read(*FILE.parent.glob(f"{FILE.name}.[0-9]"), commit=at)
    print(report)
    assert report.failed == []
    assert sum(report.ends.values()) >= CASES
    assert len(report.aten) >= 120
    assert len(report.modules) >= 60
    assert report.ends["equal"] >= 0.9 * CASES


def test_transports_have_the_executors_bits() -> None:
    assert differing_transports(seed=3, count=200) == []
