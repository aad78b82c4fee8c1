"""Figures of a machine: kept in a file whatever happens to it, and the same on every rank."""

import json
import logging
import multiprocessing
import os
import pickle
import threading
import time
from datetime import timedelta
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers import start_ranks, values

import fzero
from fzero.codegen import matmul
from fzero.cost import kept_costs
from fzero.cost.kept_costs import Costs, Figures

A, B = {"torch": 1.0, "onednn": 2.0}, {"torch": 3.0, "onednn": 1.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never(question: str) -> Figures:
    raise AssertionError(f"{question} was measured")


def test_what_was_measured_once_is_never_measured_again() -> None:
    assert Costs("test").find(["a"], lambda q: A) == {"a": A}
    assert Costs("test").find(["a"], never) == {"a": A}
    assert Costs("test").find(["a", "b"], lambda q: {"b": B}[q]) == {"a": A, "b": B}
    with pytest.raises(AssertionError, match="a was measured"):
        Costs("other").find(["a"], never)


def test_without_measuring_only_the_file_is_known() -> None:
    assert Costs("test", measures=False).find(["a"], never) == {}
    kept_costs.remember("test", {"a": A})
    assert Costs("test", measures=False).find(["a", "b"], never) == {"a": A}


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert kept_costs.folder() == Path(os.environ["FZERO_CACHE"])
    monkeypatch.delenv("FZERO_CACHE")
    assert kept_costs.folder() == Path("/somewhere/fzero")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kept_costs.folder() == Path.home() / ".cache" / "fzero"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b'{"machine": 1}',
        b'{"figures": {}}',
        b"MACHINE []",
        b'MACHINE {"a": 3}',
        b'MACHINE {"a": {"torch": "fast"}}',
        b'MACHINE {"a": {"torch": NaN}}',
        b'MACHINE {"a": {"torch": -1}}',
    ],
)
def test_a_file_that_is_not_whole_counts_as_empty_and_is_written_anew(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = kept_costs.path_of("test")
    path.parent.mkdir()
    if content.startswith(b"MACHINE"):
        content = b'{"machine": %s, "figures": %s}' % (json.dumps(kept_costs.machine()).encode(), content[8:])
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "fzero"):
        assert Costs("test").find(["a"], lambda q: A) == {"a": A}
    assert "measured again" in caplog.text
    assert Costs("test").find(["a"], never) == {"a": A}


def test_another_machines_file_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept_costs.path_of("test")
    path.parent.mkdir()
    path.write_text(json.dumps({"machine": "another", "figures": {"a": A}}))
    assert kept_costs.read("test") == {}
    kept_costs.remember("test", {"a": B})
    monkeypatch.setattr(kept_costs, "_processor", lambda: "another processor")
    assert kept_costs.path_of("test") != path
    assert kept_costs.read("test") == {}


def test_threads_and_the_precision_of_products_are_part_of_the_machine() -> None:
    before, precision = kept_costs.machine(), torch.backends.mkldnn.matmul.fp32_precision
    torch.set_num_threads(2)
    try:
        assert kept_costs.machine() != before
    finally:
        torch.set_num_threads(1)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert kept_costs.machine() != before
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = precision
    assert kept_costs.machine() == before


def test_a_folder_that_cannot_be_written_costs_one_measurement_per_run(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    found = Costs("test")
    with caplog.at_level(logging.WARNING, "fzero"):
        assert found.find(["a"], lambda q: A) == {"a": A}
    assert "cannot be written" in caplog.text
    assert found.find(["a"], never) == {"a": A}
    assert Costs("test").find(["a"], lambda q: B) == {"a": B}


def test_what_was_written_first_stays() -> None:
    assert kept_costs.remember("test", {"a": A}) == {"a": A}
    assert kept_costs.remember("test", {"a": B, "b": B}) == {"a": A, "b": B}
    assert kept_costs.read("test") == {"a": A, "b": B}


def test_a_figure_that_another_process_wrote_meanwhile_is_taken() -> None:
    def slow(question: str) -> Figures:
        kept_costs.remember("test", {"a": B})  # as another process would
        return A

    assert Costs("test").find(["a"], slow) == {"a": B}


def _remember(start: object, number: int) -> None:
    start.wait()  # type: ignore[attr-defined]
    for i in range(20):
        kept_costs.remember("test", {f"{number}.{i}": A, "shared": {"torch": float(number)}})


def test_processes_that_write_at_once_lose_nothing() -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    processes = [context.Process(target=_remember, args=(start, n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    found = kept_costs.read("test")
    assert len(found) == 81
    left = sorted(path.suffix for path in kept_costs.folder().iterdir())
    assert left == [".json", ".lock"]


def loss(p: dict[str, list[torch.Tensor]], batch: torch.Tensor) -> torch.Tensor:
    for w in p["w"]:
        batch = (batch @ w).tanh() + batch
    return batch.square().mean()


def _meet(place: Path, name: str, number: int) -> None:
    """Waits until so many processes have met here by names that differ in digits alone."""
    (place / name).touch()
    while len([*place.glob(f"{name.rstrip('0123456789')}*")]) < number:
        time.sleep(0.001)


def train_at_once(place: Path, run: int, compile: str) -> tuple[str, bytes]:
    """The program and the parameters of a run that chooses by measurement. Torch's products are the fastest in one run,
    oneDNN's in the other, and both measure at once."""

    def measured(_: object) -> Figures:
        _meet(place, f"measures{run}", 2)
        return {"torch": 1.0, "onednn": 0.1 + 10 * run}

    matmul.measured = measured
    os.environ["FZERO_CACHE"] = str(place / "cache")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")
    _meet(place, f"here{os.getpid()}", 4)
    sgd = fzero.optim.sgd(1e-2)
    spec = fzero.Spec(loss=loss, optimizer=sgd, zero=3, prefetch=1, matmul="fastest", compile=compile)
    state = fzero.init({"w": [torch.linspace(-1, 1, n * n).view(n, n) / n for n in (64, 64, 64)]}, spec)
    for _ in range(2):
        state = fzero.step(state, torch.linspace(-1, 1, 32 * 64).view(32, 64))
    return str(state.program), b"".join(w.full().numpy().tobytes() for w in state.params["w"])


@pytest.mark.parametrize("compile", ["none", pytest.param("inductor", marks=pytest.mark.acceptance)])
def test_runs_that_begin_at_once_with_one_cache(tmp_path: Path, compile: str) -> None:
    """They measure at once, and both use what was written first: the same bits. No file is torn, none is left over."""
    pipes = [start_ranks(2, train_at_once, tmp_path, run, compile)[1] for run in range(2)]
    found = values([pickle.loads(pipe.recv_bytes()) for pipe in chain(*pipes)])
    assert len(set(found)) == 1
    files = [path for path in (tmp_path / "cache").iterdir() if path.name != "lowerings"]  # kept if they took long
    kinds = sorted((path.name.split("-")[0], path.suffix) for path in files)
    assert kinds == [(kind, end) for kind in ("buckets", "products", "transfers") for end in (".json", ".lock")]
    assert all(json.loads(path.read_text())["figures"] for path in files if path.suffix == ".json")


# --- several ranks ----------------------------------------------------------------------------------------------------


def test_the_others_take_what_rank_0_found() -> None:
    store = torch.distributed.HashStore()
    results: dict[int, dict[str, Figures]] = {}

    def other() -> None:
        results[1] = Costs("test", rank=1, store=store).find(["b", "a"], never)

    thread = threading.Thread(target=other)
    thread.start()

    def slow(question: str) -> Figures:
        time.sleep(0.1)  # a rank that did not wait would have measured by now
        return {"a": A, "b": B}[question]

    results[0] = Costs("test", rank=0, store=store).find(["a", "b"], slow)
    thread.join(30)
    assert results[0] == results[1] == {"a": A, "b": B}


def test_no_rank_waits_for_ever_and_the_first_to_write_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_costs, "PATIENCE", timedelta(milliseconds=50))
    store = torch.distributed.HashStore()
    assert Costs("test", rank=1, store=store).find(["a"], lambda q: A) == {"a": A}
    monkeypatch.setenv("FZERO_CACHE", os.environ["FZERO_CACHE"] + "/of rank 0")
    assert Costs("test", rank=0, store=store).find(["a"], lambda q: B) == {"a": A}
    assert Costs("test", rank=2, store=store).find(["a"], never) == {"a": A}


@pytest.mark.parametrize(
    "foreign", [b"\xff", "x", "[]", '{"a": {"torch": 1e400}}', '{"a": {"torch": -1}}', "[" * 100_000, '{"\x1b[2J": 1}']
)
@pytest.mark.parametrize("rank", [0, 1])
def test_figures_in_the_store_that_no_rank_wrote(foreign: str | bytes, rank: int) -> None:
    """torch's store is open to every program that reaches its port."""
    store = torch.distributed.HashStore()
    key = "fzero/test/" + kept_costs._digest(repr(["a"]))
    store.set(key, foreign)
    with pytest.raises(fzero.errors.DisagreementError, match=rf"has under {key} what fzero did not write") as error:
        Costs("test", rank=rank, store=store).find(["a"], lambda q: A)
    assert str(error.value).isprintable()


def test_a_question_that_nobody_asked_has_no_figures() -> None:
    store = torch.distributed.HashStore()
    store.set("fzero/test/" + kept_costs._digest(repr(["a"])), json.dumps({"a": A, "b": B}))
    assert Costs("test", rank=1, store=store).find(["a"], never) == {"a": A}
