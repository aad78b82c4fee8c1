"""Train an unmodified Hugging Face Llama with its layers over the ranks: each holds a part of every weight matrix.

One command starts four local ranks on the mesh {"dp": 2, "tp": 2}: two groups of ranks split the batch, the two of a
group split the layers. The rules are the model's own plan (`fzero.interop.tp_plan`); the model and the loss do not know
of it. Before the run it prints where leaves lie and what ranks exchange, and why; after it the speed, and the bytes
that a rank holds and sends.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
import ranks
import text
from fzero.interop import from_module, tp_plan

try:
    import transformers
except ImportError:
    sys.exit("tensor_parallel_llama.py needs transformers: pip install 'fzero[hf]'")

EXAMPLES = """
examples:
  python examples/tensor_parallel_llama.py                     four ranks, {"dp": 2, "tp": 2}
  python examples/tensor_parallel_llama.py --sequence          norms and residuals in parts along the tokens
  python examples/tensor_parallel_llama.py --tp 4              every layer over all four ranks
  python examples/tensor_parallel_llama.py --tp 1              no tensor parallelism: the same losses but for rounding
  torchrun --nproc-per-node 4 examples/tensor_parallel_llama.py

results, in --out:
  sharding.txt  leaves, transfers and their reasons
  rankN.log     what ranks other than 0 printed
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tensor_parallel_llama.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--world", type=int, default=4, metavar="N", help="ranks to start on this machine (4)")
    add("--tp", type=int, default=2, metavar="N", help="ranks that share a layer; the others split the batch (2)")
    add("--sequence", action="store_true", help="what ranks of tp sum lies in parts along the tokens")
    add("--zero", type=int, default=3, choices=range(4), help="ZeRO stage among the ranks that split the batch (3)")
    add("--layers", type=int, default=2, metavar="N", help="layers of the model, of width 128 (2)")
    add("--steps", type=int, default=40, metavar="N", help="optimizer steps (40)")
    add("--batch", type=int, default=8, metavar="N", help="sequences per step, over all ranks (8)")
    add("--seq", type=int, default=64, metavar="N", help="bytes per sequence (64)")
    add("--data", type=Path, metavar="PATH", help="a text file or a directory of them (Python's standard library)")
    add("--out", type=Path, default=Path("runs/tensor_parallel_llama"), metavar="DIR", help="for results")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters and the batches (0)")
    args = parser.parse_args(argv)
    args.world = (ranks.here() or (0, args.world))[1]
    if args.world % args.tp:
        parser.error(f"--tp {args.tp}: needed a divisor of --world {args.world}")
    if args.batch % (args.world // args.tp):
        parser.error(f"--batch {args.batch} cannot be cut into parts for {args.world // args.tp} groups of ranks")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return ranks.run(parse(argv), __file__, argv, train)


def llama(args: argparse.Namespace) -> Any:
    """A small Llama over bytes, from its configuration."""
    torch.manual_seed(args.seed)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=args.layers, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=args.seq, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(args: argparse.Namespace, rank: int) -> None:
    """The whole job, as one rank does it."""
    torch.set_num_threads(1)
    model = llama(args)
    params, buffers, apply = from_module(model)
    mesh = {"dp": args.world // args.tp, "tp": args.tp}

    def loss(params: Any, batch: dict[str, Tensor]) -> Tensor:
        logits = apply(params, buffers, input_ids=batch["x"]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten())

    spec = fzero.Spec(
        loss=loss,
        optimizer=fzero.optim.adamw(3e-3),
        mesh=mesh,
        shard=tp_plan(model) if args.tp > 1 else None,
        sequence="tp" if args.sequence and args.tp > 1 else None,
        zero=args.zero,
        clip_norm=1.0,
    )
    corpus = text.load(args.data, args.seq)
    tokens = fzero.data.Tokens(corpus.train, sequence=args.seq, seed=args.seed)
    state = fzero.init(params, spec)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        lowered = fzero.lower(spec, params, next(tokens.batches(args.batch, mesh=mesh)), world_size=args.world)
        print(f"text: {corpus.description}\nmesh: {mesh}")
        if lowered.sharding is not None:
            (args.out / "sharding.txt").write_text(f"{lowered.sharding}\n")
            print(lowered.sharding, flush=True)
    began, sent = 0.0, dict(state.sent_bytes)
    for number, batch in enumerate(itertools.islice(tokens.batches(args.batch, mesh=mesh), args.steps)):
        if number == 1:
            began, sent = time.perf_counter(), dict(state.sent_bytes)  # the first step traces and lowers
        state = fzero.step(state, batch)
        found = float(state.metrics["loss"])
        if rank == 0 and (state.step == 1 or state.step % max(1, args.steps // 10) == 0):
            print(f"step {state.step:>5}  loss {found:.3f}", flush=True)
    if rank == 0:
        if args.steps > 1:
            speed = (args.steps - 1) * args.batch * args.seq / (time.perf_counter() - began)
            print(f"{speed:,.0f} tokens/s")
            for axis, nbytes in state.sent_bytes.items():
                print(f"sent over {axis}: {(nbytes - sent[axis]) // (args.steps - 1):,} bytes a step")
        print("held bytes: " + ", ".join(f"{kind} {nbytes:,}" for kind, nbytes in state.held_bytes.items()))


if __name__ == "__main__":
    sys.exit(main())
