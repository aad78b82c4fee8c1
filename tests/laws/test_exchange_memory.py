"""Imports and exports hold few of the largest tensors."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, values
from safetensors.torch import save_file

import fzero
from fzero.interop import (
    export_dcp,
    export_safetensors,
    safetensors,
    write_checkpoint,
)

MIB = 1 << 20
LARGEST, COUNT, SLACK = 16 * MIB, 8, 8 * MIB  # the slack: code that is loaded on the way


def grown(call: Callable[[], Any]) -> int:
    """Bytes by which this process's memory grows at most while `call` runs, whatever it returns being kept."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    status = Path("/proc/self/status")

    def kib(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    kept = call()
    most = kib("VmHWM")
    del kept
    return (most - before) << 10


def streaming(folder: Path, what: str) -> int:
    spec = fzero.Spec(loss=lambda p, b: p["w0"].sum(), optimizer=fzero.optim.sgd(0.1), zero=3, transfers="p2p")
    if what == "init":
        fzero.init({"w0": torch.ones(2)}, spec)  # what is imported and cached only once
        held = LARGEST * COUNT // int(os.environ["WORLD_SIZE"])
        return grown(lambda: fzero.init(safetensors(folder), spec)) - held
    if what in ("live safetensors", "live dcp"):
        state = fzero.init(safetensors(folder), spec)
        export = export_safetensors if what == "live safetensors" else export_dcp
        return grown(lambda: export(state, folder / "out"))
    if what == "convert":
        return grown(lambda: export_safetensors(safetensors(folder), folder / "out", part="", dtype=torch.bfloat16))
    if what == "dcp":
        return grown(lambda: export_dcp(safetensors(folder), folder / "out", part=""))
    return grown(lambda: write_checkpoint(safetensors(folder), folder / "out"))


@pytest.mark.parametrize(
    ("what", "world"),
    [
        ("init", 2),
        ("live safetensors", 2),
        ("fzero", 1),
        *(pytest.param(*one, marks=pytest.mark.acceptance) for one in (("live dcp", 2), ("convert", 1), ("dcp", 1))),
    ],
)
@pytest.mark.sampled(2)
def test_import_and_export_hold_few_of_the_largest_tensors(what: str, world: int, tmp_path: Path) -> None:
    save_file({f"w{i}": torch.full((LARGEST // 4,), float(i)) for i in range(COUNT)}, tmp_path / "model.safetensors")
    most = max(values(gloo(world, streaming, tmp_path, what)))
    print(f"{what}: {most / LARGEST:.2f} of the largest tensor")
    kept = 3 if "dcp" in what else 2  # torch's writer keeps a tensor until it has written the next one
    assert most <= kept * LARGEST + SLACK
