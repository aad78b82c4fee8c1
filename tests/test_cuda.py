"""What fzero does on CUDA alone, on the processor: against a stand-in for the device and for NCCL (`standin`).

`workers/on_standin.py` runs its scenarios in one process and in two, and notes which of CUDA's lines each executes.
The lines (by the rules of `standin/lines.py`) and the scenarios that run them are in golden/cuda_lines.txt; one that no
scenario runs fails here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from standin import lines

pytestmark = [
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="the stand-in needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device: make test-gpu"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter comes for Linux"),
]
WORKER = Path(__file__).parent / "workers" / "on_standin.py"
SHOWN = 2  # scenarios named for a line
NAMES = {int(world): re.findall(rf"@scenario\({world}\)\ndef (\w+)", WORKER.read_text()) for world in "12"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What each world's rank 0 told, and the errors of either rank."""
    found = {}
    for world in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if world > 1 else []
        env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env |= {"PYTHONPATH": os.pathsep.join([*map(str, (WORKER.parents[2], WORKER.parents[1])), *sys.path])}
        env |= {"OMP_NUM_THREADS": "1", "FZERO_STANDIN_RUN": str(tmp_path_factory.mktemp(f"world{world}"))}
        command = [sys.executable, *launch, str(WORKER)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, check=False)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"failed"')]
        assert len(rows) == world, done.stdout[-2000:] + done.stderr[-3000:]
        found[world] = {"failed": {}, "done": set(rows[0]["seconds"]), "ran": {}}
        for row in rows:
            found[world]["failed"] |= row["failed"]
            for key, names in row["ran"].items():
                found[world]["ran"].setdefault(key, set()).update(names)
    return found


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in NAMES.items() for name in names])
def test_on_the_stand_in(told: dict[int, dict[str, Any]], world: int, name: str) -> None:
    assert name not in told[world]["failed"], told[world]["failed"][name]
    assert name in told[world]["done"], f"not reached after {list(told[world]['failed'])}"


def test_every_line_of_cuda_has_run(told: dict[int, dict[str, Any]], golden: Callable[[str, str], None]) -> None:
    order = [name for names in NAMES.values() for name in names]
    shown, missed = [], []
    for line in lines.cuda_lines():
        ran = set().union(*(one["ran"].get(line.key, ()) for one in told.values()))
        names = sorted(ran, key=order.index)
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        shown.append(f"{line.key}\n    {', '.join(names[:SHOWN])}{more}")
        if not names:
            missed.append(line.key)
    assert not missed, "nothing runs\n" + "\n".join(missed)
    golden("cuda_lines", "\n".join(shown))


def test_the_rule_finds_lines() -> None:
    found = {line.key for line in lines.cuda_lines()}
    assert {
        "fzero/checkpoint/save.py _copied: torch.cuda.current_stream(source).synchronize()",
        "fzero/runtime/bound.py Bound.run: self.recording.replay()",
        "fzero/random/_ops.py _raw: philox.derive(rows, keys, None, domain=_BITS)",
        "fzero/profile/record.py _Device.__call__: event = torch.cuda.Event(enable_timing=True)",
    } <= found
    assert not any("_Host" in key for key in found if "clock =" not in key)
