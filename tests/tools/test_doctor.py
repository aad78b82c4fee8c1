"""fzero doctor: what is found is true, what is wrong is a line and an exit status, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fzero import cli, hardware
from fzero.comm import selftest
from fzero.comm.selftest import LoopbackError, TransportResult
from fzero.disk import direct
from fzero.ir.mesh import Mesh
from fzero.tools import doctor, machine_probes, measured_machine, speed_probes
from fzero.tools.doctor import guarded
from fzero.tools.finding import Finding, healthy, line


def by_name(findings: Any) -> dict[str, Finding]:
    return {one.name: one for one in findings}


@pytest.fixture(scope="module")
def of_two_ranks() -> dict[str, TransportResult]:
    """What two real ranks found, once for all tests."""
    return selftest.run()


@pytest.fixture
def measured_once(of_two_ranks: dict[str, TransportResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run", lambda: of_two_ranks)


@pytest.mark.usefixtures("measured_once")
def test_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real ranks, a real file. What the machine cannot do is a warning, never a traceback."""
    status = cli.main(["doctor", "--json", "--dir", str(tmp_path), "--disk-mb", "2"])
    told = json.loads(capsys.readouterr().out)
    findings = by_name(Finding(**one) for one in told["findings"])
    assert status == (0 if told["ok"] else 1)
    assert told["ok"], [line(one) for one in findings.values() if one.status != "ok"]
    assert {one.status for one in findings.values()} <= {"ok", "warning", "missing"}
    assert findings["torch"].text == torch.__version__ or findings["torch"].text in torch.__version__
    for way in ("p2p", "gloo"):
        figures = findings[f"loopback {way}"].figures
        assert set(figures) == {"all-gather_mb_per_s", "reduce-scatter_mb_per_s"}
        assert all(speed > 0 for speed in figures.values())
    disk = findings[f"disk {tmp_path}"]
    assert "(2 MB)" in disk.text
    assert disk.figures["free_bytes"] > 0
    lane = findings[f"offload {tmp_path}"]
    if "memory" not in lane.text:  # the temporary directory is memory on some systems
        assert all(lane.figures[f"{way}_mb_per_s"] > 0 for way in ("write", "read", "mixed"))
        assert "(2 MB)" in lane.text
    assert list(tmp_path.iterdir()) == []


def test_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        selftest,
        "run",
        lambda: {"p2p": TransportResult(False, {"all-gather": 1.0}), "shared": TransportResult(False, lack="no")},
    )
    assert cli.main(["doctor", "--dir", str(tmp_path), "--disk-mb", "1"]) == 1
    text = capsys.readouterr().out
    assert "missing  loopback p2p         1 MB/s all-gather, with wrong bits\n" in text
    assert "warning  loopback shared      no\n" in text
    assert text.endswith("fzero cannot run here as it should: loopback p2p\n")


def test_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"torch": "2.10.1+cpu", "numpy": "1.26", "optree": None, "rich": None, "safetensors": "0.10.0rc1"}
    monkeypatch.setattr(machine_probes, "_version", lambda name: found.get(name, "99.0"))
    told = by_name(machine_probes.versions())
    assert (told["torch"].status, told["torch"].fix) == ("missing", "pip install 'torch>=2.11'")
    assert (told["optree"].status, told["optree"].text) == ("missing", "not installed")
    assert told["numpy"].status == told["safetensors"].status == "ok"
    assert (told["rich"].status, told["rich"].fix) == ("missing", "pip install 'fzero[examples]'")
    assert not healthy(told.values())
    del told["torch"], told["optree"]
    assert healthy(told.values())  # an extra is not needed


def test_a_probe_that_fails_or_hangs_is_a_finding() -> None:
    stuck = threading.Event()

    def raises() -> Iterator[Finding]:
        yield Finding("first", "ok", "found before")
        raise OSError("no such thing\nat all")

    def hangs() -> Iterator[Finding]:
        stuck.wait()
        yield Finding("late", "ok", "")

    first, failed = guarded("p", 10, raises)
    assert first.name == "first"
    assert (failed.name, failed.status, failed.text) == ("p", "missing", "OSError: no such thing")
    (late,) = guarded("q", 0.05, hangs)
    assert (late.name, late.status, late.text) == ("q", "missing", "no answer within 0.05 s")
    stuck.set()
    assert not healthy([late])


def test_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone,) = guarded("disk", 10, lambda: speed_probes.disk(tmp_path / "none", 1))
    assert gone.status == "missing"
    assert "FileNotFoundError" in gone.text
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    (full,) = speed_probes.disk(tmp_path, 64)
    assert (full.status, full.needed) == ("missing", True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40 << 20))
    (little,) = speed_probes.disk(tmp_path, 64)
    assert little.status == "warning"
    assert "(4 MB)" in little.text  # a tenth of what is free
    assert list(tmp_path.iterdir()) == []


def test_a_disk_to_offload_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is no disk; a disk without direct I/O is named as one; one that is full is not written to."""
    with monkeypatch.context() as patch:
        patch.setattr(direct, "in_memory", lambda fd: "tmpfs")
        (memory,) = speed_probes.offload(tmp_path, 1)
    assert (memory.status, memory.needed) == ("warning", False)
    assert memory.text == "lies on tmpfs, which is memory: name a folder on a disk with Spec(nvme_path=)"
    assert memory.fix == "only offload to nvme needs it: name a folder on a disk with --dir to try that one"
    monkeypatch.setattr(direct, "in_memory", lambda fd: "")
    with monkeypatch.context() as patch:
        patch.setattr(direct, "alignment", lambda fd: direct.Direct(4, 512))
        patch.setattr(direct, "turn_on", lambda fd: True)
        (right,) = speed_probes.offload(tmp_path, 1)
    assert right.status == "ok"
    assert right.text.startswith("direct I/O (memory at 4, ranges at 512 bytes); ")
    assert (right.figures["memory_alignment_bytes"], right.figures["offset_alignment_bytes"]) == (4, 512)
    monkeypatch.setattr(direct, "alignment", lambda fd: direct.Direct())
    (buffered,) = speed_probes.offload(tmp_path, 1)
    assert buffered.status == "warning"
    assert buffered.text.startswith("no direct I/O: through the page cache; ")
    assert buffered.figures["direct"] == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    (full,) = speed_probes.offload(tmp_path, 64)
    assert full.text == "too little is free to write anything"
    assert list(tmp_path.iterdir()) == []


def test_no_compiler_and_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_probes, "inductor_lacks", lambda _: "no C++ compiler was found")
    monkeypatch.delattr(machine_probes.os, "memfd_create", raising=False)
    assert by_name(machine_probes.compilers())["c++"].status == "warning"
    memory = by_name(machine_probes.shared_memory())["shared memory"]
    assert (memory.status, memory.text) == ("warning", "this system has no memfd_create")


def test_spans() -> None:
    assert machine_probes._spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


@pytest.mark.acceptance
def test_ranks_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    (found,) = speed_probes.transfers()
    assert found.status == "missing"
    assert found.text.startswith("rank ")
    assert "GLOO_SOCKET_IFNAME" in found.fix
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with pytest.raises(LoopbackError, match=r"did not end within 0\.01 s"):
        selftest.run(0.01)


def test_a_folder_that_is_not_there_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "measured_machine", lambda *_: pytest.fail("it measures"))
    assert cli.main(["doctor", "--hardware", str(tmp_path / "none" / "mine.toml")]) != 0
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.usefixtures("measured_once")
def test_this_machine_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured with small matrices, written, read again, as if it had two cores: each takes a process. A step is
    simulated on it."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(measured_machine, "SIDE", 512)
    file = tmp_path / "mine.toml"
    assert cli.main(["doctor", "--hardware", str(file), "--dir", str(tmp_path), "--disk-mb", "1"]) == 0
    machine = hardware.load(file)
    assert capsys.readouterr().out == file.read_text()
    assert 1e8 < machine.device.flops["fp32"] < 1e13
    assert 1e8 < machine.device.memory_bytes < 1e12
    assert machine.levels[0].bytes > 1e6
    rates = machine.rates(Mesh((("dp", machine.devices),)))
    assert machine.devices == 2
    assert rates.transfer("all_gather", 1 << 20, "dp", machine.devices) > 0
