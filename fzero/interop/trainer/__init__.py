"""trainer: Hugging Face's Trainer with fzero as its engine. See README.md. Needs `pip install fzero[hf]`."""

from __future__ import annotations

from dataclasses import dataclass

import transformers

from fzero.interop.trainer.arguments import TrainingArguments
from fzero.interop.trainer.trainer import Mixin

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]


class Trainer(Mixin):
    """transformers' Trainer, with its arguments, whose engine is fzero. docs/trainer.md says what becomes of what.

    From the start of training the parameters are in `trainer.engine.state`, in parts, and the module is on the meta
    device. `trainer.save_model(folder)` writes it for `from_pretrained`; `with trainer.gathered() as model` has it
    whole. Raises ConfigError, at once, with all that cannot work.

    >>> import contextlib, tempfile, torch
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    >>> rows = [{"input_ids": torch.arange(n) % 16, "labels": torch.arange(n) % 16} for n in (6, 6, 6, 6)]
    >>> with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
    ...     args = TrainingArguments(folder, max_steps=2, per_device_train_batch_size=2, pad_to=8, report_to="none",
    ...                              use_cpu=True, save_strategy="no", disable_tqdm=True, logging_strategy="no")
    ...     trainer = Trainer(transformers.LlamaForCausalLM(config), args, train_dataset=rows)
    ...     result = trainer.train()
    ...     trainer.save_model(folder)
    ...     again = transformers.LlamaForCausalLM.from_pretrained(folder)
    >>> result.global_step, trainer.engine.state.step, again.config.vocab_size
    (2, 2, 16)
    """


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):
    """transformers' Seq2SeqTrainingArguments with what `TrainingArguments` has here."""


class Seq2SeqTrainer(Mixin, transformers.Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer over fzero, as `Trainer`. With predict_with_generate, an evaluation gathers the
    model once."""
