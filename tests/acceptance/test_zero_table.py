"""ZeRO's own table from lowered programs: a 7.5B-parameter GPT with AdamW at 64 ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.acceptance
def test_the_table_of_the_paper() -> None:
    began = time.perf_counter()
    command = [sys.executable, str(EXAMPLES / "zero_table.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    seconds = time.perf_counter() - began
    print(done.stdout)
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1] in "0123" and "B " in line]
    assert [row[1] for row in rows] == ["7.50B"] * 4
    assert [f"{float(row[2]):.3g}" for row in rows] == ["120", "31.4", "16.6", "1.88"], "the paper: 120 31.4 16.6 1.9"
    between = [float(row[4]) for row in rows]
    assert between[0] == pytest.approx(14 * 7.5, rel=0.01), "masters, moments and their bf16 copy"
    assert between[3] == pytest.approx(14 * 7.5 / 64, rel=0.01), "all of them sharded"
    assert seconds < 600, "a hang"
