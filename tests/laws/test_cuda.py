"""What fzero does on CUDA alone, on the processor: against a stand-in for the device and for NCCL (`standin`).

`workers/on_standin.py` runs its scenarios in one process and in two, and notes which of CUDA's lines each executes.
The lines (by the rules of `standin/lines.py`) and the scenarios that run them are in golden/cuda_lines.txt; one that no
scenario runs fails here. What is in `LONG` runs in `make acceptance`: no line runs there alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import free_port
from standin import lines

pytestmark = [
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="the stand-in needs a C++ compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="the stand-in needs a torch without CUDA: make test-gpu"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter comes for Linux"),
]
WORKER = Path(__file__).parents[1] / "support" / "workers" / "on_standin.py"
TEXT = WORKER.read_text() + (WORKER.parents[1] / "standin" / "faults.py").read_text()
SHOWN = 2  # scenarios named for a line
LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTORCH_NVML_BASED_CUDA_CHECK")  # DeepSpeed sets the last
LONG = {"a_state_larger_than_the_device", "offloaded_with_moments_of_8_bits", "updates_on_the_host_in_slots_used_again"}
NAMES = {int(world): re.findall(rf"@scenario\({world}\)\ndef (\w+)", TEXT) for world in "12"}
CASES = [(world, name) for world, names in NAMES.items() for name in names if name not in LONG]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """What the ranks of a world told of its scenarios but the long ones, by its size."""
    short = {world: [name for name in names if name not in LONG] for world, names in NAMES.items()}
    return cache(lambda world: _run(world, short[world], tmp_path_factory.mktemp(f"world{world}")))


def _run(world: int, names: list[str], folder: Path) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    env |= {"PYTHONPATH": os.pathsep.join([*map(str, (WORKER.parents[3], WORKER.parents[1])), *sys.path])}
    env |= {"OMP_NUM_THREADS": "1", "FZERO_STANDIN_RUN": str(folder), **lines.keep_lines(folder / "lines.json")}
    env |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if world > 1 else {}
    command = [sys.executable, str(WORKER), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"failed"')]
    assert len(rows) == world, done.stdout[-2000:] + done.stderr[-3000:]
    failed: dict[str, str] = {}
    ran: dict[str, set[str]] = {}
    for row in rows:
        failed |= row["failed"]
        for key, those in row["ran"].items():
            ran.setdefault(key, set()).update(those)
    return {"failed": failed, "done": set(rows[0]["seconds"]), "ran": ran}


@pytest.mark.acceptance
@pytest.mark.parametrize("name", sorted(LONG))
def test_long_ones(name: str, tmp_path: Path) -> None:
    assert _run(1, [name], tmp_path)["failed"] == {}


@pytest.mark.parametrize(("world", "name"), CASES)
def test_on_the_stand_in(told: Callable[[int], dict[str, Any]], world: int, name: str) -> None:
    found = told(world)
    assert name not in found["failed"], found["failed"][name]
    assert name in found["done"], f"not reached after {list(found['failed'])}"


def test_every_line_of_cuda_has_run(told: Callable[[int], dict[str, Any]], golden: Callable[[str, str], None]) -> None:
    order = [name for _, name in CASES]
    shown, missed = [], []
    for line in lines.cuda_lines():
        ran = set().union(*(told(world)["ran"].get(line.key, ()) for world in NAMES))
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
        "fzero/backend.py CudaCalls.finish: torch.cuda.current_stream(device).synchronize()",
        "fzero/runtime/executor.py Executor.run: self.recording.replay()",
        "fzero/random/_draw_ops.py _raw: _kernels().derive(rows, keys, None, domain=_BITS)",
        "fzero/profile/record.py _Device.__call__: event = torch.cuda.Event(enable_timing=True)",
    } <= found
    assert not any("_Host" in key for key in found if "clock =" not in key)
