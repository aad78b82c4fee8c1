"""Small runs of a Hugging Face Trainer: stock, and fzero's; models from a configuration, rows of many lengths."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 32
SHORT, LONG = 3, 30  # lengths of rows
STOCK, OURS = "stock", "ours"


class Result(NamedTuple):
    """What a run left: what was logged by step, {name: whole parameter}, its programs and evaluations, and its end."""

    losses: dict[int, float]
    norms: dict[int, float]
    rates: dict[int, float]
    evals: dict[int, float]
    params: dict[str, Tensor]
    programs: int
    final: dict[str, float]


def trained(kind: str, name: str, folder: Path, resume: str | None = None, **options: Any) -> Result:
    """One run of the model `name` by a Trainer of a kind. options: of TrainingArguments."""
    trainer = make(kind, name, folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return result(trainer)


def result(trainer: Any) -> Result:
    import fzero

    found: dict[str, dict[int, float]] = {"loss": {}, "grad_norm": {}, "learning_rate": {}, "eval_loss": {}}
    for entry in trainer.state.log_history:
        for key, values in found.items():
            if key in entry:
                values[entry["step"]] = float(entry[key])
    final = trainer.evaluate() if trainer.eval_dataset is not None else {}
    engine = getattr(trainer, "engine", None)
    if engine is None:
        params = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        return Result(*found.values(), params, 0, final)
    runtime = engine.state.runtime
    programs = len(runtime.programs) + len(runtime.evaluations)
    return Result(*found.values(), fzero.unshard(engine.state.params), programs, final)


def make(kind: str, name: str, folder: Path, **options: Any) -> Any:
    """A Trainer of the model `name`, of either kind."""
    import transformers

    if kind == OURS:
        from fzero.interop import Trainer, TrainingArguments

        options = {"pad_to": 32, **options}
    else:
        from transformers import Trainer, TrainingArguments  # type: ignore[assignment]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loss, num_rows = options.pop("compute_loss_func", None), options.pop("num_rows", 45)
    args = TrainingArguments(str(folder), **{**QUIET, **options})
    model, rows, collate = TASKS[name]()
    held_out = rows(13, 1) if args.eval_strategy != "no" else None
    data = {"train_dataset": rows(num_rows, 0), "eval_dataset": held_out}
    return Trainer(model, args, data_collator=collate, compute_loss_func=loss, **data)


QUIET: dict[str, Any] = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "seed": 5,
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 4,
    "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1,
}  # fmt: skip

Row = dict[str, Tensor]
Collate = Callable[[Sequence[Row]], Row]
Task = tuple[Any, Callable[[int, int], list[Row]], Collate]


def seeded(make: Callable[[], Any]) -> Any:
    """A model with the same values in every process. Dropout is off."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def sequences(count: int, seed: int, low: int = SHORT, high: int = LONG) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def text(count: int, seed: int) -> list[Row]:
    return [{"input_ids": ids, "labels": ids.clone()} for ids in sequences(count, seed)]


def classified(count: int, seed: int) -> list[Row]:
    return [{"input_ids": ids, "labels": ids.sum() % 3} for ids in sequences(count, seed)]


def translated(count: int, seed: int) -> list[Row]:
    pairs = zip(sequences(count, seed), sequences(count, seed + 7, 2, 12), strict=True)
    return [{"input_ids": ids, "labels": labels} for ids, labels in pairs]


def pictures(count: int, seed: int) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 3, 8, 8, generator=generator)
    return [{"pixel_values": x, "labels": (x.sum() > 0).long()} for x in values]


def padded(rows: Sequence[Row]) -> Row:
    """As transformers' collators: each batch as long as its longest row."""
    fill = {"input_ids": 0, "labels": -100}
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if values[0].dim() == 1:
            longest = max(map(len, values))
            values = [F.pad(x, (0, longest - len(x)), value=fill[name]) for x in values]
        batch[name] = torch.stack(values)
    if "input_ids" in batch:
        batch["attention_mask"] = (batch["input_ids"] != 0).long()
    return batch


def llama(layers: int = 1) -> Task:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return seeded(lambda: transformers.LlamaForCausalLM(config)), text, padded


def gpt2() -> Task:
    import transformers

    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=VOCAB, n_positions=48, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return seeded(lambda: transformers.GPT2LMHeadModel(config)), text, padded


def bert() -> Task:
    import transformers

    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=VOCAB,
        num_labels=3, max_position_embeddings=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return seeded(lambda: transformers.BertForSequenceClassification(config)), classified, padded


def t5() -> Task:
    import transformers

    config = transformers.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        vocab_size=VOCAB,
        dropout_rate=0,
        decoder_start_token_id=0,
    )
    return seeded(lambda: transformers.T5ForConditionalGeneration(config)), translated, padded


def vit() -> Task:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=2, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return seeded(lambda: transformers.ViTForImageClassification(config)), pictures, padded


def lora() -> Task:
    import peft

    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0, task_type="CAUSAL_LM"
    )
    return seeded(lambda: peft.get_peft_model(llama()[0], config)), text, padded


TASKS = {
    "llama": llama,
    "llama of two layers": partial(llama, 2),
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "lora": lora,
}


def on_rank(folder: str, name: str, options: dict[str, Any]) -> tuple[Result, Result]:
    """Both kinds on this rank, one after the other. At the top for `gloo`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return trained(STOCK, name, Path(folder) / STOCK, **options), trained(OURS, name, Path(folder) / OURS, **options)


# --- of a model and data of a test's own


def run(
    kind: str, folder: Path, model: Any, rows: Any, collate: Collate = padded, resume: str | None = None, **given: Any
) -> Any:
    """A Trainer of either kind that has run. given: of the Trainer (optimizers, compute_metrics, eval_dataset), and of
    TrainingArguments; over: a subclass of transformers' Trainer, whose methods lie over either kind's."""
    import transformers

    from fzero.interop import Trainer, TrainingArguments

    names = ("optimizers", "compute_metrics", "eval_dataset", "callbacks", "compute_loss_func")
    over = given.pop("over", None)
    beside = {name: given.pop(name) for name in names if name in given}
    options = {**QUIET, "max_steps": 6, "gradient_accumulation_steps": 1, **given}
    kinds: dict[str, Any] = {
        OURS: (Trainer, TrainingArguments), STOCK: (transformers.Trainer, transformers.TrainingArguments)
    }  # fmt: skip
    trainer, arguments = kinds[kind]
    trainer = type("Trainer", (trainer,), {n: f for n, f in vars(over).items() if callable(f)}) if over else trainer
    made = trainer(model, arguments(str(folder), **options), data_collator=collate, train_dataset=rows, **beside)
    made.train(resume_from_checkpoint=resume)
    return made


def bert(kind: str, **given: Any) -> Any:
    import transformers

    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=VOCAB,
        max_position_embeddings=80, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **given,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


class Own(nn.Module):
    """A model of the user's. Its loss counts every row, whatever the label."""

    def __init__(self, config: bool = True) -> None:
        import transformers

        super().__init__()
        self.out = nn.Linear(8, 1)
        if config:
            self.config = transformers.PretrainedConfig()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.out(x).squeeze(-1)
        assert labels is not None
        return {"loss": F.binary_cross_entropy_with_logits(scores, labels.float()), "logits": scores}


def points(count: int) -> list[Row]:
    values = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return [{"x": x, "labels": (x.sum() > 0).long()} for x in values]


def stacked(rows: Sequence[Row]) -> Row:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
