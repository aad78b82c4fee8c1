"""What a machine does to a run: other threads, few descriptors, no space, a pause, processes that were spawned."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, values

import fzero


def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
    return (batch @ params["w"]).square().mean()


def started(**options: Any) -> fzero.State:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), zero=3, **options)
    return fzero.init({"w": torch.linspace(-1, 1, 64).view(8, 8)}, spec)


def batch() -> torch.Tensor:
    return torch.linspace(0, 1, 32).view(4, 8)


def of_other_threads() -> str:
    state = started()
    torch.set_num_threads(1 + int(os.environ["RANK"]))
    try:
        fzero.step(state, batch())
    except fzero.FzeroError as error:
        return f"{type(error).__name__}: {error}"
    return "no rank noticed"


def test_ranks_with_other_numbers_of_threads_are_told() -> None:
    """Their sums would round differently, and what is replicated drift apart."""
    for text in values(gloo(2, of_other_threads)):
        assert text.startswith("DisagreementError: the ranks do not run the same program (rank 0: step 1 of ")
        assert "threads=1; rank 1: step 1 of" in text
        assert "threads=2): give every rank" in text
        assert "OMP_NUM_THREADS" in text


def of_other_libraries(what: str) -> str:
    if os.environ["RANK"] == "1":
        if what == "torch":
            torch.__version__ = type(torch.__version__)("2.11.0+other")
        else:
            sys.byteorder = "big"
    try:
        started()
    except fzero.FzeroError as error:
        return f"{type(error).__name__}: {error}"
    return "no rank noticed"


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [("torch", f"torch {torch.__version__}", r"torch 2.11.0\+other"), ("bytes", "little-endian", "big-endian")],
)
def test_ranks_with_other_libraries_or_another_byte_order_are_told(what: str, first: str, second: str) -> None:
    """The same step is another program there, or the same bytes are other numbers."""
    for text in values(gloo(2, of_other_libraries, what)):
        both = f".*{re.escape(first)}.* and .*{second}.*"
        assert re.fullmatch(f"DisagreementError: what the ranks run differs between rank 0 and rank 1: {both}", text)
        assert text.endswith(". Start all ranks from one environment, on machines of one byte order")


def paused(folder: str) -> float:
    """Rank 1 is stopped in its second step by rank 0, and goes on after a second."""
    state, other = started(timeout=30.0), Path(folder) / "pid"
    state = fzero.step(state, batch())
    if os.environ["RANK"] == "1":
        other.with_suffix(".new").write_text(str(os.getpid()))
        other.with_suffix(".new").rename(other)
    else:
        while not other.exists():
            time.sleep(0.01)
        child = os.fork()
        if not child:
            pid = int(other.read_text())
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
    for _ in range(3):
        state = fzero.step(state, batch())
    if os.environ["RANK"] == "0":
        os.waitpid(child, 0)
    return float(state.metrics["loss"])


def test_a_rank_that_pauses_goes_on(tmp_path: Path) -> None:
    first, second = values(gloo(2, paused, str(tmp_path)))
    assert first == second < 1.0


def with_few_descriptors(folder: str) -> list[Any]:
    """Saves and steps with no more than a few descriptors beyond those that are open; then with none."""
    state = fzero.step(started(), batch())
    held = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 12, hard))
    fzero.save(state, folder)
    state = fzero.step(state, batch())
    after = len(os.listdir("/proc/self/fd"))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    try:
        fzero.save(state, folder)
        told = "it was saved"
    except fzero.FzeroError as error:
        told = f"{type(error).__name__}: {error}"
    for one in taken:
        os.close(one)
    fzero.save(fzero.step(state, batch()), folder)
    return [after - held, told]


def test_few_descriptors_are_enough_and_none_is_an_error(tmp_path: Path) -> None:
    for grown, told in values(gloo(2, with_few_descriptors, str(tmp_path / "run"))):
        assert grown <= 1
        assert told.startswith("CheckpointError")
        assert "too many files open" in told
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*"))


def saved_without_space(folder: str) -> list[str]:
    """A file may get 64 bytes long: as on a full disk, each write fails."""
    state = fzero.step(started(), batch())
    fzero.save(state, folder)
    state = fzero.step(state, batch())
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        fzero.save(state, folder)
        told = "it was saved"
    except fzero.FzeroError as error:
        told = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    state = fzero.step(state, batch())
    return [told, str(state.step)]


def test_no_space_is_an_error_and_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    for told, step in values(gloo(2, saved_without_space, str(tmp_path / "run"))):
        assert told.startswith("CheckpointError")
        assert step == "3"
    assert fzero.checkpoint.manifest(tmp_path / "run").step == 1


def trained(pipe: Any) -> None:
    state = started()
    data = torch.utils.data.TensorDataset(torch.linspace(0, 1, 64).view(8, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
    for (x,) in loader:
        state = fzero.step(state, x)
    pipe.send(float(state.metrics["loss"]))


@pytest.mark.acceptance
def test_a_spawned_process_trains_with_workers_that_load() -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=trained, args=(theirs,))
    process.start()
    assert mine.poll(120)
    found = mine.recv()
    process.join(60)
    assert process.exitcode == 0
    state = started()
    for x in torch.linspace(0, 1, 64).view(2, 4, 8):
        state = fzero.step(state, x)
    assert found == pytest.approx(float(state.metrics["loss"]), rel=1e-5)
