"""Models, losses, optimizers and data that are not of the usual kind: the stock Trainer's numbers, or a word of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import same_bits
from torch import Tensor, nn

import fzero
from fzero.errors import ConfigError, DataError, FzeroError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import (  # noqa: E402
    OURS,
    QUIET,
    STOCK,
    VOCAB,
    Collate,
    Own,
    Row,
    bert,
    classified,
    llama,
    padded,
    points,
    result,
    run,
    seeded,
    sequences,
    stacked,
    text,
)  # fmt: skip

CLOSE = 1e-5


def assert_alike(folder: Path, make: Callable[[], Any], rows: Any, collate: Collate = padded, **given: Any) -> Any:
    """Both have the same losses, norms, rates, evaluations and parameters. Returns fzero's Trainer.
    given: `optimizers` is a function of the model."""
    found = []
    for kind in (OURS, STOCK):
        model = seeded(make)
        own = {"optimizers": given["optimizers"](model)} if "optimizers" in given else {}
        found.append(run(kind, folder / kind, model, rows, collate, **{**given, **own}))
    ours, stock = (result(trainer) for trainer in found)
    for name in ("losses", "norms", "evals"):
        a, b = getattr(ours, name), getattr(stock, name)
        assert a.keys() == b.keys(), name
        assert all(abs(a[step] - b[step]) <= CLOSE * max(1.0, abs(b[step])) for step in b), (name, a, b)
    assert ours.rates == pytest.approx(stock.rates)
    # a softmax leaves out what is added to all places: these gradients are rounding, and Adam takes the sign
    weighty = [n for n in stock.params if not n.endswith(("key.bias", "qa_outputs.bias"))]
    assert all(float((ours.params[n] - stock.params[n]).abs().max()) < 1e-4 for n in weighty)
    return found[0]


class Pooled(nn.Module):
    """A model of the user's that reads every place, and takes no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        scores = self.out(self.table(input_ids).mean(1))
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


def answers(rows: Sequence[Row]) -> Row:
    """Question answering: a softmax over places, which no mask leaves out."""
    batch = padded([{"input_ids": row["input_ids"]} for row in rows])
    ends = torch.tensor([len(row["input_ids"]) - 1 for row in rows])
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "start_positions": ends // 2,
            "end_positions": ends}  # fmt: skip


def maskless(rows: Sequence[Row]) -> Row:
    batch = padded(rows)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


@pytest.mark.parametrize("config", [True, False])
def test_rows_are_not_filled_up_for_a_loss_of_the_users(config: bool, tmp_path: Path) -> None:
    rows = points(15)
    assert_alike(
        tmp_path, lambda: Own(config), rows, stacked, per_device_train_batch_size=4, eval_dataset=rows[:7],
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["answers", "pooled"])
@pytest.mark.sampled(1)
def test_places_are_not_padded_where_they_would_count(name: str, tmp_path: Path) -> None:
    if name == "answers":
        assert_alike(tmp_path, lambda: bert("BertForQuestionAnswering"), text(20, 0), answers, max_steps=4)
    else:
        assert_alike(tmp_path, Pooled, classified(16, 0), maskless, max_steps=4)


def with_all_logits(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of the user's that counts every place, as a distance to a teacher's logits does."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()) + outputs.logits.square().mean()


class WithAllLogits(transformers.Trainer):  # type: ignore[misc]
    """What a script writes over `compute_loss`, here over both Trainers'."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = with_all_logits(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Thawing(transformers.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if state.global_step == 2:
            model.bert.requires_grad_(True)


def test_a_callback_that_thaws_parameters_is_an_error(tmp_path: Path) -> None:
    """The complaint: it changed nothing, without a word."""

    def make() -> Any:
        model = bert("BertForSequenceClassification", num_labels=3)
        model.bert.requires_grad_(False)
        return model

    with pytest.raises(ConfigError, match=r"requires_grad of 'bert\.emb.* became True while training: .* two calls"):
        run(OURS, tmp_path, seeded(make), classified(12, 0), callbacks=[Thawing()])
    assert (
        run(OURS, tmp_path, seeded(make), classified(12, 0), max_steps=2, callbacks=[Thawing()]).state.global_step == 2
    )


@pytest.mark.parametrize("where", ["function", "method"])
def test_places_are_not_padded_for_a_loss_of_the_users(where: str, tmp_path: Path) -> None:
    """The complaint: rows of 20 tokens were padded to 64 without a word, and a loss of the user's counted the rest."""
    rows = [{"input_ids": ids, "labels": ids.clone()} for ids in sequences(8, 0, 20, 20)]
    given: dict[str, Any] = {"compute_loss_func": with_all_logits} if where == "function" else {"over": WithAllLogits}
    assert_alike(
        tmp_path, lambda: llama()[0], rows, eval_dataset=rows[:4], eval_strategy="steps", eval_steps=3, **given
    )


def test_a_step_of_several_lengths_says_what_to_do(tmp_path: Path) -> None:
    model = bert("BertForQuestionAnswering")
    with pytest.raises(
        DataError, match=r"batch/attention_mask: the batches of a step have the shapes .*gradient_accum"
    ):
        run(OURS, tmp_path, model, text(20, 0), answers, gradient_accumulation_steps=2)


def test_as_many_classes_as_places_are_not_cut(tmp_path: Path) -> None:
    rows = classified(9, 0)
    trainer = assert_alike(
        tmp_path, lambda: bert("BertForSequenceClassification", num_labels=64), rows, max_steps=1, eval_dataset=rows,
        eval_strategy="steps", compute_metrics=lambda p: {"columns": float(p.predictions.shape[1])},
    )  # fmt: skip
    assert trainer.evaluate()["eval_columns"] == 64


class Stream(torch.utils.data.IterableDataset[Row]):
    def __iter__(self) -> Iterator[Row]:
        yield from text(22, 0)


def test_what_is_left_over_of_a_stream_is_said_and_no_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """11 batches, and windows of 4."""
    with caplog.at_level(logging.WARNING, "fzero"):
        trainer = run(OURS, tmp_path, llama()[0], Stream(), gradient_accumulation_steps=4)
    assert trainer.engine.state.step == trainer.state.global_step == 6
    assert "the last 3 batches of an epoch fill no window of 4" in caplog.text


def test_what_is_in_no_group_stays_and_counts_in_the_norm(tmp_path: Path) -> None:
    def head(model: Any) -> Any:
        return torch.optim.AdamW(model.lm_head.parameters(), lr=1e-2, weight_decay=0.1), None

    before = {n: p.detach().clone() for n, p in seeded(lambda: llama()[0]).named_parameters()}
    trainer = assert_alike(tmp_path, lambda: llama()[0], text(12, 0), optimizers=head)
    after = fzero.unshard(trainer.engine.state.params)
    assert [n for n in before if not same_bits(before[n], after[n])] == ["lm_head.weight"]


def halves(model: Any, *rates: float) -> list[dict[str, Any]]:
    own = list(model.parameters())
    return [{"params": own[:3], "lr": rates[0]}, {"params": own[3:], "lr": rates[1]}]


def test_groups_of_any_rate_and_decoupled_adam(tmp_path: Path) -> None:
    def frozen(model: Any) -> Any:
        return torch.optim.AdamW(halves(model, 0.0, 1e-2)), None

    def decoupled(model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), 1e-3, weight_decay=0.5, decoupled_weight_decay=True), None

    for optimizers in (frozen, decoupled):
        assert_alike(tmp_path / optimizers.__name__, lambda: llama()[0], text(12, 0), optimizers=optimizers)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adadelta"])
@pytest.mark.sampled(1)
def test_a_cycle_moves_the_momentum_too(kind: str, tmp_path: Path) -> None:
    """OneCycleLR as it stands, over the whole run: it cycles AdamW's beta1 and SGD's momentum."""

    def cycled(model: Any) -> Any:
        more = {"AdamW": {"weight_decay": 0.1}, "SGD": {"momentum": 0.5}, "Adadelta": {"rho": 0.8}}[kind]
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **more)
        turns = {"total_steps": 6, "three_phase": True, "cycle_momentum": kind != "Adadelta"}
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, **turns)

    assert_alike(tmp_path, lambda: llama()[0], text(12, 0), optimizers=cycled)


def by_lambdas(model: Any) -> Any:
    optimizer = torch.optim.AdamW(halves(model, 1e-3, 1e-2))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 1.0, lambda n: float(n > 3)])


def by_cycle(model: Any) -> Any:
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12)


def with_moments(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, None


@pytest.mark.parametrize(
    ("optimizers", "said"),
    [
        (by_lambdas, "a LambdaLR: the rates of groups are no multiples of one another's"),
        (by_cycle, "it cycles the momentum of RMSprop: give cycle_momentum=False"),
        (with_moments, "it has made steps already, and its moments would be lost"),
    ],
)
def test_an_optimizer_or_a_schedule_that_would_be_taken_for_another_is_refused(
    optimizers: Callable[[Any], Any], said: str, tmp_path: Path
) -> None:
    model = llama()[0]
    with pytest.raises(ConfigError, match=said):
        run(OURS, tmp_path, model, text(12, 0), optimizers=optimizers(model))


def test_a_second_run_keeps_the_optimizer_that_was_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for kind in (OURS, STOCK):
        model = llama()[0]
        optimizers = torch.optim.SGD(model.parameters(), lr=0.1), None
        trainer = run(kind, tmp_path / kind, model, text(12, 0), optimizers=optimizers)
        with caplog.at_level(logging.WARNING, "fzero"):
            trainer.train()
        found.append(result(trainer))
    assert found[0].rates == pytest.approx(found[1].rates)
    assert all(float((found[0].params[n] - x).abs().max()) < 1e-5 for n, x in found[1].params.items())
    assert "train() again begins with new moments" in caplog.text


def test_a_module_without_parameters_writes_none(tmp_path: Path) -> None:
    trainer = run(OURS, tmp_path, llama()[0], text(12, 0), max_steps=1)
    with pytest.raises(FzeroError, match="has no values of its own now"):
        trainer.model.state_dict()
    with trainer.gathered() as model:
        assert all(value.device.type == "cpu" for value in model.state_dict().values())


def test_a_rate_that_a_callback_sets_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Halving(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1.5e-5

    from fzero.interop import Trainer, TrainingArguments

    args = TrainingArguments(str(tmp_path), **{**QUIET, "max_steps": 2, "gradient_accumulation_steps": 1})
    trainer = Trainer(llama()[0], args, data_collator=padded, train_dataset=text(8, 0), callbacks=[Halving()])
    with caplog.at_level(logging.WARNING, "fzero"):
        trainer.train()
    assert "param_groups[0]['lr'] is 1.5e-05, and the step takes" in caplog.text


def test_prompts_that_were_learned_are_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = assert_alike(tmp_path, lambda: peft.get_peft_model(llama()[0], config), text(12, 0), max_steps=3)
    trainer.save_model(str(tmp_path / "saved"))
    again = peft.PeftModel.from_pretrained(seeded(lambda: llama()[0]), tmp_path / "saved")
    name = "prompt_encoder.default.embedding.weight"
    assert same_bits(dict(again.named_parameters())[name].detach(), fzero.unshard(trainer.engine.state.params)[name])
