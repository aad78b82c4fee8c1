"""What takes long says so: on rank 0, after two seconds, as lines or as bars."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fzero
from fzero import progress
from fzero.log.progress_log import Progress

pytestmark = pytest.mark.filterwarnings("error")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is printed, with no silence before it."""
    stream = io.StringIO()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    monkeypatch.setenv("FZERO_PROGRESS", "1")
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    return stream


def said(work: progress.Work, stream: io.StringIO, words: str) -> bool:
    """Whether the watcher prints these words, however slow this machine is."""
    for _ in range(3000):
        if words in stream.getvalue():
            return True
        work.ended.wait(0.01)
    return False


def test_nothing_is_said_of_what_is_quick(monkeypatch: pytest.MonkeyPatch, lines: io.StringIO) -> None:
    monkeypatch.setattr(progress, "AFTER", 3600.0)
    with progress.shown("a moment") as work:
        work.advance()
    assert lines.getvalue() == ""


def test_lines_say_what_is_done_and_how_much_of_it(lines: io.StringIO) -> None:
    with progress.shown("saving", total=3e6, unit="B") as work:
        work.advance(1.5e6)
        assert said(work, lines, "fzero: saving, 1.5 of 3 MB (")
        progress.now("params/w")
        assert said(work, lines, "fzero: saving, 1.5 of 3 MB, params/w")
        with progress.shown("hashing", total=4, unit="blocks"):
            progress.advance()
            assert said(work, lines, "fzero: saving, 1.5 of 3 MB, params/w, hashing, 1 of 4 blocks")
        progress.now("")
    assert lines.getvalue().splitlines()[-1].startswith("fzero: saving: done in ")


def test_names_are_no_markup_and_an_error_is_said(monkeypatch: pytest.MonkeyPatch, lines: io.StringIO) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(progress, "REDRAWN", 0.01)
    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    with progress.shown("saving to runs/[/x] [i]") as work:
        assert said(work, terminal, "saving to runs/[/x] [i]")
    assert progress.Display._one is None


def test_an_error_ends_it(lines: io.StringIO) -> None:
    def failing() -> None:
        with progress.shown("a file") as work:
            assert said(work, lines, "a file")
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    before = lines.getvalue()
    assert before.splitlines()[-1].startswith("fzero: a file: failed after ")
    with progress.shown("another") as work:
        assert said(work, lines, "fzero: another (")
    assert lines.getvalue().startswith(before)
    assert not [t for t in threading.enumerate() if t.name == "fzero progress"]


@pytest.mark.parametrize(("name", "value"), [("FZERO_PROGRESS", "0"), ("RANK", "1")])
def test_other_ranks_and_who_does_not_want_it_see_nothing(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, lines: io.StringIO
) -> None:
    monkeypatch.setenv(name, value)
    with progress.shown("saving"):
        assert not [t for t in threading.enumerate() if t.name == "fzero progress"]
    assert lines.getvalue() == ""


def test_on_a_terminal_there_is_one_display_for_training_and_what_is_beside_it(
    monkeypatch: pytest.MonkeyPatch, lines: io.StringIO
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(progress, "REDRAWN", 0.01)
    terminal = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    training = Progress(10, terminal)
    training.show({"step": 3, "loss": 1.0})
    with progress.shown("saving", total=2, unit="leaves") as work:
        work.advance()
        assert said(work, terminal, "saving, 1 of 2 leaves")
    training.show({"step": 4, "loss": 0.5})
    training.close()
    assert "step 4  loss 0.5" in terminal.getvalue()
    assert progress.Display._one is None  # the terminal is the shell's again


def test_steps_saves_loads_and_exports_say_what_they_do(
    monkeypatch: pytest.MonkeyPatch, lines: io.StringIO, tmp_path: Path
) -> None:
    """Each piece of work as it begins, with its size, if one is known."""
    seen: list[str] = []
    shown = progress.Work.__init__

    def spied(self: progress.Work, what: str, total: float = 0, unit: str = "") -> None:
        shown(self, what, total, unit)
        seen.append(f"{what.replace(str(tmp_path), '~')} {self.amount}".strip())

    monkeypatch.setattr(progress.Work, "__init__", spied)
    monkeypatch.setenv("FZERO_PROGRESS", "0")

    def loss(params: Any, x: Any) -> Any:
        return (x @ params["w"]).square().mean()

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    state = fzero.step(fzero.init({"w": torch.ones(256, 1)}, spec), torch.ones(2, 256))
    fzero.save(state, tmp_path / "run")
    state = fzero.load(tmp_path / "run", spec)
    state.params["w"].full()
    fzero.interop.export_safetensors(state, tmp_path / "out")
    sizes = [words for words in seen if not words.startswith("writing 0")]
    assert sizes[:2] == ["making the first state", "lowering the step"]
    assert "saving step 1 to ~/run" in seen
    assert "loading the state" in seen
    assert any(words.startswith("reading ~/run/step-00000001 0 of 1.0") for words in seen), seen
    assert any(words.startswith("gathering the whole of 'params/w'") for words in seen), seen
    assert "writing ~/out 0 of 1.02 kB" in seen
