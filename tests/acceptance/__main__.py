"""Runs the long checks file by file, and keeps what each came to: a run that was cut goes on (`make acceptance`).

Each file of tests runs in a process of its own, which takes what it held with it when it ends. `runs/acceptance.jsonl`
has a JSON line for each: its commit, seconds, those of a core (`cpu`) and counts. A file that passed at this commit is
not run again, as long as nothing was changed since; its output lies in `runs/acceptance/`.

    python -m tests.acceptance --jobs 2
    python -m tests.acceptance --part 3/10    # one of ten parts of each file's, drawn by the names of tests
    python -m tests.acceptance tests/acceptance/test_opdb_full.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "runs" / "acceptance.jsonl"
LOGS = ROOT / "runs" / "acceptance"
NONE_RAN = 5  # the exit code of pytest: the file has none of this part
COUNTS = ("tests", "failures", "errors", "skipped")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make acceptance")
    parser.add_argument("files", nargs="*", help="of tests (default: all that have long checks)")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time (default 1)")
    parser.add_argument("--part", default="1/1", help="one of so many parts of each file, as 3/10 (default: all)")
    given = parser.parse_args()
    at = commit()
    here = {"commit": at, "part": given.part}
    done = {line["file"] for line in kept() if at and here.items() <= line.items() and passed(line)}
    files = given.files or long_files()
    todo = [file for file in files if file not in done]
    print(f"{len(files)} files with long checks, of which {len(files) - len(todo)} passed at this commit", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        lines = list(pool.map(lambda file: checked(file, here), todo))
    print(summary(lines))
    return int(not all(map(passed, lines)))


def commit() -> str:
    """The commit, or "" where files were changed since: nothing counts as done then."""
    changed = _run("git", "status", "--porcelain", "--untracked-files=no")
    return "" if changed.returncode or changed.stdout else _run("git", "rev-parse", "HEAD").stdout.strip()


def kept() -> list[dict[str, Any]]:
    """The lines of earlier runs; the last may have been cut."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def long_files() -> list[str]:
    """Files with a long check, those with the most first."""
    found = _run(sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "acceptance")
    names = [line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line]
    return sorted(set(names), key=lambda name: (-names.count(name), name))


def checked(file: str, at: Mapping[str, str]) -> dict[str, Any]:
    """Runs a file's long checks and keeps the line of their end. at: the commit, and which part of the checks."""
    name = file.replace("/", "_")
    report, start = LOGS / f"{name}.xml", time.monotonic()
    report.unlink(missing_ok=True)
    with open(LOGS / f"{name}.log", "w") as log:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "acceptance",
            "--part",
            at["part"],
            f"--junitxml={report}",
            file,
        ]
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(child.pid, 0)  # and what its children used
        code = child.returncode = os.waitstatus_to_exitcode(status)
    suite = next(ET.parse(report).iter("testsuite")).attrib if report.exists() else {}
    code = 0 if code == NONE_RAN else code
    line = {"file": file, **at, "code": code, "seconds": round(time.monotonic() - start)}
    line |= {"cpu": round(used.ru_utime + used.ru_stime)}
    line |= {key: int(suite.get(key, 0)) for key in COUNTS}
    with open(KEPT, "a") as lines:
        lines.write(json.dumps(line) + "\n")
    print(told(line), flush=True)
    return line


def passed(line: dict[str, Any]) -> bool:
    return line["code"] == 0


def told(line: dict[str, Any]) -> str:
    """One file's end for a reader."""
    bad = line["failures"] + line["errors"]
    end = "passed" if passed(line) else f"{bad} failed" if bad else f"ended with code {line['code']}"
    return f"{line['seconds']:6} s  {line['tests']:5} tests  {line['file']}: {end}"


def summary(lines: Sequence[dict[str, Any]]) -> str:
    tests, skipped, seconds = (sum(line[key] for line in lines) for key in ("tests", "skipped", "cpu"))
    bad = [line["file"] for line in lines if not passed(line)]
    text = f"{tests} tests in {len(lines)} files, {skipped} skipped, {seconds / 60:.0f} minutes of a core"
    return f"{text}; failed: {', '.join(bad)}" if bad else f"{text}; all passed"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
