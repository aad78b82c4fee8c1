"""Systems other than Linux: macOS by a stand-in that hides what is missing there, Windows by its name."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fzero.disk import calls
from fzero.tools import machine_probes

WORKER = Path(__file__).parents[1] / "support" / "workers" / "macos.py"


def test_training_offload_and_checkpoints_need_nothing_that_macos_lacks(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(WORKER), str(tmp_path)], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said.pop("memory") > 1e8
    first, *others = said.values()
    assert others == [first, first], "no bit changes with the home"
    assert first[: len(first) // 2] == first[len(first) // 2 :], "a state that was saved goes on as it would have"
    assert "this system has no O_DIRECT" in done.stderr


def test_windows_is_told_what_to_use() -> None:
    script = "import sys; sys.platform = 'win32'; import fzero"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ImportError: fzero runs on Linux and macOS. On Windows install it")


@pytest.mark.parametrize("supported", [True, False])
def test_a_sync_reaches_the_disk_where_fsync_does_not(
    supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS's fsync ends at the drive; what reaches further is a call of fcntl, which not every file system has."""
    asked: list[object] = []

    def full(fd: int, command: int) -> int:
        asked.append(command)
        if not supported:
            raise OSError("not here")
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fsync", lambda fd: asked.append("fsync"))
    calls.Disk().write(tmp_path / "file", b"bytes")
    assert asked == [51] + ["fsync"] * (not supported)


def test_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    there = machine_probes._meminfo()["MemTotal"]
    monkeypatch.setattr(machine_probes, "_meminfo", dict)
    monkeypatch.setattr(machine_probes, "_cgroup_limit", lambda: None)
    assert machine_probes.memory_bytes() == pytest.approx(there, rel=0.01)
