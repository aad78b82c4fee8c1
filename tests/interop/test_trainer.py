"""`fzero.interop.Trainer` beside the stock Trainer: the same losses, norms, rates, evaluations, predictions, from the
same script; and what it leaves on disk."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, same_bits, values
from torch import Tensor

import fzero
from fzero.errors import CheckpointError, FzeroError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from trainers import OURS, STOCK, TASKS, Result, make, on_rank, result, trained  # noqa: E402

CLOSE = 1e-5
SHORT = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 4}  # eight steps are more than an epoch
# softmax sees no bias of the keys: its gradient is rounding, of which Adam makes whole steps
KEYS = re.compile(r"(k_proj|key|c_attn)\.bias$")
WHOLE = {"max_steps": 50, "eval_strategy": "steps", "eval_steps": 25}


def gap(a: dict[int, float], b: dict[int, float]) -> float:
    """The largest difference by step, relative to values above 1."""
    assert a.keys() == b.keys()
    assert a
    return max(abs(a[step] - b[step]) / max(1.0, abs(b[step])) for step in a)


def assert_alike(ours: Result, stock: Result) -> None:
    assert gap(ours.losses, stock.losses) < CLOSE
    assert gap(ours.norms, stock.norms) < CLOSE
    assert ours.rates == stock.rates
    assert gap(ours.evals, stock.evals) < CLOSE
    assert ours.params.keys() == stock.params.keys()
    assert ours.programs <= 4


def both(folder: Path, name: str, **options: Any) -> tuple[Result, Result]:
    return trained(OURS, name, folder / OURS, **options), trained(STOCK, name, folder / STOCK, **options)


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.sampled(1)
def test_it_trains_as_the_stock_trainer_does(name: str, tmp_path: Path, whole: bool) -> None:
    """Batches of many lengths, windows of four batches of which the last of an epoch is short, and a short batch."""
    if name == "lora":
        pytest.importorskip("peft")
    ours, stock = both(tmp_path, name, **(WHOLE if whole else SHORT))
    assert_alike(ours, stock)
    apart = {n: float((ours.params[n] - stock.params[n]).abs().max()) for n in ours.params}
    assert max(gap for n, gap in apart.items() if not KEYS.search(n)) < 1e-6
    assert max(apart.values()) < 50 * 5e-5  # steps of so much


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.acceptance
def test_two_ranks_train_as_two_ranks_of_the_stock_trainer_do(name: str, tmp_path: Path, whole: bool) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    outcomes = values(gloo(2, on_rank, str(tmp_path), name, WHOLE if whole else SHORT))
    for stock, ours in outcomes:
        assert_alike(ours, stock)
    assert all(same_bits(outcomes[0][1].params[n], outcomes[1][1].params[n]) for n in outcomes[0][1].params)


def test_two_ranks_divide_by_their_own_tokens_if_asked(tmp_path: Path) -> None:
    """The complaint: without `average_tokens_across_devices` losses and gradients were halved on two ranks."""
    options = {"max_steps": 4, "average_tokens_across_devices": False, "optim": "sgd"}
    for stock, ours in values(gloo(2, on_rank, str(tmp_path), "llama", options)):
        assert gap(ours.losses, stock.losses) < CLOSE
        assert gap(ours.norms, stock.norms) < CLOSE


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.acceptance
def test_in_bf16_it_is_as_near_fp32_as_the_stock_trainer(name: str, tmp_path: Path) -> None:
    """Both run the forward, and no more, under torch.autocast."""
    if name == "lora":
        pytest.importorskip("peft")
    ours, stock = both(tmp_path, name, max_steps=20, bf16=True)
    wide = trained(STOCK, name, tmp_path / "fp32", max_steps=20)
    assert 0 < gap(ours.losses, wide.losses) <= 2 * gap(stock.losses, wide.losses)
    assert gap(ours.norms, wide.norms) <= 2 * gap(stock.norms, wide.norms)


def test_only_the_forward_runs_under_autocast() -> None:
    """As Accelerate prepares a model: what `compute_loss` adds is fp32's, and so are the outputs that it sees."""
    from fzero.interop.trainer.trainer_step import forward_only

    linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16), forward_only(linear):
        output = linear(x)
        assert (output.dtype, (x @ x.t()).dtype) == (torch.float32, torch.float32)
    assert torch.equal(output, linear_in_bf16(linear, x))
    with forward_only(plain := torch.nn.Linear(4, 4)):
        assert "forward" not in vars(plain)


def linear_in_bf16(linear: torch.nn.Linear, x: Tensor) -> Tensor:
    weight, bias = (p.bfloat16() for p in (linear.weight, linear.bias))
    return torch.nn.functional.linear(x.bfloat16(), weight, bias).float()


def weighted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of the caller's: the squares of the logits count too."""
    picked = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    total = picked + 1e-3 * (outputs.logits.square() * (labels != -100)[..., None]).sum()
    return total / num_items_in_batch


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing_factor": 0.1},
        {"average_tokens_across_devices": False, "max_grad_norm": 0.0},
        {"compute_loss_func": weighted, "dataloader_drop_last": True},
        {"gradient_accumulation_steps": 1, "lr_scheduler_type": "inverse_sqrt"},
        {"activation_checkpointing": True, "optim": "sgd", "optim_args": "momentum=0.9"},
        {"optim": "rmsprop", "max_grad_norm": 0.1, "lr_scheduler_type": "constant"},
        {"optim": "adagrad", "weight_decay": 0.2, "learning_rate": 0.05},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.sampled(1)
def test_what_is_asked_for_is_done(options: dict[str, Any], tmp_path: Path) -> None:
    ours, stock = both(tmp_path, "llama", **{**SHORT, "max_steps": 4, **options})
    assert_alike(ours, stock)


def without_values(folder: Path) -> Any:
    """The model that a folder holds, on the meta device, as a script makes it. Buffers have values."""
    accelerate = pytest.importorskip("accelerate")
    config = transformers.AutoConfig.from_pretrained(folder)
    with accelerate.init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.sampled(1)
def test_a_model_without_values_is_read_from_its_folder_and_never_whole(name: str, tmp_path: Path) -> None:
    """With the bits of the model that is whole at first: losses, evaluations and parameters."""
    first = make(OURS, name, tmp_path / "first", **SHORT)
    first.model.save_pretrained(tmp_path / "weights")
    first.train()
    data = {"train_dataset": first.train_dataset, "eval_dataset": first.eval_dataset}
    model, other = (without_values(tmp_path / "weights") for _ in range(2))
    again = type(first)(model, first.args, data_collator=first.data_collator, **data)
    again.train()
    evaluated = type(first)(other, first.args, data_collator=first.data_collator, **data).evaluate()
    assert evaluated["eval_loss"] == make(OURS, name, tmp_path / "whole", **SHORT).evaluate()["eval_loss"]
    a, b = result(first), result(again)
    assert (a.losses, a.evals) == (b.losses, b.evals)
    assert all(same_bits(a.params[n], b.params[n]) for n in a.params)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_model_without_values_and_without_a_folder_is_refused(tmp_path: Path) -> None:
    first = make(OURS, "llama", tmp_path, **SHORT)
    first.model.save_pretrained(tmp_path / "weights")
    model = without_values(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").unlink()
    with pytest.raises(FzeroError, match="on the meta device, and its name_or_path"):
        type(first)(model, first.args, data_collator=first.data_collator, train_dataset=first.train_dataset)


class Halved:
    """A subclass's loss, for either Trainer: padded places weigh nothing in it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)  # type: ignore[misc]
        there = (inputs["labels"] != -100)[..., None]
        loss = loss / 2 + 1e-3 * (outputs.logits.square() * there).sum() / there.sum()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.acceptance
def test_a_subclass_has_its_own_loss_optimizer_and_schedule(tmp_path: Path) -> None:
    """And its own rate for the embedding. The last batch of an epoch has fewer rows, and a program of its own."""
    found = []
    for kind in (OURS, STOCK):
        first = make(
            kind, "llama", tmp_path / kind, **SHORT, gradient_accumulation_steps=1, per_device_train_batch_size=4
        )
        model = first.model
        slow = [p for n, p in model.named_parameters() if "embed" in n]
        rest = [p for n, p in model.named_parameters() if "embed" not in n]
        optimizer = torch.optim.AdamW(
            [{"params": rest}, {"params": slow, "lr": 1e-4}], lr=1e-2, eps=1e-4, weight_decay=0.01
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        again = type("Own", (Halved, type(first)), {})(
            model,
            first.args,
            first.data_collator,
            first.train_dataset,
            first.eval_dataset,
            optimizers=(optimizer, schedule),
        )
        again.train()
        found.append(result(again))
    assert_alike(*found)


@pytest.mark.acceptance
def test_predictions_and_metrics_are_those_of_the_stock_trainer(tmp_path: Path) -> None:
    """Before training. Rows and places that were added are cut off again."""
    seen: list[Any] = []
    for kind in (OURS, STOCK):
        trainer = make(kind, "t5", tmp_path / kind, **SHORT)
        trainer.compute_metrics = lambda p: {"sum": float(abs(p.predictions[0]).sum()), "rows": len(p.label_ids)}
        output = trainer.predict(trainer.eval_dataset)
        seen.append((output.predictions, output.label_ids, output.metrics))
    (ours, our_labels, our_metrics), (stock, labels, metrics) = seen
    assert [x.shape for x in ours] == [x.shape for x in stock]
    for a, b in zip(ours, stock, strict=True):
        assert abs(a - b).max() < 1e-5
    assert (our_labels == labels).all()
    assert our_metrics["test_rows"] == metrics["test_rows"] == 13
    assert our_metrics["test_sum"] == pytest.approx(metrics["test_sum"], rel=1e-5)
    assert our_metrics["test_loss"] == pytest.approx(metrics["test_loss"], rel=1e-5)


def test_lengths_take_few_programs(tmp_path: Path) -> None:
    """Lengths from 3 to 30 become 8, 16 and 32: no more programs than these."""
    trainer = make(OURS, "gpt2", tmp_path, max_steps=30, pad_to=8, gradient_accumulation_steps=1)
    lengths = {len(row["input_ids"]) for row in trainer.train_dataset}
    trainer.train()
    assert len(lengths) > 15
    assert len(trainer.engine.state.runtime.programs) <= 3


# --- files ------------------------------------------------------------------------------------------------------------


def dropping(folder: Path, **options: Any) -> Any:
    """A Trainer of a model with dropout, which saves in the middle."""
    trainer = make(OURS, "gpt2", folder, max_steps=6, save_strategy="steps", save_steps=3, **options)
    trainer.model = trainer.model_wrapped = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=48, attn_pdrop=0.0)
    )
    return trainer


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Data, dropout, optimizer and schedule go on where they were."""
    torch.manual_seed(1)
    whole = dropping(tmp_path)
    whole.train()
    assert {path.name for path in tmp_path.iterdir()} >= {"checkpoint-3", "checkpoint-6"}
    assert not list(tmp_path.rglob("*.bin"))
    torch.manual_seed(2)  # another model: its values come from the checkpoint
    again = dropping(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    a, b = result(whole), result(again)
    assert {step: a.losses[step] for step in (4, 5, 6)} == {step: b.losses[step] for step in (4, 5, 6)}
    assert a.rates == b.rates
    assert all(same_bits(a.params[name], b.params[name]) for name in a.params)


def resumed(folder: str, name: str, options: dict[str, Any], resume: str | None) -> Result:
    return trained(OURS, name, Path(folder), resume, **options)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4)])
@pytest.mark.acceptance
def test_a_run_goes_on_in_another_world(before: int, after: int, tmp_path: Path) -> None:
    """With the same rows a step: the losses are those of the world before."""
    rows = {"gradient_accumulation_steps": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 3, "num_rows": 48}
    options = [{**rows, "per_device_train_batch_size": 8 // world} for world in (before, after)]
    whole = values(gloo(before, resumed, str(tmp_path), "llama", options[0], None))[0]
    rest = values(gloo(after, resumed, str(tmp_path), "llama", options[1], str(tmp_path / "checkpoint-3")))[0]
    assert gap({s: rest.losses[s] for s in (4, 5, 6)}, {s: whole.losses[s] for s in (4, 5, 6)}) < CLOSE
    assert max(float((rest.params[n] - whole.params[n]).abs().max()) for n in rest.params) < 1e-4


@pytest.mark.acceptance
def test_the_best_model_is_there_at_the_end(tmp_path: Path) -> None:
    """The rate is so high that it gets worse, so that the best is not the last."""
    options = {**SHORT, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.3}
    ours, stock = both(tmp_path, "llama", **options, load_best_model_at_end=True)
    assert min(ours.evals.values()) < ours.evals[8] - 0.01
    assert ours.final["eval_loss"] == pytest.approx(min(ours.evals.values()), abs=1e-6)
    assert ours.final["eval_loss"] == pytest.approx(stock.final["eval_loss"], abs=1e-3)


@pytest.mark.parametrize("name", ["t5", "vit"])
@pytest.mark.sampled(1)
def test_what_is_saved_loads_in_transformers(name: str, tmp_path: Path) -> None:
    """Tied weights, a generation config, and over an older file."""
    trainer = make(OURS, name, tmp_path, max_steps=2)
    (tmp_path / "model-00001-of-00002.safetensors").write_text("old")
    trainer.train()
    trainer.save_model()
    again = type(trainer.model).from_pretrained(tmp_path)
    params = fzero.unshard(trainer.engine.state.params)
    assert all(same_bits(p.detach(), params[n]) for n, p in again.named_parameters())
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"config.json", "model.safetensors"} | ({"generation_config.json"} if name == "t5" else set())


def test_adapters_go_in_and_out(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = make(OURS, "lora", tmp_path, max_steps=3)
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 10_000
    params = fzero.unshard(trainer.engine.state.params)
    assert all(same_bits(params[n], base[n]) for n in base)
    again = peft.PeftModel.from_pretrained(TASKS["llama"]()[0], tmp_path)
    loaded = {n: p for n, p in again.named_parameters() if "lora" in n}
    assert loaded
    assert all(same_bits(p.detach(), params[n]) for n, p in loaded.items())
    moved = trainer.engine.state.tree["opt_state"]
    assert fzero.tree.flatten(moved)[0]
    assert all("lora" in p for p in fzero.tree.flatten(moved.mu)[0])


def test_another_trainers_checkpoint_is_refused(tmp_path: Path) -> None:
    trained(STOCK, "llama", tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = make(OURS, "llama", tmp_path, max_steps=4)
    with pytest.raises(CheckpointError, match=r"checkpoint-2.*saved by another Trainer.*from_pretrained"):
        trainer.train(resume_from_checkpoint=True)


# --- the module -------------------------------------------------------------------------------------------------------


def test_the_module_is_empty_until_it_is_gathered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One gather, whose bytes are logged, is enough to generate; training goes on afterwards."""
    trainer = make(OURS, "gpt2", tmp_path, max_steps=2)
    trainer.train()
    assert {p.device.type for p in trainer.model.parameters()} == {"meta"}
    prompt = torch.tensor([[3, 4, 5]])
    with pytest.raises(FzeroError, match=r"GPT2LMHeadModel has no values.*trainer\.gathered\(\)"):
        trainer.model.generate(prompt, max_new_tokens=2)
    size = sum(p.numel() for p in trainer.model.parameters()) * 4
    with caplog.at_level("INFO", logger="fzero"), trainer.gathered() as model:
        assert model.generate(prompt, max_new_tokens=4, do_sample=False).shape == (1, 7)
        assert model.lm_head.weight is model.transformer.wte.weight
    assert f"{size:,} bytes" in caplog.text
    assert {p.device.type for p in trainer.model.parameters()} == {"meta"}
    params = fzero.unshard(trainer.engine.state.params)
    trainer.train()  # anew from where it was
    assert trainer.engine.state.step == 2
    assert not all(same_bits(params[n], p) for n, p in fzero.unshard(trainer.engine.state.params).items())


@pytest.mark.acceptance
def test_a_seq2seq_trainer_generates_with_one_gather(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from fzero.interop import Seq2SeqTrainer, Seq2SeqTrainingArguments

    found = []
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "seed": 5}
    quiet |= {
        "max_steps": 2,
        "predict_with_generate": True,
        "generation_max_length": 6,
        "per_device_eval_batch_size": 4,
    }
    for trainer_class, args_class in (
        (Seq2SeqTrainer, Seq2SeqTrainingArguments),
        (transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments),
    ):
        model, rows, collate = TASKS["t5"]()
        args = args_class(str(tmp_path / trainer_class.__module__), **quiet)
        trainer = trainer_class(model, args, data_collator=collate, train_dataset=rows(16, 0), eval_dataset=rows(6, 1))
        trainer.train()
        with caplog.at_level("INFO", logger="fzero"):
            found.append(trainer.predict(trainer.eval_dataset))
    assert caplog.text.count("bytes of parameters") == 1
    assert (found[0].predictions == found[1].predictions).all()
    assert found[0].metrics["test_loss"] == pytest.approx(found[1].metrics["test_loss"], abs=1e-5)


def test_the_log_has_the_planned_peak(tmp_path: Path) -> None:
    trainer = make(OURS, "llama", tmp_path, max_steps=2)
    trainer.train()
    peaks = [entry["planned_peak_bytes"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(peaks) == 2
    assert peaks[0] > sum(p.numel() * 4 * 3 for p in trainer.model.parameters())


def test_importing_interop_imports_no_transformers() -> None:
    script = "import sys, fzero.interop as i; assert 'transformers' not in sys.modules; assert 'Trainer' in i.__all__"
    script += "; import os; os._exit(0)"  # Python's own end takes a third of a second
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 0


def test_the_estimate_of_work_is_transformers(tmp_path: Path) -> None:
    """Of each batch, though the parameters are counted once."""
    trainer = make(OURS, "llama", tmp_path, max_steps=1)
    for shape in ((2, 3), (4, 5)):
        batch = {"input_ids": torch.zeros(shape, dtype=torch.int64)}
        assert trainer.floating_point_ops(batch) == transformers.Trainer.floating_point_ops(trainer, batch) > 0
    assert trainer.floating_point_ops({"inputs_embeds": torch.zeros(1)}) == 0
