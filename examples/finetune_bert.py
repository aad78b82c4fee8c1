"""Fine-tune a BERT classifier with `fzero.interop.Trainer`: a script of transformers, with another import.

The task has the shape of GLUE's SST-2, one sentence and its class: is this line of Python a comment, whose mark is
taken away, or code? Lines have many lengths; the collator pads each batch to its longest, and the Trainer to `--seq`
places, so one program serves all. The model is made from its configuration. At the end: accuracy on lines that nobody
has seen, and the planned peak of a step beside the one that the allocator saw.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import memory
import ranks
import text

try:
    import transformers
except ImportError:
    sys.exit("finetune_bert.py needs transformers and accelerate: pip install 'fzero[hf]'")

from fzero.interop import Trainer, TrainingArguments

Row = dict[str, Any]
PAD, START = 0, 1  # bytes of text are above 8
COMMENT, CODE = 1, 0
HELD_OUT_LINES = 400


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="finetune_bert.py", description=__doc__)
    add = parser.add_argument
    add("--world", type=int, default=2, metavar="N", help="ranks to start on this machine (2)")
    add("--zero", type=int, default=3, choices=range(4), help="ZeRO stage: the same numbers, other memory (3)")
    add("--steps", type=int, default=60, metavar="N", help="optimizer steps (60)")
    add("--batch", type=int, default=32, metavar="N", help="lines per step, over all ranks (32)")
    add("--seq", type=int, default=64, metavar="N", help="bytes per line, at most (64)")
    add("--lr", type=float, default=2e-3, metavar="X", help="the highest learning rate (2e-3)")
    add("--data", type=Path, metavar="PATH", help="a text file or a directory of them (Python's standard library)")
    add(
        "--out", type=Path, default=Path("runs/finetune_bert"), metavar="DIR", help="for the model (runs/finetune_bert)"
    )
    add("--seed", type=int, default=0, metavar="N", help="of the parameters, the lines and dropout (0)")
    args = parser.parse_args(argv)
    args.world = (ranks.here() or (0, args.world))[1]
    if args.batch % args.world:
        parser.error(f"--batch {args.batch}: needed a multiple of {args.world} ranks")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return ranks.run(parse(argv), __file__, argv, train)


def train(args: argparse.Namespace, rank: int) -> None:
    transformers.logging.set_verbosity_error()
    corpus = text.load(args.data, args.seq)
    rows, held_out = (lines(part, args.seq) for part in (corpus.train, corpus.held_out))
    torch.manual_seed(args.seed)
    config = transformers.BertConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=args.seq, pad_token_id=PAD,
    )  # fmt: skip
    training = TrainingArguments(
        str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch // args.world,
        per_device_eval_batch_size=args.batch // args.world,
        learning_rate=args.lr,
        warmup_steps=max(1, args.steps // 10),
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 3),
        logging_steps=max(1, args.steps // 3),
        save_strategy="no",
        average_tokens_across_devices=False,  # with True transformers multiplies the loss of this model by the ranks
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=args.seed,
        pad_to=args.seq,
        spec={"zero": args.zero},
    )
    peak = Peak()
    trainer = Trainer(
        transformers.BertForSequenceClassification(config),
        training,
        data_collator=padded,
        train_dataset=rows,
        eval_dataset=held_out[:HELD_OUT_LINES],
        compute_metrics=accuracy,
        callbacks=[peak],
    )
    peak.trainer = trainer
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    if rank == 0:
        print(f"{peak.peaks}, on each of {args.world} ranks, zero={args.zero}")
        print(f"accuracy on {len(held_out[:HELD_OUT_LINES])} other lines: {found['eval_accuracy']:.1%}")
        print(f"in {args.out}: config.json, model.safetensors")


def lines(corpus: torch.Tensor, most: int) -> list[Row]:
    """Comments without their mark, and as many lines of code, in turns: bytes, and which of the two."""
    comments: list[bytes] = []
    code: list[bytes] = []
    for line in map(bytes.strip, bytes(corpus.tolist()).splitlines()):
        kind, told = (comments, line.lstrip(b"#: ")) if line.startswith(b"#") else (code, line)
        if len(told.split()) > 2:
            kind.append(told)
    pairs = zip(comments, code[:: max(1, len(code) // max(1, len(comments)))], strict=False)
    rows = [(told, label) for pair in pairs for label, told in zip((COMMENT, CODE), pair, strict=True)]
    return [{"input_ids": torch.tensor([START, *told[: most - 1]]), "labels": label} for told, label in rows]


def padded(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest line, as transformers' DataCollatorWithPadding makes it."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=PAD)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Peak(transformers.TrainerCallback):
    """Measures the bytes of the second step."""

    trainer: Any
    peaks: memory.Peaks | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        engine = self.trainer.engine

        def measured(batch: Any) -> Any:
            engine.state, self.peaks = memory.measured_step(engine.state, batch)
            return engine.state.metrics

        if state.global_step == 1:
            engine.step = measured

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        vars(self.trainer.engine).pop("step", None)


if __name__ == "__main__":
    sys.exit(main())
