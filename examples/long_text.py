"""Train a byte-level GPT on long sequences, on one device: each byte looks at a window of the bytes before it.

The model is that of `train_gpt.py`; its attention is `fzero.sparse.attention` with a causal window, whose time and
memory are linear in the length. Several layers see further than one window: two layers of 256 bytes see 511. Before
the run it prints the peak that is planned, beside that of attention to all bytes; after it the speed.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fzero
import text
from fzero import sparse
from gpt import causal, init_gpt, loss_fn, sizes

EXAMPLES = """
examples:
  python examples/long_text.py                          sequences of 8,192 bytes, a window of 256
  python examples/long_text.py --seq 32768 --window 512 longer ones
  python examples/long_text.py --window 0               all bytes before, for comparison
  python examples/long_text.py --data book.txt          a text of your own
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="long_text.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seq", type=int, default=8192, metavar="N", help="bytes per sequence, a multiple of 16 (8192)")
    add("--window", type=int, default=256, metavar="N", help="bytes that a byte sees; 0: all before it (256)")
    add("--size", default="small", choices=sizes(1), help="0.1M, 0.8M or 85M parameters beside positions (small)")
    add("--steps", type=int, default=20, metavar="N", help="optimizer steps (20)")
    add("--batch", type=int, default=1, metavar="N", help="sequences per step (1)")
    add("--data", type=Path, metavar="PATH", help="a text file or a directory of them (Python's standard library)")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters and the batches (0)")
    args = parser.parse_args(argv)
    if args.seq % 16 or args.seq < 16:
        parser.error(f"--seq {args.seq}: needed a multiple of 16, as {max(16, args.seq + -args.seq % 16)}")
    if args.window < 0:
        parser.error(f"--window {args.window}: needed 0 or more")
    return args


def spec_of(args: argparse.Namespace, window: int) -> fzero.Spec:
    """The step, with attention to `window` bytes; 0: to all before."""
    attend = causal
    if window:
        layout = sparse.sliding_window(args.seq, window=window, causal=True)
        attend = partial(sparse.attention, layout=layout)
    loss = partial(loss_fn, attend=attend)
    return fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(2e-3), clip_norm=1.0)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    config = sizes(args.seq)[args.size]
    corpus = text.load(args.data, args.seq)
    tokens = fzero.data.Tokens(corpus.train, sequence=args.seq, seed=args.seed)
    batches = tokens.batches(args.batch)

    def init(key: Tensor) -> Any:
        return init_gpt(key, config)

    spec = spec_of(args, args.window)
    print(f"text: {corpus.description}")
    given = next(tokens.batches(args.batch))
    for name, one in ((f"a window of {args.window}", spec), ("all before", spec_of(args, 0))):
        if one is spec or args.window:
            peak = fzero.lower(one, init, given).memory.peak
            print(f"planned peak with {name}: {peak / 1e6:,.1f} MB")
    state = fzero.init(init, spec, key=fzero.random.key(args.seed))
    began = 0.0
    for number, batch in enumerate(itertools.islice(batches, args.steps)):
        if number == 1:
            began = time.perf_counter()  # the first step traces and lowers
        state = fzero.step(state, batch)
        if state.step == 1 or state.step % max(1, args.steps // 10) == 0:
            print(f"step {state.step:>5}  loss {float(state.metrics['loss']):.3f}", flush=True)
    if args.steps > 1:
        seconds = time.perf_counter() - began
        print(f"{(args.steps - 1) * args.batch * args.seq / seconds:,.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
