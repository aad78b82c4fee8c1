"""`fzero config`: the table, the Python, the exit status of refusals."""

import re
from pathlib import Path

import pytest

from fzero import cli
from fzero.errors import ConfigError
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
    assert "compress_communication = true: DeepSpeed reads no such key. Take it out; Precision(reduce='int8')" in error
    assert cli.main(["config", str(FILES / "compressed.json"), "--auto", "lr"]) == 2
    assert "--auto lr: needed a key and a value" in capsys.readouterr().err


def test_the_table_does_not_say_of_a_refused_key_what_it_became(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": "8", "zero_optimization": {"stage": 4}, "gradient_clipping": 0.5}')
    assert cli.main(["config", str(file)]) == 2
    table, errors = capsys.readouterr()
    assert "gradient_clipping  0.5" in table
    assert "train_batch_size" not in table, "it said off"
    assert "zero_optimization.stage" not in table, "it said Spec(zero=0)"
    assert "zero_optimization.stage = 4: needed" in errors


def test_values_for_auto(capsys: pytest.CaptureFixture[str]) -> None:
    auto = ["--auto", "train_micro_batch_size_per_gpu=3", "--auto", "communication_data_type=bf16"]
    assert cli.main(["config", str(FILES / "breakdown.json"), "--world", "2", *auto]) == 0
    assert "6 rows a step" in (out := capsys.readouterr().out)
    assert '"bf16" (given)' in out


def test_what_is_open_is_listed_after_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 2}}')
    assert cli.main(["config", str(file)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"zero_optimization.stage +2 +Spec\(zero=2\)", out)
    assert "  give --auto optimizer.params.lr=VALUE" in out
    assert "  give --auto train_micro_batch_size_per_gpu=VALUE" in out
    auto = ["--auto", "optimizer.params.lr=1e-3", "--auto", "train_micro_batch_size_per_gpu=2"]
    assert cli.main(["config", str(file), *auto]) == 0
    assert "still open" not in capsys.readouterr().out
    assert cli.main(["config", str(file), "--python"]) == 2  # there is no Spec yet


def test_no_key_of_a_file_moves_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the report nor in a refusal, nor from the name of the file."""
    for text in (
        '{"\\u001b[2Jx": 1}',
        '{"optimizer": {"type": "\\u001b]0;x\\u0007"}}',
        '{"tensorboard": {"job_name": "\\u009b2J"}}',
    ):
        path = tmp_path / "a\x1b[31m.json"
        path.write_text(text)
        cli.main(["config", str(path)])
        out = "".join(capsys.readouterr())
        assert out
        assert all(c.isprintable() or c == "\n" for c in out), out


@pytest.mark.parametrize(
    "block",
    [
        {"train_micro_batch_size_per_gpu": 10**30},
        {"gradient_accumulation_steps": 1e300},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/a\0b"}}},
    ],
)
def test_counts_and_folders_that_cannot_be(block: dict) -> None:
    with pytest.raises(ConfigError, match=r"needed (a whole number from 1 to|the path of a folder)"):
        ds_config(block)
