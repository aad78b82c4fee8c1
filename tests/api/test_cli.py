"""The `fzero` command: as a module, its version, and a slip in a command's name."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fzero
from fzero import cli


def test_it_is_a_module_and_says_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fzero", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("fzero", run_name="__main__")
    assert (end.value.code or 0, capsys.readouterr().out) == (0, f"fzero {fzero.__version__}\n")


def test_a_slip_in_a_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["confg"])
    assert end.value.code == 2
    assert "there is no command 'confg'. Did you mean 'config'? Commands are version, doctor" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["launch", "train.py"])
def test_who_would_launch_a_script_is_told_torchrun(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It was: did you mean 'plan'?"""
    with pytest.raises(SystemExit):
        cli.main([word, "--nproc", "2"])
    said = capsys.readouterr().err
    assert f"there is no command {word!r}. Scripts are started by torchrun: torchrun --nproc-per-node" in said


def command(*arguments: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fzero", *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
        env={**os.environ, **environment}, encoding="utf-8",
    )  # fmt: skip


def test_a_reader_that_has_enough_is_no_error() -> None:
    """`fzero explain ... | head -1` said: [Errno 32] Broken pipe."""
    read, write = os.pipe()
    os.close(read)
    found = command("version", stdout=write)
    os.close(write)
    assert (found.returncode, found.stderr) == (cli.CLOSED, "")


def test_an_ascii_terminal_gets_what_it_has_no_letter_for_as_python_writes_it(tmp_path: Path) -> None:
    """It was: 'ascii' codec can't encode character, and no report."""
    (tmp_path / "train.py").write_text(PROBLEM)
    found = command(
        "explain", f"{tmp_path}/train.py:problem", "--ranks", "2", "--hardware", "h100", PYTHONIOENCODING="ascii"
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "a step takes" in found.stdout
    assert "\\xb5s" in found.stdout


PROBLEM = """
import torch, fzero

def loss(params, x):
    return (x @ params["w"]).square().mean()

def problem():
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    return spec, {"w": torch.empty(64, 64, device="meta")}, torch.empty(16, 64, device="meta")
"""
