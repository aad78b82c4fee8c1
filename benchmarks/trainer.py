"""Seconds of a step: `fzero.interop.Trainer` beside a plain loop of `fzero.step`, on CPU processes with one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.trainer
    OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 -m benchmarks.trainer

A step of one is followed by a step of the other, so that both see the same machine. Between two steps the Trainer loads
and collates its batches; the plain loop has them ready. What is printed are medians, and that of the paired quotients.
"""

import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import transformers

import fzero
from fzero.interop import Trainer, TrainingArguments, from_module

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SEQUENCE, VOCAB, STEPS, WARM = 128, 512, 200, 3
# hidden size, layers, rows of a micro batch, micro batches
CASES = ((128, 4, 8, 1), (128, 4, 2, 4), (32, 2, 1, 1))


class Interleaved(transformers.TrainerCallback):
    """After each step of the Trainer, a step of the plain loop; seconds of both."""

    def __init__(self, state: fzero.State, batches: list[Any]) -> None:
        self.state, self.batches = state, batches
        self.trainer: list[float] = []
        self.plain: list[float] = []
        self.began = 0.0

    def on_step_end(self, *given: Any, **more: Any) -> None:
        self.trainer.append(time.perf_counter() - self.began)
        together()
        start = time.perf_counter()
        self.state = fzero.step(self.state, self.batches[self.state.step % len(self.batches)])
        float(self.state.metrics["loss"])  # which the Trainer reads too
        self.plain.append(time.perf_counter() - start)
        together()
        self.began = time.perf_counter()


def together() -> None:
    """Waits for the other ranks, so that a step pays for no rank that is late from the step before."""
    if WORLD > 1:
        torch.distributed.barrier()


def main() -> int:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for hidden, layers, rows, microbatches in CASES:
        trainer, plain = measured(hidden, layers, rows, microbatches)
        pairs = statistics.median(a / b for a, b in zip(trainer, plain, strict=True))
        a, b = 1e3 * statistics.median(trainer), 1e3 * statistics.median(plain)
        if RANK:
            continue
        print(f"{WORLD} rank(s), hidden {hidden}, {layers} layers, {microbatches} x {rows} rows: Trainer {a:.2f} ms, "
              f"loop {b:.2f} ms, {a - b:+.2f} ms, paired {100 * (pairs - 1):+.2f} %", flush=True)  # fmt: skip
    return 0


def measured(hidden: int, layers: int, rows: int, microbatches: int) -> tuple[list[float], list[float]]:
    """Seconds of the steps of either, in pairs."""
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        vocab_size=VOCAB, max_position_embeddings=SEQUENCE, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(3, VOCAB, (20 * rows * microbatches * WORLD, SEQUENCE))
    data = [{"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)} for x in ids]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=50, save_strategy="no",
            per_device_train_batch_size=rows, gradient_accumulation_steps=microbatches, max_steps=STEPS,
            pad_to=SEQUENCE,
        )  # fmt: skip
        beside = Interleaved(*plain_loop(model, data[RANK::WORLD], rows, microbatches))
        trainer = Trainer(model, args, data_collator=stacked, train_dataset=data, callbacks=[beside])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return beside.trainer[WARM:], beside.plain[WARM:]


def plain_loop(model: Any, data: list[Any], rows: int, microbatches: int) -> tuple[fzero.State, list[Any]]:
    """The first state of the same training by hand, and its batches."""
    params, buffers, apply = from_module(model, train=True)

    def loss(params: Any, batch: Any) -> fzero.Mean:
        total = apply(params, buffers, **batch, num_items_in_batch=1).loss
        return fzero.Mean(total, (batch["labels"][:, 1:] != -100).sum())

    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(5e-5), microbatches=microbatches, clip_norm=1.0)
    size = rows * microbatches
    batches = [stacked(data[i : i + size]) for i in range(0, len(data), size)]
    return fzero.init(params, spec, key=fzero.random.key(0)), batches


def stacked(rows: list[Any]) -> Any:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


if __name__ == "__main__":
    sys.exit(main())
