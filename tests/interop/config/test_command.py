"""`fzero config`: the table, the Python, the exit status of refusals."""

import re
from pathlib import Path

import pytest

from fzero import cli
from fzero.interop import ds_config

FILES = Path(__file__).parent / "files"


def test_the_table_and_the_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", str(FILES / "adam_zero1.json"), "--world", "2"]) == 0
    out = capsys.readouterr().out
    assert out == f"{ds_config(FILES / 'adam_zero1.json', world_size=2)}\n"
    assert re.search(r"optimizer.type +\"Adam\" +Spec\(optimizer=fzero.optim.adamw", out)
    assert cli.main(["config", str(FILES / "adam_zero1.json"), "--world", "2", "--python"]) == 0
    assert "optimizer=fzero.optim.adamw(0.0001, weight_decay=0.01)," in capsys.readouterr().out


def test_accelerates_files_are_known_by_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    assert cli.main(["config", str(FILES / "fsdp.yaml")]) == 0
    assert "on 2 ranks" in capsys.readouterr().out


def test_refusals_are_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", str(FILES / "compressed.json")]) == 2
    error = capsys.readouterr().err
    assert "2 keys are in the way" in error
    assert "compress_communication = true: there is no such key" in error
    assert cli.main(["config", str(FILES / "compressed.json"), "--auto", "lr"]) == 2
    assert "--auto lr: needed a key and a value" in capsys.readouterr().err


def test_values_for_auto(capsys: pytest.CaptureFixture[str]) -> None:
    auto = ["--auto", "train_micro_batch_size_per_gpu=3", "--auto", "communication_data_type=bf16"]
    assert cli.main(["config", str(FILES / "breakdown.json"), "--world", "2", *auto]) == 0
    assert "6 rows a step" in (out := capsys.readouterr().out)
    assert '"bf16" (given)' in out
