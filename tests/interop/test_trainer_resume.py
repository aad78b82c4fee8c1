"""Checkpoints of a Trainer that others wrote: nothing in them runs, and each end is an error that names the file."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

transformers = pytest.importorskip("transformers")

from trainers import OURS, STOCK, bert, classified, make, padded, run, seeded  # noqa: E402

from fzero.errors import CheckpointError, CorruptError  # noqa: E402
from fzero.interop.trainer import resume, weights  # noqa: E402

PLAIN = {"global_step": 2, "log_history": [{"loss": 1.0, "step": 1}], "best_metric": float("nan"), "epoch": 0.5}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with what transformers reads of a checkpoint."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / resume.STATE).write_text(json.dumps(PLAIN))
    return folder


def test_what_transformers_writes_is_taken(checkpoint: Path) -> None:
    resume.check(checkpoint)
    resume.check(str(checkpoint))
    written = transformers.TrainerState(**PLAIN, best_model_checkpoint=str(checkpoint), max_steps=5, train_batch_size=8)
    written.save_to_json(str(checkpoint / resume.STATE))
    resume.check(checkpoint)
    (checkpoint / resume.STATE).rename(checkpoint / "blob")  # as in the cache of a hub
    (checkpoint / resume.STATE).symlink_to("blob")
    resume.check(checkpoint)


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(classified(20, 0))


def test_a_run_over_a_stream_goes_on(tmp_path: Path) -> None:
    """The complaint: its checkpoints have `sys.maxsize` epochs, and were refused."""
    ended = []
    for kind in (STOCK, OURS):
        losses = []
        for most, resumed in ((4, None), (6, str(tmp_path / kind / "checkpoint-2"))):
            options = {"max_steps": most, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
            model = seeded(lambda: bert("BertForSequenceClassification", num_labels=3))
            made = run(kind, tmp_path / kind, model, Stream(), padded, resumed, **options, warmup_steps=0)
            losses += [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        ended.append(losses)
    assert len(ended[0]) == 10
    assert ended[1] == pytest.approx(ended[0], rel=1e-4)


@pytest.mark.parametrize("counted", ["non_padding", "all"])
def test_tokens_are_counted_as_by_transformers(counted: str, tmp_path: Path) -> None:
    """Not the copies of a row that fill a short batch, nor the places that fzero adds. A resumed run goes on."""
    seen = []
    for kind in (STOCK, OURS):
        for resumed in (None, str(tmp_path / kind / "checkpoint-2")):
            options = {
                "max_steps": 4,
                "save_strategy": "steps",
                "save_steps": 2,
                "include_num_input_tokens_seen": counted,
            }
            model = seeded(lambda: bert("BertForSequenceClassification", num_labels=3))
            more = {"pad_to": 32} if kind == OURS else {}
            made = run(kind, tmp_path / kind, model, classified(5, 0), padded, resumed, **options, **more)
            seen.append(made.state.num_input_tokens_seen)
    assert seen[0] > 0
    assert seen == [seen[0]] * 4


WRONG: list[tuple[str, Any]] = [
    *(("global_step", value) for value in (float("nan"), float("inf"), -5, "x", None, [1], 10**400, 1.5, True)),
    *(("num_train_epochs", value) for value in (float("nan"), "x", 10**400)),
    *(("save_steps", value) for value in (float("inf"), [], True)),
    *(("train_batch_size", value) for value in (-1, 2.0)),
    *(("best_metric", value) for value in ("\x1b[2J", 10**400, {})),
    *(("log_history", value) for value in ({}, [1], "x")),
    ("best_model_checkpoint", 5),
    ("trial_params", []),
    ("stateful_callbacks", []),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value!r:.12}" for name, value in WRONG])
def test_a_field_of_another_type_is_named(name: str, value: Any, checkpoint: Path) -> None:
    (checkpoint / resume.STATE).write_text(json.dumps({**PLAIN, name: value}))
    with pytest.raises(CorruptError, match=rf"trainer_state\.json: {name} is .*, needed a.*resume_from_check") as error:
        resume.check(checkpoint)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"5", b"null", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe\0\x1b[2J"),
        *(
            json.dumps(PLAIN).encode()[:40],
            b'{"global_step": ' + b"9" * 5000 + b"}",
            json.dumps(PLAIN).encode("utf-16"),
        ),
    ],
    ids=range(11),
)
def test_what_is_no_state_of_a_trainer(content: bytes, checkpoint: Path) -> None:
    (checkpoint / resume.STATE).write_bytes(content)
    with pytest.raises(CorruptError, match=r"trainer_state\.json: (is not what transformers wrote|has no global_step)"):
        resume.check(checkpoint)


def test_a_field_that_transformers_does_not_know(checkpoint: Path) -> None:
    """It would be an argument of a constructor."""
    (checkpoint / resume.STATE).write_text(json.dumps({**PLAIN, "\x1b[2J": 1}))
    with pytest.raises(CorruptError, match=r"has the field '\\x1b\[2J', which transformers .* does not know"):
        resume.check(checkpoint)


def test_what_is_no_file_is_not_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = checkpoint / resume.STATE
    makers: list[Callable[[], object]] = [lambda: os.mkfifo(file), file.mkdir, lambda: file.symlink_to("/dev/zero")]
    makers += [lambda: file.symlink_to(file), lambda: file.symlink_to("nothing")]
    for maker in [*makers, lambda: None]:
        if os.path.lexists(file):
            weights.remove(file)
        maker()
        with pytest.raises(CheckpointError, match=r"trainer_state\.json: is missing, or no plain file"):
            resume.check(checkpoint)
    file.write_text(json.dumps(PLAIN))
    monkeypatch.setattr(resume, "MOST_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json: is \d+ bytes long: such a file has at most 10"):
        resume.check(checkpoint)


@pytest.mark.parametrize("given", ["", "a\0b", 5, 1.5, b"x", ["x"], "nothing\x1b[2J", "x" * 5000, "/dev/null", "loop"])
def test_what_is_no_folder(given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match=r"is no folder|needed True or the path of a checkpoint-N") as error:
        resume.check(given)
    assert str(error.value).isprintable()


# --- a run ------------------------------------------------------------------------------------------------------------


class Code:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Trainer after two steps of three, both saved."""
    trainer = make(OURS, "gpt2", tmp_path_factory.mktemp("run"), max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.args.max_steps = 3
    return trainer


@pytest.fixture
def saved(trained: Any, tmp_path: Path) -> Path:
    """A copy of its second checkpoint."""
    return Path(shutil.copytree(Path(trained.args.output_dir) / "checkpoint-2", tmp_path / "checkpoint-2"))


def test_no_pickle_in_a_checkpoint_runs(trained: Any, saved: Path) -> None:
    """Whatever the name of its file; the one that transformers reads ends the run in words of fzero's."""
    mark = saved / "ran"
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
        "pytorch_model.bin",
        "optimizer.bin",
    ):
        (saved / name).write_bytes(pickle.dumps(Code(mark)))
    trained.train(resume_from_checkpoint=str(saved))
    assert trained.state.global_step == 3
    for content in ({"python": Code(mark)}, [1], {"python": 1, "numpy": 2, "cpu": 3}, {}):
        torch.save(content, saved / "rng_state.pth")
        with pytest.raises(CorruptError, match=r"rng_state.*holds no state of generators.*remove the file") as error:
            trained._load_rng_state(str(saved))
        assert "weights_only" not in str(error.value)
    assert not mark.exists()


def test_files_of_two_checkpoints_are_no_checkpoint(trained: Any, saved: Path) -> None:
    """The data would go on elsewhere than the parameters."""
    shutil.copy(Path(trained.args.output_dir) / "checkpoint-1" / resume.STATE, saved)
    with pytest.raises(CorruptError, match=r"global_step is 1, and the state beside it has made 2 steps"):
        trained.train(resume_from_checkpoint=str(saved))


def test_the_highest_number_is_not_taken_on_trust(trained: Any) -> None:
    folder = Path(trained.args.output_dir) / "checkpoint-999999999999"
    folder.mkdir()
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint-999999999999/trainer_state.json: is missing"):
            trained.train(resume_from_checkpoint=True)
    finally:
        folder.rmdir()


def test_links_and_pipes_in_the_way_of_a_save(trained: Any, tmp_path: Path) -> None:
    """A link is removed, and not what it points to; a folder that only looks like a file of the model stays."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    out = tmp_path / "out"
    (out / "model-old.safetensors").mkdir(parents=True)
    (out / "fzero").symlink_to(victim)
    (out / "model.safetensors").symlink_to(victim / "precious")
    trained._save_optimizer_and_scheduler(str(out))
    trained.save_model(str(out))
    assert (victim / "precious").read_text() == "x"
    assert [file.name for file in victim.iterdir()] == ["precious"]
    assert (out / "fzero").is_dir()
    assert not (out / "fzero").is_symlink()
    assert not (out / "model.safetensors").is_symlink()
    assert (out / "model-old.safetensors").is_dir()
    os.remove(out / "model.safetensors")
    (out / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"out: the model cannot be written: .*name another folder"):
        trained.save_model(str(out))
