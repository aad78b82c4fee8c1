"""Saving while training: what it saves, what it does not stop, and what every rank does when something goes wrong."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from helpers import Outcome, gloo, same_bits, values
from torch import Tensor

import fzero
from fzero import tree
from fzero.checkpoint import Disk, checkpointer, committed

T = TypeVar("T")


def loss(params: dict[str, Tensor], batch: Any) -> Tensor:
    if (
        batch["raises"] is not None and batch["raises"] == os.environ["RANK"]
    ):  # static: a value seen first is traced again
        raise ArithmeticError("no luck")
    return (batch["x"] @ params["w"] - 1).square().mean()


def batch(number: int, raises: str | None = None) -> dict[str, Any]:
    return {"x": fzero.random.normal(fzero.random.key(number), (4, 3)), "raises": raises}


SPEC = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-1), zero=3)
PARAMS = {"w": torch.arange(3.0)}


def steps(directory: Path) -> list[int]:
    return sorted(step for step, _ in committed(directory))


def leaves(state: fzero.State) -> dict[str, Tensor]:
    paths, found, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, found, strict=True))


def same(a: fzero.State, b: fzero.State) -> bool:
    mine, theirs = leaves(a), leaves(b)
    return mine.keys() == theirs.keys() and all(same_bits(mine[path], theirs[path]) for path in mine)


class Gate(Disk):
    """A slow disk: its next writes wait until it opens."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()

    def run(self, kind: str, path: Path, call: Callable[[], T]) -> T:
        if kind == "write":
            self.reached.set()
            assert self.open.wait(60)
        return super().run(kind, path, call)


class Full(Disk):
    """A disk without room, as often as it is told."""

    def __init__(self, times: int) -> None:
        self.times = times

    def run(self, kind: str, path: Path, call: Callable[[], T]) -> T:
        if kind == "write" and self.times:
            self.times -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().run(kind, path, call)


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that a process with handlers of its own gets."""
    found: list[int] = []
    before = {n: signal.signal(n, lambda number, _: found.append(number)) for n in (signal.SIGTERM, signal.SIGINT)}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("background", [True, False])
def test_it_resumes_where_it_was_with_the_same_bits(background: bool, tmp_path: Path) -> None:
    def train(until: int) -> tuple[int, Any, fzero.State]:
        with fzero.Checkpointer(tmp_path, every=3, keep=2, background=background) as saver:
            state = saver.resume(PARAMS, SPEC)
            first, extra = state.step, saver.extra
            while state.step < until:
                state = fzero.step(state, batch(state.step))
                saver.after(state, {"position": 10 * state.step})
        return first, extra, state

    straight = fzero.init(PARAMS, SPEC)
    for i in range(9):
        straight = fzero.step(straight, batch(i))
    assert train(6)[:2] == (0, {})
    assert train(7)[:2] == (6, {"position": 60})
    first, extra, state = train(9)
    assert (first, extra) == (6, {"position": 60}), "step 7 was not due"
    assert same(state, straight)
    assert steps(tmp_path) == [6, 9], "keep=2"


def test_what_is_saved_is_the_state_of_that_step(tmp_path: Path) -> None:
    """Steps that ran while it was written, which used the same memory, are not in it."""
    gate = Gate()
    straight = fzero.step(fzero.init(PARAMS, SPEC), batch(0))
    with fzero.Checkpointer(tmp_path, every=1, disk=gate) as saver:
        state = fzero.step(saver.resume(PARAMS, SPEC), batch(0))
        saver.after(state, lambda: {"step": 1})
        assert gate.reached.wait(60)
        for i in range(1, 20):
            state = fzero.step(state, batch(i))
        gate.open.set()
    assert fzero.checkpoint.manifest(tmp_path).extra == {"step": 1}
    assert steps(tmp_path) == [1]
    assert same(fzero.load(tmp_path, SPEC, like=PARAMS), straight)


def test_a_slow_disk_makes_saves_late_and_stops_no_step(tmp_path: Path) -> None:
    gate, seen = Gate(), []
    with fzero.Checkpointer(tmp_path, every=2, disk=gate) as saver:
        state = saver.resume(PARAMS, SPEC)
        while state.step < 11:
            state = fzero.step(state, batch(state.step))
            saver.after(state, {"step": state.step})
            seen.append(len(steps(tmp_path)))
            if state.step == 2:
                assert gate.reached.wait(60)
        assert seen == [0] * 11, "eleven steps while the first save waits"
        gate.open.set()
    assert steps(tmp_path) == [2, 11], (
        "the one that was due at 4 is made when the block ends, of the state there is then"
    )
    assert fzero.checkpoint.manifest(tmp_path).extra == {"step": 11}


def test_extra_belongs_to_the_step_that_is_saved(tmp_path: Path) -> None:
    with fzero.Checkpointer(tmp_path, every=2, background=False) as saver:
        state = saver.resume(PARAMS, SPEC)
        for i in range(4):
            state = fzero.step(state, batch(i))
            saver.after(state, {"step": state.step})
    assert [fzero.checkpoint.manifest(path).extra for _, path in committed(tmp_path)] == [{"step": 4}, {"step": 2}]


def test_save_saves_now_and_once(tmp_path: Path) -> None:
    with fzero.Checkpointer(tmp_path) as saver:
        state = fzero.step(saver.resume(PARAMS, SPEC), batch(0))
        saver.after(state)
        assert steps(tmp_path) == [], "every=None"
        saver.save(state)
        assert steps(tmp_path) == [1]
        saver.save(state, {"other": "extra"})
    assert steps(tmp_path) == [1]


def test_a_second_state_is_not_taken_for_one_that_is_saved(tmp_path: Path) -> None:
    """Of two states of one step, as of a GAN, the second was not saved, in silence."""
    one, two = (fzero.step(fzero.init(PARAMS, SPEC), batch(i)) for i in range(2))
    with fzero.Checkpointer(tmp_path) as saver:
        saver.save(one)
        with pytest.raises(fzero.CheckpointError, match="saved here already, with other contents"):
            saver.save(two)
        saver.save(fzero.load(tmp_path, SPEC, like=PARAMS))
    assert same(fzero.load(tmp_path, SPEC, like=PARAMS), one)


def test_a_relative_folder_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that writes while the program goes to another directory wrote there."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with fzero.Checkpointer("run", every=1) as saver:
        monkeypatch.chdir(tmp_path / "other")
        saver.after(fzero.step(saver.resume(PARAMS, SPEC), batch(0)))
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000001"]
    assert not [*(tmp_path / "other").iterdir()]


def test_a_failed_save_is_an_error_of_the_next_call_and_the_state_goes_on(tmp_path: Path) -> None:
    with fzero.Checkpointer(tmp_path, every=1, disk=Full(1)) as saver:
        state = fzero.step(saver.resume(PARAMS, SPEC), batch(0))
        saver.after(state)
        with pytest.raises(
            fzero.CheckpointError, match=r"shard-00000.safetensors: .*the disk is full: free some space"
        ):
            saver.close()
        saver.save(state)
    assert steps(tmp_path) == [1]


def one_step(directory: Path, disk: Disk, error: Exception | None = None) -> None:
    """A block that begins a save, and ends with `error`."""
    with fzero.Checkpointer(directory, every=1, disk=disk) as saver:
        saver.after(fzero.step(saver.resume(PARAMS, SPEC), batch(0)))
        if error is not None:
            raise error


def test_a_failed_save_that_ends_the_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(fzero.CheckpointError, match="the disk is full"):
        one_step(tmp_path, Full(1))


def test_another_error_is_not_hidden_by_a_failed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="mine"):
        one_step(tmp_path, Full(1), KeyError("mine"))
    assert "the disk is full" in caplog.text


def test_a_save_that_does_not_end_is_given_up_when_an_error_has_ended_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "PATIENCE_SECONDS", 0.01)
    gate = Gate()
    with pytest.raises(KeyError, match="mine"):
        one_step(tmp_path, gate, KeyError("mine"))
    assert "step 1 was not written within 0.01 s: it is given up" in caplog.text
    gate.open.set()


def signalled(directory: Path, number: int) -> None:
    with fzero.Checkpointer(directory, every=100) as saver:
        state = saver.resume(PARAMS, SPEC)
        for i in range(50):
            if state.step == 3:
                os.kill(os.getpid(), number)
            state = fzero.step(state, batch(i))
            saver.after(state, {"position": state.step})


def test_a_signal_stops_also_who_cannot_save(
    heard: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    met = trained(tmp_path, 9, disk=Full(99), signals={3: 1})
    assert (met["status"], met["step"], steps(tmp_path)) == (143, 4, [])
    assert "SIGTERM: step 4 is not saved" in caplog.text


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_once_after_the_next_step_and_exits(number: int, status: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stop:
        signalled(tmp_path, number)
    assert stop.value.code == status
    assert steps(tmp_path) == [4]
    assert fzero.checkpoint.manifest(tmp_path).extra == {"position": 4}
    assert signal.getsignal(number) is before


def test_handlers_are_those_of_before_until_there_is_a_state_and_after_the_block(
    heard: list[int], tmp_path: Path
) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with fzero.Checkpointer(tmp_path) as saver:
        assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
        saver.resume(PARAMS, SPEC)
        assert signal.getsignal(signal.SIGTERM) is not before[0]
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before[1], "a second Ctrl-C is the program's own again"
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_signal_after_the_last_step_is_not_lost(heard: list[int], tmp_path: Path) -> None:
    with fzero.Checkpointer(tmp_path, every=1) as saver:
        saver.after(fzero.step(saver.resume(PARAMS, SPEC), batch(0)))
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == []
    assert (heard, steps(tmp_path)) == ([signal.SIGTERM], [1]), "once all is saved"


def test_extra_of_a_late_save_is_that_of_its_step(tmp_path: Path) -> None:
    gate, batches = Gate(), iter(range(1, 10))
    position = 0

    def here() -> dict[str, int]:
        return {"position": position}

    with fzero.Checkpointer(tmp_path, every=1, disk=gate) as saver:
        state = saver.resume(PARAMS, SPEC)
        for position in batches:
            if state.step == 2:
                break  # a loop that takes a batch before it sees that it is done
            state = fzero.step(state, batch(position))
            saver.after(state, here)
        gate.open.set()
    assert position == 3
    assert fzero.checkpoint.manifest(tmp_path).extra == {"position": 2}


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    one_step(tmp_path, Disk())
    file = tmp_path / "step-00000001" / "manifest.json"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(
        fzero.CorruptError, match=r"step-00000001: is damaged, and no other checkpoint is left: mend it"
    ):
        one_step(tmp_path, Disk())


def test_memory_that_a_given_up_save_may_write_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "PATIENCE_SECONDS", 0.01)
    gate = Gate()
    saver = fzero.Checkpointer(tmp_path, every=1, disk=gate)
    state = fzero.step(fzero.init(PARAMS, SPEC), batch(0))

    def fails() -> None:
        with saver:
            saver.after(state)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    (writing,) = (thread for thread in threading.enumerate() if thread.name == "fzero-save")
    with saver:
        later = fzero.step(state, batch(1))
        with pytest.raises(fzero.CheckpointError, match="another save into this directory is at work"):
            saver.save(later)
        gate.open.set()
        writing.join()
    first = fzero.step(fzero.init(PARAMS, SPEC), batch(0))
    assert same(fzero.load(tmp_path, like=later), first)


def test_wrong_numbers_are_errors(tmp_path: Path) -> None:
    for options in ({"every": 0}, {"keep": 0}, {"every": 2.0}, {"keep": True}):
        with pytest.raises(fzero.CheckpointError, match="needed a positive int, or None"):
            fzero.Checkpointer(tmp_path, **options)  # type: ignore[arg-type]


# --- two ranks --------------------------------------------------------------------------------------------------------


def trained(
    directory: Path, until: int, *, disk: Disk | None = None, signals: dict[int, int] | None = None, **batches: Any
) -> dict[str, Any]:
    """A run of this rank, with what it met: the step after which it failed, or was stopped, and how.

    signals: by step, what this rank is sent before it. batches: `raises` or `nan`, the step whose batch is bad.
    """
    met: dict[str, Any] = {}
    spec = SPEC if "nan" not in batches else fzero.Spec(loss=loss, optimizer=SPEC.optimizer, nonfinite="raise")
    try:
        with fzero.Checkpointer(directory, every=2, disk=disk) as saver:
            state = saver.resume(PARAMS, spec)
            met["first"] = state.step
            while state.step < until:
                for _ in range((signals or {}).get(state.step, 0)):
                    os.kill(os.getpid(), signal.SIGTERM)
                given = batch(state.step, "1" if state.step == batches.get("raises") else None)
                if state.step == batches.get("nan"):
                    given["x"].fill_(float("nan"))
                state = fzero.step(state, given)
                try:
                    saver.after(state, {"position": state.step})
                except fzero.CheckpointError as error:
                    met["failed"] = (state.step, str(error))
    except SystemExit as stop:
        met["status"] = stop.code
    except fzero.FzeroError as error:
        met["error"] = f"{type(error).__name__}: {error}"
    except ArithmeticError as error:
        met["error"] = f"own {type(error).__name__}: {error}"
    met["step"] = state.step
    return met


def on_rank_1(directory: Path, until: int, options: dict[str, Any]) -> dict[str, Any]:
    return trained(directory, until, **(options if os.environ["RANK"] == "1" else {}))


def second_signal(directory: Path) -> None:
    trained(directory, 5, signals={3: 2})


def both(directory: Path, until: int, options: dict[str, Any]) -> dict[str, Any]:
    return trained(directory, until, **options)


def test_a_signal_to_one_rank_stops_both_after_one_step(tmp_path: Path) -> None:
    met = values(gloo(2, on_rank_1, tmp_path, 100, {"signals": {5: 1}}))
    assert met == [{"first": 0, "status": 143, "step": 6}] * 2
    assert steps(tmp_path)[-1] == 6
    assert values(gloo(2, on_rank_1, tmp_path, 8, {})) == [{"first": 6, "step": 8}] * 2


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    (outcome,) = gloo(1, second_signal, tmp_path)
    assert outcome == Outcome(error="Died: rank 0 with exit status -15")
    assert 4 not in steps(tmp_path)


def test_a_disk_that_is_full_on_one_rank_is_an_error_on_both_after_the_same_step(tmp_path: Path) -> None:
    met = values(gloo(2, on_rank_1, tmp_path, 40, {"disk": Full(1)}))
    (step, one), (other_step, other) = met[0].pop("failed"), met[1].pop("failed")
    assert met == [{"first": 0, "step": 40}] * 2, "training went on"
    assert step == other_step
    for message in (one, other):
        assert "rank 1 failed while writing its shard" in message
        assert "the disk is full" in message
    assert steps(tmp_path)[-1] == 40, "and so did saving"


def test_an_error_in_the_loss_of_one_rank_ends_both_and_leaves_the_last_save(tmp_path: Path) -> None:
    met = values(gloo(2, both, tmp_path, 9, {"raises": 5}))
    assert met[0]["error"].startswith("DisagreementError: rank 1 failed before step 6: ")
    assert "no luck" in met[0]["error"]
    assert "no luck" in met[1]["error"]
    assert steps(tmp_path)[-1] in (2, 4, 5), "4 may have been late, and begun after step 5"


def test_nan_ends_both_with_the_state_of_before_and_the_last_save(tmp_path: Path) -> None:
    met = values(gloo(2, both, tmp_path, 9, {"nan": 5}))
    for one in met:
        assert one["error"].startswith("NonFiniteError: the gradients of step 6 are not finite")
        assert one["step"] == 5
    assert steps(tmp_path)[-1] in (2, 4, 5)


def with_one_stopped(directory: Path) -> None:
    """Rank 1 stops itself after step 5, and rank 0 ends it once it has reported."""
    pid = directory / "pid"
    try:
        with fzero.Checkpointer(directory / "run") as saver:
            state = saver.resume(PARAMS, fzero.Spec(loss=loss, optimizer=SPEC.optimizer, timeout=2.0))
            while state.step < 20:
                if state.step == 5 and os.environ["RANK"] == "1":
                    pid.write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                state = fzero.step(state, batch(state.step))
                if state.step == 4:
                    saver.save(state)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_stopped_rank_is_named_and_the_last_save_stays(tmp_path: Path) -> None:
    outcomes = gloo(2, with_one_stopped, tmp_path)
    error = outcomes[0].error or ""
    assert error.startswith("HangError: rank 1 is missing"), error
    assert outcomes[1] == Outcome(error="Died: rank 1 with exit status -9")
    assert steps(tmp_path / "run") == [4]
