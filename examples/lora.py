"""LoRA: a GPT whose trained weights stay frozen, and small adapters that teach it another kind of text.

Two runs. The first trains all of a small GPT on Python source. The second trains on the same text with the case of
every letter swapped, and of all its parameters only `lora/**` (`Spec(trainable=...)`): low-rank products that are added
to the weights of the blocks. The frozen base is sharded and gathered like any parameter, but no gradient of it is made
or moved, and the optimizer holds no moments for it.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import fzero
import memory
import ranks
import text
from fzero import optim, random, tree
from gpt import Batch, Params, init_gpt, loss_fn, sizes

RANK = 8
ALPHA = 16.0  # the adapters' product is multiplied by ALPHA / RANK
ADAPTED = (("attention", "qkv"), ("attention", "project"), ("mlp", "up"), ("mlp", "down"))


def init_lora(key: Tensor, base: Params) -> Params:
    """Adapters for the linear layers of every block: `down` (RANK, in) is random, `up` (out, RANK) zero."""

    def adapter(key: Tensor, weight: Tensor) -> Params:
        num_out, num_in = weight.shape
        return {"down": random.normal(key, (RANK, num_in)) / num_in**0.5, "up": torch.zeros(num_out, RANK)}

    blocks = []
    for block, block_key in zip(base["blocks"], random.split(key, len(base["blocks"])), strict=True):
        keys = random.split(block_key, len(ADAPTED))
        parts = zip(ADAPTED, keys, strict=True)
        blocks.append({f"{a}_{b}": adapter(k, block[a][b]["weight"]) for (a, b), k in parts})
    return {"blocks": blocks}


def adapted(params: Params) -> Params:
    """The base with the adapters' products added: parameters for `gpt`. Nothing of it outlives the loss."""
    blocks = []
    for block, lora in zip(params["base"]["blocks"], params["lora"]["blocks"], strict=True):
        block = {name: dict(part) for name, part in block.items()}
        for a, b in ADAPTED:
            one = lora[f"{a}_{b}"]
            weight = block[a][b]["weight"] + (ALPHA / RANK) * (one["up"] @ one["down"])
            block[a][b] = {**block[a][b], "weight": weight}
        blocks.append(block)
    return {**params["base"], "blocks": blocks}


def lora_loss(params: Params, batch: Batch) -> Tensor:
    return loss_fn(adapted(params), batch)


def swapped(corpus: Tensor) -> Tensor:
    """The bytes of a text with the case of every letter swapped."""
    table = torch.tensor(list(bytes(range(256)).swapcase()), dtype=torch.uint8)
    return table[corpus.long()]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lora.py", description=__doc__)
    add = parser.add_argument
    add("--world", type=int, default=2, metavar="N", help="ranks to start on this machine (2)")
    add("--zero", type=int, default=3, choices=range(4), help="ZeRO stage: the same numbers, other memory (3)")
    add("--steps", type=int, default=150, metavar="N", help="steps, of the base and then of the adapters (150)")
    add("--batch", type=int, default=16, metavar="N", help="sequences per step, over all ranks (16)")
    add("--seq", type=int, default=64, metavar="N", help="bytes per sequence (64)")
    add("--data", type=Path, metavar="PATH", help="a text file or a directory of them (Python's standard library)")
    add("--out", type=Path, default=Path("runs/lora"), metavar="DIR", help="where other ranks' output goes (runs/lora)")
    add("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args(argv)
    args.world = (ranks.here() or (0, args.world))[1]
    if args.batch % args.world:
        parser.error(f"--batch {args.batch}: needed a multiple of {args.world} ranks")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return ranks.run(parse(argv), __file__, argv, train)


def train(args: argparse.Namespace, rank: int) -> None:
    corpus = text.load(args.data, args.seq)
    config = sizes(args.seq)["tiny"]
    spec = fzero.Spec(loss=loss_fn, optimizer=optim.adamw(3e-3), zero=args.zero, clip_norm=1.0)
    state = fzero.init(lambda key: init_gpt(key, config), spec, key=random.key(args.seed))
    state = fit(args, "base", state, drawn(args, corpus.train, rank), rank)
    base = fzero.unshard(state.params)

    def start(key: Tensor) -> Params:
        return {"base": base, "lora": init_lora(key, base)}

    spec = fzero.Spec(loss=lora_loss, optimizer=optim.adamw(1e-2), zero=args.zero, clip_norm=1.0, trainable="lora/**")
    state = fzero.init(start, spec, key=random.key(args.seed + 1))
    before = fzero.unshard(state.params)
    state = fit(args, "adapters", state, drawn(args, swapped(corpus.train), rank), rank)
    report(args, state, before, swapped(corpus.held_out), rank)


def drawn(args: argparse.Namespace, corpus: Tensor, rank: int) -> Iterator[Batch]:
    """This rank's part of random batches of training text."""
    tokens = fzero.data.Tokens(corpus, sequence=args.seq, order="random", seed=args.seed)
    return itertools.islice(tokens.batches(args.batch, rank=rank, world_size=args.world), args.steps)


def fit(args: argparse.Namespace, name: str, state: fzero.State, batches: Iterator[Batch], rank: int) -> fzero.State:
    for batch in batches:
        state = fzero.step(state, batch)
        if rank == 0 and state.step % max(1, args.steps // 3) == 0:
            print(f"{name:<8}  step {state.step:>5}  loss {float(state.metrics['loss']):.3f}", flush=True)
    return state


@torch.no_grad()
def report(args: argparse.Namespace, state: fzero.State, before: Params, held_out: Tensor, rank: int) -> None:
    """What the adapters brought on text that nobody has seen, and what they cost."""
    after = fzero.unshard(state.params)
    starts = torch.linspace(0, len(held_out) - args.seq - 1, 64).long()
    batch = text.window(held_out, starts, args.seq)
    losses = [float(loss_fn(params, batch)) for params in (before["base"], adapted(after))]
    pairs = zip(tree.flatten(before["base"])[1], tree.flatten(after["base"])[1], strict=True)
    frozen = all(torch.equal(old, new) for old, new in pairs)
    held = {
        "base": memory.held_bytes(leaf.local for leaf in tree.flatten(state.params["base"])[1]),
        "adapters": memory.held_bytes(leaf.local for leaf in tree.flatten(state.params["lora"])[1]),
        "optimizer": memory.held_bytes(leaf.local for leaf in tree.flatten(state.opt_state)[1]),
    }
    if rank == 0:
        print("bytes on rank 0: " + ", ".join(f"{name} {size / 1e3:,.0f} kB" for name, size in held.items()))
        print(f"the base has {'the bits it had' if frozen else 'changed'}")
        print(f"held-out loss on the other text: {losses[0]:.3f} with the base alone, {losses[1]:.3f} with adapters")
        good = frozen and losses[1] < 0.9 * losses[0] and held["optimizer"] < 3 * held["adapters"]
        print("good" if good else "not there yet: more --steps")


if __name__ == "__main__":
    sys.exit(main())
