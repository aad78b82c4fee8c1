"""What `compute_loss` gives to `self.log` is logged at every step, as the stock Trainer logs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, values

from fzero.errors import CaptureError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import OURS, QUIET, STOCK, bert, llama, padded, run, seeded, sequences, text  # noqa: E402


class Logging:
    """A subclass's loss, for either Trainer."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)  # type: ignore[misc]
        places = (inputs["labels"] != -100).unsqueeze(-1)
        squares = (outputs.logits.square() * places).sum() / places.sum()
        self.log({"squares": squares.detach(), "half": 0.5})  # type: ignore[attr-defined]
        self.log({"places": places.sum()})  # type: ignore[attr-defined]
        return (loss, outputs) if return_outputs else loss


def logging(kind: str, folder: Path, loss: type = Logging, **options: Any) -> Any:
    """A Trainer of either kind with that loss, which leaves padded places out, that has run."""
    from fzero.interop import Trainer, TrainingArguments

    kinds: dict[str, Any] = {
        OURS: (Trainer, TrainingArguments), STOCK: (transformers.Trainer, transformers.TrainingArguments)
    }  # fmt: skip
    base, arguments = kinds[kind]
    options = {"pad_to": 32, **options} if kind == OURS else options
    args = arguments(str(folder), **{**QUIET, "max_steps": 4, "gradient_accumulation_steps": 1, **options})
    data = {"train_dataset": text(16, 0), "eval_dataset": text(6, 1)}
    trainer = type("Own", (loss, base), {})(llama()[0], args, data_collator=padded, **data)
    trainer.train()
    return trainer


def entries(trainer: Any, name: str) -> list[tuple[int, float]]:
    return [(entry["step"], float(entry[name])) for entry in trainer.state.log_history if name in entry]


def test_each_step_logs_what_compute_loss_logs(tmp_path: Path) -> None:
    """At the same places of the log, with the same numbers, in an evaluation too: they change from step to step."""
    ours, stock = (logging(kind, tmp_path / kind, eval_strategy="steps", eval_steps=2) for kind in (OURS, STOCK))
    for name in ("squares", "half", "places"):
        a, b = entries(ours, name), entries(stock, name)
        assert [step for step, _ in a] == [step for step, _ in b]
        assert [value for _, value in a] == pytest.approx([value for _, value in b], abs=1e-5)
    assert len({value for _, value in entries(ours, "squares")}) > 4
    assert [sorted(entry) for entry in ours.state.log_history if "loss" not in entry and "train_loss" not in entry] == [
        sorted(entry) for entry in stock.state.log_history if "loss" not in entry and "train_loss" not in entry
    ]


def test_a_window_logs_the_mean_of_its_micro_batches(tmp_path: Path) -> None:
    """Also of a short one, whose copies weigh nothing: the stock Trainer logs each micro batch."""
    options = {"gradient_accumulation_steps": 3, "dataloader_drop_last": True}
    ours, stock = (logging(kind, tmp_path / kind, **options) for kind in (OURS, STOCK))
    found, single = dict(entries(ours, "squares")), entries(stock, "squares")
    assert len(single) > len(found) == 4
    for step, value in found.items():
        of_step = [x for at, x in single if at == step]
        assert value == pytest.approx(sum(of_step) / len(of_step), abs=1e-5)
    assert {len([x for at, x in single if at == step]) for step in found} == {3, 2}


def on_rank(folder: str) -> list[tuple[Any, Any]]:
    trainers = [logging(kind, Path(folder) / kind) for kind in (OURS, STOCK)]
    return [(dict(entries(trainer, "squares")), dict(entries(trainer, "places"))) for trainer in trainers]


@pytest.mark.acceptance
def test_ranks_log_their_mean(tmp_path: Path) -> None:
    (ours, stock), (other, beside) = values(gloo(2, on_rank, str(tmp_path)))
    assert ours == other
    for name in (0, 1):
        means = {step: (stock[name][step] + beside[name][step]) / 2 for step in stock[name]}
        assert ours[name] == pytest.approx(means, abs=1e-5)


class Vector(Logging):
    def log(self, logs: dict[str, Any], *more: Any) -> None:
        if "squares" in logs:
            logs = {"squares": torch.stack([logs["squares"]] * 2)}
        super().log(logs, *more)  # type: ignore[misc]


def test_what_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"self\.log\(\{'squares': \.\.\.\}\) in compute_loss.*Log its \.mean"):
        logging(OURS, tmp_path, Vector)


# --- losses that are not finite


def sometimes_masked(count: int) -> list[Any]:
    """Rows of which every third has no label: the mean over its labels is 0 / 0."""
    rows = [{"input_ids": ids, "labels": torch.full_like(ids, -100)} for ids in sequences(count, 0, 10, 10)]
    for i, row in enumerate(rows):
        if i % 3:
            row["labels"][i % 10] = row["input_ids"][i % 10]
    return rows


def masked(folder: str, **options: Any) -> list[list[dict[str, float]]]:
    """What both kinds log of a masked language model, each micro batch one row. At the top for `gloo`."""
    logged = []
    for kind in (OURS, STOCK):
        model, rows = seeded(lambda: bert("BertForMaskedLM")), sometimes_masked(23)
        given = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "logging_steps": 2, **options}
        trainer = run(kind, Path(folder) / kind, model, rows, max_steps=7, **given)
        names = ("loss", "grad_norm", "train_loss")
        logged.append([{n: float(e[n]) for n in names if n in e} for e in trainer.state.log_history])
    return logged


@pytest.mark.parametrize("kept", [True, False], ids=["filtered", "as they are"])
@pytest.mark.sampled(1)
def test_a_micro_batch_without_labels_is_logged_as_the_stock_trainer_logs_it(kept: bool, tmp_path: Path) -> None:
    """Its loss is NaN and its gradient 0. `logging_nan_inf_filter` puts the mean of the losses so far in its place."""
    ours, stock = masked(str(tmp_path), logging_nan_inf_filter=kept)
    assert len(stock) == 4
    for a, b in zip(ours, stock, strict=True):
        assert a == pytest.approx(b, rel=1e-5, nan_ok=True)
    assert all(entry["loss"] != entry["loss"] for entry in stock[:-1]) is not kept


@pytest.mark.sampled(1)
def test_on_two_ranks_each_filters_its_own_losses(tmp_path: Path) -> None:
    for ours, stock in values(gloo(2, masked, str(tmp_path))):
        for a, b in zip(ours, stock, strict=True):
            assert a == pytest.approx(b, rel=1e-5)
