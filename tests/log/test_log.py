"""`fzero.Log`: what a record holds, when it is read, and that nothing it writes to can stop a run."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, values

import fzero
from fzero import Log, optim
from fzero.errors import SpecError, TreeError
from fzero.log.log import _metrics
from fzero.log.plot import read
from fzero.log.progress_log import Progress, text


def spec(**more: Any) -> fzero.Spec:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"]).square().mean()

    return fzero.Spec(loss=loss, optimizer=optim.sgd(optim.linear_warmup(0.1, 4)), clip_norm=1.0, **more)


def states(count: int, **more: Any) -> list[Any]:
    """A run of one rank, a state after each step. Metrics of old states stay readable."""
    state = fzero.init({"w": torch.ones(2, 1)}, spec(**more))
    made = []
    for _ in range(count):
        state = fzero.step(state, torch.ones(3, 2))
        made.append(state)
    return made


class Memory:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, Any]]] = []

    def log(self, record: dict[str, Any], step: int) -> None:
        self.records.append((step, record))


def test_a_record_every_few_steps(tmp_path: Path) -> None:
    tracker, path = Memory(), tmp_path / "deep" / "log.jsonl"
    with Log(
        path, every=2, to=[tracker], tokens=600, flops=1e6, peak_flops=1e9, rate=optim.linear_warmup(0.1, 4), show=False
    ) as log:
        records = [log(state, epoch=1.5) for state in states(6)]
    assert [record and record["step"] for record in records] == [None, 2, None, 4, None, 6]
    last = records[-1] or {}
    assert set(last) == {
        "step", "loss", "grad_norm", "epoch", "rate", "step_seconds", "tokens_per_second", "mfu", "planned_peak_bytes",
        "process_peak_bytes",
    }  # fmt: skip
    assert last["tokens_per_second"] == pytest.approx(600 / last["step_seconds"])
    assert last["mfu"] == pytest.approx(1e6 / last["step_seconds"] / 1e9)
    assert [record["rate"] for record in records if record] == pytest.approx([0.025, 0.075, 0.1])
    assert 0 < last["planned_peak_bytes"] < last["process_peak_bytes"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{name: value for name, value in line.items() if name != "time"} for line in lines] == [
        r for r in records if r
    ]
    assert tracker.records == [(r["step"], {n: v for n, v in r.items() if n != "step"}) for r in records if r]


def test_a_metric_named_step_is_not_the_number_of_the_step(tmp_path: Path) -> None:
    """It took its place, as a float: `fzero plot` refused the file, and trackers got the metric as the step."""

    def step(state: Any, batch: torch.Tensor) -> Any:
        return {"w": state["w"] + 1.0}, {"step": state["w"].sum() / 4}

    state = fzero.init({"w": torch.ones(2)}, fzero.Spec(step=step))
    tracker = Memory()
    with Log(tmp_path / "log.jsonl", every=1, to=[tracker], show=False) as log:
        record = log(fzero.step(state, torch.ones(2)))
    assert record is not None
    assert next(iter(record)) == "step"
    assert record["step"] == read(tmp_path)[0]["step"] == tracker.records[0][0] == 1


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    for state in states(2):
        with Log(tmp_path / "log.jsonl", every=1, show=False) as log:
            log(state)
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2]


def test_the_scale_and_skipped_steps_of_fp16() -> None:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p["w"]).square().mean() * x.max().square()

    fp16 = fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), precision="fp16")
    state, log = fzero.init({"w": torch.ones(2, 1)}, fp16), Log(every=1, show=False, rate=lambda count: count * 1.0)
    state = fzero.step(state, torch.full((3, 2), 1e4))  # overflows
    first = log(state)
    second = log(fzero.step(state, torch.ones(3, 2)))
    assert first is not None
    assert second is not None
    assert (first["skipped"], first["finite"], first["loss_scale"]) == (1.0, 0.0, 2.0**16)
    assert second["rate"] == 0.0, "a skipped step is no count of the schedule"


def test_a_tracker_outside_of_a_list_is_refused() -> None:
    with pytest.raises(SpecError, match=r"Log\(to=...\) is Memory: needed a list of trackers, as to=\[tracker\]"):
        Log(to=Memory(), show=False)  # type: ignore[arg-type]


class Broken:
    def log(self, record: dict[str, Any], step: int) -> None:
        raise RuntimeError("no network")


def test_a_rate_may_be_a_number() -> None:
    spec = fzero.Spec(loss=lambda p, x: (x @ p["w"]).square().mean(), optimizer=optim.sgd(0.1))
    state = fzero.step(fzero.init({"w": torch.ones(2, 1)}, spec), torch.ones(3, 2))
    record = Log(every=1, show=False, rate=0.1)(state)
    assert record is not None
    assert record["rate"] == 0.1
    with pytest.raises(fzero.SpecError, match=r"Log\(rate='0.1'\): needed a number, a schedule"):
        Log(rate="0.1")  # type: ignore[arg-type]


def test_a_tracker_that_fails_is_one_warning_and_the_others_go_on() -> None:
    tracker, broken = Memory(), Broken()
    log = Log(every=1, to=[broken, tracker], show=False)
    made = states(3)
    with pytest.warns(RuntimeWarning, match=r"the tracker Broken failed at step 1: .*no network.*goes on") as seen:
        records = [log(state) for state in made]
    assert all(records)
    assert len(seen) == 1
    assert [step for step, _ in tracker.records] == [1, 2, 3]


def test_a_folder_and_what_is_no_state_are_refused(tmp_path: Path) -> None:
    """The folder was a warning at the first record, after which nothing was written; the other an AttributeError."""
    with pytest.raises(SpecError, match=r"is a folder: needed a file, as '.*log\.jsonl'"):
        Log(tmp_path)
    with pytest.raises(TreeError, match=r"needs the State that fzero.step returned, got dict"):
        Log(show=False)({"loss": 1})  # type: ignore[arg-type]


def test_a_disk_that_fails_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = Log(tmp_path / "file" / "log.jsonl", every=1, show=False)
    made = states(2)
    with pytest.warns(RuntimeWarning, match="cannot be written at step 1") as seen:
        records = [log(state) for state in made]
    assert all(records)
    assert len(seen) == 1


def test_the_methods_of_other_trackers() -> None:
    class TensorBoard:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            given.append((name, step))

    class Mlflow:
        def log_metrics(self, record: dict[str, Any], step: int) -> None:
            given.append((sorted(record)[0], step))

    given: list[tuple[str, int]] = []
    log = Log(every=1, to=[TensorBoard(), Mlflow()], show=False)
    log(states(1)[0])
    assert ("loss", 1) in given
    assert given[-1] == ("grad_norm", 1)
    with pytest.raises(fzero.SpecError, match=r"Log\(to=\[int\]\): needed an object with log\(dict, step=\)"):
        Log(to=[3])
    for wrong in ({"every": 0}, {"tokens": -1}, {"flops": "x"}, {"total": 0}):
        with pytest.raises(fzero.SpecError, match=rf"Log\({next(iter(wrong))}="):
            Log(**wrong)


def test_metrics_are_read_at_once_and_only_when_due(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    monkeypatch.setattr("fzero.log.log._metrics", lambda state: reads.append(state.step) or _metrics(state))
    log = Log(every=3, show=False)
    for state in states(7):
        log(state)
    assert reads == [3, 6]


def test_lines_where_there_is_no_terminal_and_a_bar_where_there_is_one() -> None:
    record = {
        "step": 7,
        "loss": 0.123456,
        "grad_norm": 2.0,
        "rate": 1e-4,
        "tokens_per_second": 1234.5,
        "step_seconds": 0.5,
    }
    plain = io.StringIO()
    Progress(10, plain).show(record)
    assert plain.getvalue() == "step 7  loss 0.1235  norm 2  rate 1.00e-04  1,234 tokens/s  0.5 s a step\n"
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    bar = Progress(10, terminal)
    bar.show(record)
    bar.close()
    assert "step 7  loss 0.1235" in terminal.getvalue()
    assert text({"step": 1}) == "step 1"


class Full(io.StringIO):
    """A stream on a full disk, or of a reader that is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [None, Full(), "closed"])
def test_a_standard_error_that_fails_does_not_end_the_run(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python train.py 2>&1 | head`, a full disk under it, or `2>&-` ended the run at its next record."""
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("sys.stdout", out := io.StringIO())
    with Log(every=1) as log:
        assert [log(state) is not None for state in states(2)] == [True, True]
    assert out.getvalue() == ""


def logged(folder: str) -> list[Any]:
    state = fzero.init({"w": torch.ones(2, 1)}, spec(zero=3))
    log, found = Log(f"{folder}/log.jsonl", every=1, show=False), []
    for _ in range(2):
        state = fzero.step(state, torch.ones(3, 2))
        found.append(log(state) is not None)
    return found


def test_what_the_caller_adds_is_a_number(tmp_path: Path) -> None:
    log = fzero.Log(tmp_path / "log.jsonl", every=1, show=False)
    (state,) = states(1)
    record = log(state, eval_loss=torch.tensor(0.5), epoch=2)
    assert record is not None
    assert (record["eval_loss"], record["epoch"]) == (0.5, 2)
    for wrong in ({"note": "text"}, {"step": 3}, {"norms": torch.ones(2)}):
        with pytest.raises(SpecError, match="needed a number, and another name than step"):
            log(state, **wrong)


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    assert values(gloo(2, logged, str(tmp_path))) == [[True, True], [False, False]]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


def test_no_warning_where_nothing_fails(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Log(tmp_path / "log.jsonl", every=1, show=False) as log:
            assert log(states(1)[0]) is not None


def test_a_full_disk_is_one_warning_also_at_the_end() -> None:
    (state,) = states(1)
    with warnings.catch_warnings(record=True) as said, Log("/dev/full", every=1, show=False) as log:
        warnings.simplefilter("always")
        assert log(state)
        assert log(state)
    (one,) = said
    assert "/dev/full: cannot be written at step 1: [Errno 28] No space left" in str(one.message)


def test_a_record_that_had_no_room_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state,), log = states(1), Log(tmp_path / "log.jsonl", every=1, show=False)
    log(state)
    whole = (tmp_path / "log.jsonl").read_bytes()
    real = log._file

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def write(self, data: bytes) -> int:
            return real.write(data[:7])

    log._file = Full()  # type: ignore[assignment]
    with pytest.warns(RuntimeWarning, match="No space left"):
        log(state)
    assert (tmp_path / "log.jsonl").read_bytes() == whole
    log.close()
