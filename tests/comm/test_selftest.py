"""selftest: two ranks try a transport; a wrong sum is seen, and a rank that fails is named. Ranks are played."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from fzero.comm import selftest
from fzero.comm.group import Line
from fzero.comm.selftest import LoopbackError, TransportResult
from fzero.ir.mesh import Mesh

NUMBERS = 2048 // 4 // 2  # of one rank's part


def memory(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, which only transfers spend."""
    now = [0.0]
    monkeypatch.setattr(selftest, "BUFFER_BYTES", 2048)
    monkeypatch.setattr(selftest.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def called(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch.distributed; a rank that waits there for others spends some time."""
    names: list[str] = []

    def barrier() -> None:
        names.append("barrier")
        clock[0] += 100.0

    fake = SimpleNamespace(barrier=barrier, destroy_process_group=lambda: names.append("end"))
    monkeypatch.setattr(selftest, "dist", fake)
    return names


class Comm:
    """This rank's end of a transport; the other rank has numbers of the seed 1. wrong: what it adds to sums."""

    def __init__(self, clock: list[float], wrong: float = 0.0, seconds: tuple[float, ...] = (2.0, 1.0)) -> None:
        self.clock, self.wrong, self.seconds, self.calls = clock, wrong, iter(seconds * 9), list[str]()

    def start(self, name: str, op: Any, tensors: list[torch.Tensor]) -> None:
        other = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(1))
        if op.kind == "all_gather":
            own, whole = tensors
            whole.copy_(torch.cat([own, other]))
        else:
            whole, total, scratch = tensors
            assert (op.reduction, scratch.shape) == ("sum", (1, NUMBERS))
            total.copy_(whole[:NUMBERS] + whole[:NUMBERS] + self.wrong)
        self.clock[0] += next(self.seconds)
        self.calls.append("start")

    def wait(self, name: str) -> None:
        self.calls.append("wait")

    def settle(self, name: str) -> None:
        self.calls.append("settle")


def test_the_best_time_counts_and_the_sum_must_be_right(clock: list[float], called: list[str]) -> None:
    comm = Comm(clock, seconds=(2.0, 8.0, 1.0, 4.0, 3.0, 9.0))
    found = selftest.tried(comm, memory, 0, 2)
    assert found.right
    assert found.mb_per_s == {"all-gather": 1024 / (1 << 20) / 1.0, "reduce-scatter": 1024 / (1 << 20) / 4.0}
    assert comm.calls == ["start", "wait", "settle"] * 2 * selftest.TIMES
    assert called == ["barrier"] * 2 * selftest.TIMES, "ranks begin together"
    assert not selftest.tried(Comm(clock, wrong=1e-3), memory, 0, 2).right
    assert not selftest.tried(Comm(clock), memory, 1, 2).right, "these are not the numbers of the other rank"


def test_three_ranks_have_room_for_the_parts_of_the_others(clock: list[float], called: list[str]) -> None:
    shapes: dict[str, list[tuple[int, ...]]] = {}

    def start(name: str, op: Any, tensors: list[torch.Tensor]) -> None:
        shapes[op.kind] = [tuple(tensor.shape) for tensor in tensors]
        clock[0] += 1.0

    comm = SimpleNamespace(start=start, wait=lambda name: None, settle=lambda name: None)
    found = selftest.tried(comm, memory, 1, 3)
    part = 2048 // 4 // 3
    assert shapes == {"all_gather": [(part,), (3 * part,)], "reduce_scatter": [(3 * part,), (part,), (2, part)]}
    assert not found.right, "nothing came"
    assert found.mb_per_s == dict.fromkeys(("all-gather", "reduce-scatter"), 2048 * 2 / 3 / (1 << 20))


def test_the_axes_of_a_mesh_by_their_slowest_rank(
    clock: list[float], called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, told = Mesh((("dp_out", 2), ("dp", 2))), list[float]()

    def lines(*given: Any) -> dict[str, Line]:
        return {"dp_out": Line(0, (0, 1)), "dp": Line(0, (0, 1, 2)), "dp_out.dp": Line(0, (0, 1))}

    def tell(note: bytes, world: int, group: Any) -> list[bytes]:
        told.append(float(note))
        return [note, b"1e-9", b"5"]

    class Timed:
        def __init__(self, line: Line) -> None:
            self.size, self.left = line.size, [3.0, 1.0, 2.0, 5.0, 4.0]

        def start(self, name: str, op: Any, tensors: list[torch.Tensor]) -> None:
            assert tensors[0].numel() == 2048 // self.size
            assert tensors[1].numel() == tensors[0].numel() * self.size

        def wait(self, name: str) -> None:
            clock[0] += self.left.pop()

    monkeypatch.setattr(selftest, "open_world", lambda *given: (0, 4))
    monkeypatch.setattr(selftest, "lines", lines)
    monkeypatch.setattr(selftest, "tell", tell)
    monkeypatch.setattr(selftest, "P2P", Timed)
    assert selftest.along_axes(mesh) == {"dp_out": 1e-9, "dp": 1e-9}
    assert told == [1024 / 1e9, 2 * 682 / 1e9], "what comes from the others, in the best second"
    assert called == ["barrier"] * 2 * selftest.TIMES + ["end"]


@pytest.mark.parametrize("shares", [True, False])
def test_each_way_is_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shares: bool) -> None:
    host, ended, tries = SimpleNamespace(allocate="its memory"), list[str](), list[Any]()
    patience: list[float] = []
    monkeypatch.setattr(selftest, "open_world", lambda device, seconds: patience.append(seconds) or (1, 2))
    monkeypatch.setattr(selftest, "meet", lambda number, world: (host if shares else None, "another machine"))
    monkeypatch.setattr(selftest, "P2P", lambda line: ("p2p", line.place, line.size))
    monkeypatch.setattr(selftest, "gloo", lambda line: ("gloo", line.place, line.size))
    monkeypatch.setattr(selftest, "Shared", lambda host, line: ("shared", line.place, line.size))
    monkeypatch.setattr(selftest, "dist", SimpleNamespace(destroy_process_group=lambda: ended.append("ended")))

    def tried(comm: Any, memory: Any, number: int, world: int) -> TransportResult:
        assert comm[1:] == (number, world) == (1, 2)
        tries.append((comm[0], memory == "its memory"))
        return TransportResult(True, {"all-gather": float(len(tries))})

    monkeypatch.setattr(selftest, "tried", tried)
    selftest.rank()
    told = {name: TransportResult(**result) for name, result in json.loads(capsys.readouterr().out).items()}
    assert tries == [("p2p", False), ("gloo", False), *[("shared", True)] * shares]
    assert told["gloo"] == TransportResult(True, {"all-gather": 2.0})
    lack = TransportResult(False, {}, "not possible: another machine")
    assert told["shared"] == (TransportResult(True, {"all-gather": 3.0}) if shares else lack)
    assert ended == ["ended"]
    assert patience == [selftest.SECONDS / 2], "it names who does not come before its own time is up"


# --- the two processes ------------------------------------------------------------------------------------------------


class Process:
    """A rank's process. `out`: what it prints; None: it does not end."""

    made: ClassVar[list[Process]] = []
    outs: ClassVar[list[bytes | None]] = []
    code = 0

    def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
        self.env, self.number, self.killed, self.waited = env, len(Process.made), False, False
        self.returncode = Process.code if self.number == 1 else 0
        Process.made.append(self)

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        assert (0 if None in Process.outs else selftest.SECONDS - 30) < timeout <= selftest.SECONDS
        out = Process.outs[self.number]
        if out is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return out, b"Traceback\nValueError: no port\n"

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> None:
        assert self.killed
        self.waited = True


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> type[Process]:
    monkeypatch.setattr(Process, "made", [])
    monkeypatch.setattr(selftest.subprocess, "Popen", Process)
    return Process


def test_the_first_rank_tells_the_results(processes: type[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    result = TransportResult(True, {"all-gather": 2.0})
    monkeypatch.setattr(processes, "outs", [b"a warning\n" + json.dumps({"p2p": vars(result)}).encode(), b""])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert selftest.run() == {"p2p": result}
    assert [process.env["RANK"] for process in processes.made] == ["0", "1"]
    for process in processes.made:
        assert (process.env["WORLD_SIZE"], process.env["LOCAL_RANK"]) == ("2", process.env["RANK"])
        assert "TORCHELASTIC_USE_AGENT_STORE" not in process.env
        assert process.env["OMP_NUM_THREADS"] == "1", "sums round by them"
        assert str(Path(selftest.__file__).parents[2]) in process.env["PYTHONPATH"].split(os.pathsep)
        assert process.killed
    (port,) = {process.env["MASTER_PORT"] for process in processes.made}
    assert int(port) >= 1024, "one that is free for every user"


def test_a_rank_that_fails_or_does_not_end_is_an_error(
    processes: type[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "outs", [b"{}", b""])
    monkeypatch.setattr(processes, "code", 1)
    with pytest.raises(LoopbackError, match="rank 1: ValueError: no port"):
        selftest.run()
    monkeypatch.setattr(processes, "made", [])
    monkeypatch.setattr(processes, "outs", [b"{}", None])
    with pytest.raises(LoopbackError, match="two ranks did not end within 60 s"):
        selftest.run()
    assert all(process.killed and process.waited for process in processes.made)
