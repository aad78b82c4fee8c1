"""Every foreign model in children: `python tests/support/foreign/runs.py OUT [SOURCE/NAME...]` writes lines of JSON.

OUT is gone on with where it stopped. What a child died of, or took more than PATIENCE seconds for, is a line too.
"""

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from foreign import sources
from foreign.case import DEVICE, outcome

PATIENCE = 180.0
MEMORY = 4 << 30  # bytes of data of one child


def finished(out: Path) -> dict[str, dict[str, Any]]:
    if not out.exists():
        return {}
    return {line["key"]: line for line in map(json.loads, out.read_text().splitlines())}


def whole(out: Path, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The outcomes of these keys."""
    keys = list(keys)
    while left := [key for key in keys if key not in finished(out)]:
        at = Path(f"{out}.at")
        at.write_text("")
        child = subprocess.Popen([sys.executable, __file__, str(out), "--child", *left])
        while child.poll() is None:
            time.sleep(0.5)
            if time.time() - at.stat().st_mtime > PATIENCE:
                child.kill()
                child.wait()
        if child.returncode:
            if not (key := at.read_text()):
                raise RuntimeError(f"the child ended with {child.returncode} before its first model")
            _note(out, {"key": key, "status": "error", "detail": f"the process ended with {child.returncode}"})
    return {key: line for key, line in finished(out).items() if key in keys}


def _child(out: Path, keys: Sequence[str]) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    torch.use_deterministic_algorithms(DEVICE != "cpu", warn_only=True)
    torch.backends.cudnn.allow_tf32 = False  # three digits
    if DEVICE == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for key in keys:
        Path(f"{out}.at").write_text(key)
        began = time.monotonic()
        found = outcome(sources.case(key))
        _note(out, {"key": key, **found, "seconds": round(time.monotonic() - began, 1)})


def _note(out: Path, line: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("keys", nargs="*")
    given = parser.parse_intermixed_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.child:
        _child(given.out, given.keys)
    else:
        whole(
            given.out,
            given.keys or [key for name in sources.SOURCES if sources.installed(name) for key in sources.keys(name)],
        )
