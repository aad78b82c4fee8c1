"""The `fzero` command: as a module, its version, and a slip in a command's name."""

import runpy

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
