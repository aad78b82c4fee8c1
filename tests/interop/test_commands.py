"""fzero convert: every form of checkpoint from every other."""

import json
from pathlib import Path

import pytest
import torch
from exchanged import same, spec_of, tied, trained
from safetensors.torch import load_file, save_file

import fzero
from fzero import cli
from fzero.errors import MismatchError


@pytest.mark.acceptance
def test_convert_leads_from_every_form_to_every_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, (params, apply) = trained(), tied()
    fzero.save(state, tmp_path / "run")

    def convert(source: str, target: str, *options: str) -> None:
        assert cli.main(["convert", str(tmp_path / source), str(tmp_path / target), *options]) == 0
        assert f"wrote {tmp_path / target}" in capsys.readouterr().out

    (tmp_path / "c.json").write_text('{"model_type": "x"}')
    convert("run", "hf", "--to", "safetensors", "--config", str(tmp_path / "c.json"))
    convert("hf", "dcp", "--to", "dcp")
    convert("dcp", "again", "--to", "fzero")
    full = fzero.unshard(state.params)
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), full)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "x"}
    loaded = fzero.load(tmp_path / "again", spec_of(apply), like=params, strict=False)  # it has no moments
    assert same(fzero.unshard(loaded.params), full)
    nested = fzero.Spec(loss=lambda p, b: p["a"]["b"].sum(), optimizer=spec_of(apply).optimizer)
    with pytest.raises(MismatchError, match="has no leaf of this state that fits: strict=False would load nothing"):
        fzero.load(tmp_path / "again", nested, like={"a": {"b": torch.ones(2)}}, strict=False)
    for more, said in (
        (["/proc/nowhere/x"], "mkdir failed"),
        (["x", "--config", "none.json"], "none.json"),
    ):
        assert cli.main(["convert", str(tmp_path / "run"), "--to", "safetensors", *more]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "x"), "--to", "fzero"]) == 2
    assert "is a checkpoint of fzero already" in capsys.readouterr().err


def test_what_convert_cannot_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words were of a JSON text without a name, and of dict.update; a part of a folder of tensors was not read."""
    state = trained()
    fzero.save(state, tmp_path / "run")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "c.json").write_text('{"a": True}')
    (tmp_path / "list.json").write_text("[1]")

    def says(source: str, *more: str) -> str:
        assert cli.main(["convert", str(tmp_path / source), str(tmp_path / "out"), "--to", *more]) == 2
        return capsys.readouterr().err

    wrong = says("run", "safetensors", "--config", str(tmp_path / "c.json"))
    assert "c.json: line 1, column 7: 'T' cannot stand here. Write true" in wrong
    wrong = says("run", "safetensors", "--config", str(tmp_path / "list.json"))
    assert "list.json: holds list, but a configuration is a block of keys" in wrong
    wrong = says("model.safetensors", "dcp", "--part", "params")
    assert "holds tensors alone, so there is no part 'params' of it. Leave --part out" in wrong
    for option in (["--config", "none.json"], ["--max-shard-bytes", "40"]):  # they were read by nothing
        assert f"{' '.join(option)}: --to dcp has none. Leave it out, or write --to safetensors" in says(
            "run", "dcp", *option
        )
    assert "max_shard_bytes=0): needed a positive int" in says("run", "safetensors", "--max-shard-bytes", "0")
