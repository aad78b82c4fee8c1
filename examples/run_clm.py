"""Fine-tune a causal language model: `accelerate launch run_clm_no_trainer.py` with its arguments, and fzero's loop.

Text becomes blocks of `--block_size` tokens, as there; tokens are bytes, and the text is a file, a directory, or
Python's standard library, so that nothing is downloaded. The model is what `save_pretrained` wrote, or a small GPT-2
made from its configuration. The loop is the whole of training: `fzero.init`, `fzero.step` for each batch,
`fzero.evaluate` after an epoch, `export_safetensors` at the end. The planned peak of a step is printed beside the one
that the allocator saw.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fzero
import memory
import ranks
import text
from fzero.interop import export_safetensors, from_module

try:
    import transformers
except ImportError:
    sys.exit("run_clm.py needs transformers: pip install 'fzero[hf]'")

Batch = dict[str, Tensor]
NO_DECAY = ("bias", "ln_", "layer_norm", "layernorm")  # as in run_clm_no_trainer.py, and GPT-2's own names


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run_clm.py", description=__doc__)
    add = parser.add_argument
    add("--model_name_or_path", type=Path, metavar="DIR", help="a causal language model that save_pretrained wrote")
    add(
        "--train_file", type=Path, metavar="PATH", help="a text file or a directory of them (Python's standard library)"
    )
    add("--per_device_train_batch_size", type=int, default=8, metavar="N", help="blocks of a rank's micro batch (8)")
    add("--per_device_eval_batch_size", type=int, default=8, metavar="N", help="(8)")
    add("--gradient_accumulation_steps", type=int, default=1, metavar="N", help="micro batches of a step (1)")
    add("--block_size", type=int, default=64, metavar="N", help="bytes of a block (64)")
    add("--learning_rate", type=float, default=2e-3, metavar="X", help="the highest (2e-3)")
    add("--weight_decay", type=float, default=0.01, metavar="X", help="of matrices (0.01)")
    add("--num_warmup_steps", type=int, default=10, metavar="N", help="then the rate falls as a cosine (10)")
    add("--num_train_epochs", type=int, default=1, metavar="N", help="(1)")
    add("--max_train_steps", type=int, default=120, metavar="N", help="at most, for all epochs (120)")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters, the order and dropout (0)")
    add("--zero", type=int, default=3, choices=range(4), help="ZeRO stage: the same numbers, other memory (3)")
    add("--precision", default="fp32", choices=("fp32", "bf16"), help="of the computation (fp32)")
    add("--world", type=int, default=2, metavar="N", help="ranks to start on this machine (2)")
    add(
        "--output_dir",
        "--out",
        dest="out",
        type=Path,
        default=Path("runs/run_clm"),
        metavar="DIR",
        help="(runs/run_clm)",
    )
    args = parser.parse_args(argv)
    args.world = (ranks.here() or (0, args.world))[1]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return ranks.run(parse(argv), __file__, argv, train)


def train(args: argparse.Namespace, rank: int) -> None:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(args.seed)  # every rank makes the same model
    corpus = text.load(args.train_file, args.block_size)
    model = load(args)
    params, buffers, apply = from_module(model, train=True)
    evaluated = from_module(model, train=False).apply
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    blocks = fzero.data.Tokens(corpus.train, sequence=args.block_size, seed=args.seed)
    an_epoch = blocks.samples // (rows * args.world)
    num_steps = min(args.max_train_steps, args.num_train_epochs * an_epoch)

    def loss(params: Any, batch: Batch) -> Tensor:
        return apply(params, buffers, **batch).loss

    def measured(params: Any, batch: Batch) -> Tensor:
        return evaluated(params, buffers, **batch).loss

    rate = fzero.optim.warmup_cosine(args.learning_rate, min(args.num_warmup_steps, num_steps - 1), num_steps)
    decays = {name: not any(word in name.lower() for word in NO_DECAY) for name in params}
    spec = fzero.Spec(
        loss=loss,
        optimizer=fzero.optim.adamw(rate, weight_decay=args.weight_decay, mask=decays),
        microbatches=args.gradient_accumulation_steps,
        zero=args.zero,
        precision=args.precision,
        clip_norm=1.0,
    )
    state = fzero.init(params, spec, key=fzero.random.key(args.seed))
    log = fzero.Log(
        args.out / "log.jsonl", every=20, rate=rate, total=num_steps, tokens=rows * args.world * args.block_size
    )
    taken = itertools.islice(blocks.batches(rows * args.world), num_steps)
    for batch in taken:
        state = fzero.step(state, labelled(batch))
        log(state)
        if state.step % an_epoch == 0 or state.step == num_steps:
            value = perplexity(state, held_out(args, corpus, rank), measured)
            if rank == 0:
                print(f"epoch {state.step / an_epoch:.2f}, step {state.step}: perplexity {value:.2f}", flush=True)
    log.close()
    export_safetensors(state, fresh(args.out / "model", rank), tied=apply, config=model.config)
    _, peaks = memory.measured_step(state, labelled(next(blocks.batches(rows * args.world))))
    if rank == 0:
        print(f"{peaks}, on each of {args.world} ranks, zero={args.zero}")
        print(f"in {args.out}: log.jsonl, model/config.json, model/model.safetensors")


def load(args: argparse.Namespace) -> Any:
    if args.model_name_or_path is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=args.block_size, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def labelled(batch: Batch) -> Batch:
    """A batch as transformers takes it: the model shifts the labels by itself."""
    return {"input_ids": batch["x"], "labels": batch["x"]}


def held_out(args: argparse.Namespace, corpus: text.Corpus, rank: int) -> Iterator[Batch]:
    """This rank's part of some batches of text that is not trained on."""
    sizes = {"num_sequences": args.per_device_eval_batch_size * args.world, "sequence": args.block_size}
    return map(
        labelled, text.held_out_batches(corpus.held_out, num_batches=8, rank=rank, world_size=args.world, **sizes)
    )


def perplexity(state: fzero.State, batches: Iterator[Batch], measured: Any) -> float:
    losses = [float(fzero.evaluate(state, batch, measured)) for batch in batches]  # means over the ranks
    return math.exp(sum(losses) / len(losses))


def fresh(folder: Path, rank: int) -> Path:
    """The folder, without what an earlier run left there."""
    for file in folder.glob("*") if rank == 0 else ():
        file.unlink()
    return folder


if __name__ == "__main__":
    sys.exit(main())
