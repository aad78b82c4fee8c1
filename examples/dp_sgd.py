"""Differentially private training (DP-SGD): per-example gradients clipped to a norm, and noise on their sum.

The clipping is part of the loss, in two passes: the norm of every example's gradient by `vmap(grad)`, and a sum of the
examples' losses weighed by the constants min(1, C / norm), whose gradient is the sum of clipped gradients. So a step is
one forward and backward of an ordinary loss and its gradients are reduced and sharded as ever; per-example gradients
never leave a rank. The noise comes from a key in the state, the same on every rank, once per step.

Every step draws each example of the data set with probability q (Poisson sampling, which the accounting below assumes),
so their number varies; the batch has room for more than is ever needed, and a weight 0 or 1 for every place in it.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016; the accountant: Mironov, Talwar, Zhang, "Renyi
Differential Privacy of the Sampled Gaussian Mechanism", 2019.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

import fzero
import ranks
from fzero import optim, random, tree

Params = dict[str, Any]
Batch = dict[str, Tensor]

FEATURES, CLASSES, WIDTH = 20, 5, 32
NUM_EXAMPLES, RATE, DELTA = 4096, 1 / 32, 1e-5  # RATE is q
EXPECTED = NUM_EXAMPLES * RATE
ROOM = 2 * int(EXPECTED)  # places in a batch: what is expected, and eleven standard deviations more
NORM = 1.0  # C
OPTIMIZER = optim.sgd(0.5, momentum=0.5)


def init(key: Tensor) -> Params:
    first, last, noise = random.split(key, 3)
    params = {
        "first": {"w": random.normal(first, (FEATURES, WIDTH)) / math.sqrt(FEATURES), "b": torch.zeros(WIDTH)},
        "last": {"w": random.normal(last, (WIDTH, CLASSES)) / math.sqrt(WIDTH), "b": torch.zeros(CLASSES)},
    }
    return {"params": params, "opt": OPTIMIZER.init(params), "key": noise}


def classify(params: Params, x: Tensor) -> Tensor:
    """(..., FEATURES) to logits (..., CLASSES)."""
    hidden = torch.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return hidden @ params["last"]["w"] + params["last"]["b"]


def example_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(classify(params, x), y)


def gradient_norms(params: Params, batch: Batch) -> Tensor:
    """(B,): the norm of every example's own gradient."""
    grads = vmap(grad(example_loss), in_dims=(None, 0, 0))(params, batch["x"], batch["y"])
    return torch.stack([g.flatten(1).square().sum(1) for g in tree.flatten(grads)[1]]).sum(0).sqrt()


def clipped_loss(params: Params, batch: Batch) -> Tensor:
    """A loss whose gradient is the sum of the clipped gradients over the number of places in the batch."""
    constants = tree.map(torch.Tensor.detach, params)
    factors = (NORM / (gradient_norms(constants, batch) + 1e-6)).clamp(max=1.0)
    losses = vmap(example_loss, in_dims=(None, 0, 0))(params, batch["x"], batch["y"])
    return (batch["weight"] * factors * losses).mean()


def private_step(noise: float) -> Callable[[Params, Batch], tuple[Params, Params]]:
    """A step with noise of standard deviation `noise * NORM` on the sum of clipped gradients."""

    def step(state: Params, batch: Batch) -> tuple[Params, Params]:
        next_key, noise_key = random.split(state["key"])
        loss, grads = fzero.value_and_grad(clipped_loss)(state["params"], batch)
        _, leaves, structure = tree.flatten(grads)
        drawn = [random.normal(k, g.shape) for k, g in zip(random.split(noise_key, len(leaves)), leaves, strict=True)]
        private = [(g * ROOM + noise * NORM * n) / EXPECTED for g, n in zip(leaves, drawn, strict=True)]
        updates, opt = OPTIMIZER.update(tree.unflatten(structure, private), state["opt"], state["params"])
        return {"params": optim.apply_updates(state["params"], updates), "opt": opt, "key": next_key}, {"loss": loss}

    return step


def data_set(key: Tensor, num: int) -> Batch:
    """`num` points around CLASSES centres, which are the same for every key."""
    which, where = random.split(key)
    y = random.randint(which, 0, CLASSES, num)
    centres = 1.2 * random.normal(random.key(1234), (CLASSES, FEATURES))
    return {"x": centres[y] + 2.0 * random.normal(where, (num, FEATURES)), "y": y}


def sampled(data: Batch, key: Tensor, rank: int, world_size: int) -> Batch:
    """This rank's part of a batch in which every example of `data` is with probability RATE."""
    chosen = random.bernoulli(key, RATE, NUM_EXAMPLES).nonzero()[:, 0]
    if len(chosen) > ROOM:
        raise RuntimeError(f"{len(chosen)} examples were drawn and there is room for {ROOM}")
    places = torch.zeros(ROOM, dtype=torch.int64)
    places[: len(chosen)] = chosen
    weight = (torch.arange(ROOM) < len(chosen)).float()
    mine = slice(rank, None, world_size)
    return {"x": data["x"][places[mine]], "y": data["y"][places[mine]], "weight": weight[mine]}


def epsilon(noise: float, num_steps: int) -> float:
    """An upper bound of epsilon at DELTA for so many steps: Renyi divergences of integer orders, the best of them."""

    def renyi(order: int) -> float:
        logs = [
            math.log(math.comb(order, k))
            + (order - k) * math.log1p(-RATE)
            + k * math.log(RATE)
            + (k * k - k) / (2 * noise**2)
            for k in range(order + 1)
        ]
        return float(torch.tensor(logs, dtype=torch.float64).logsumexp(0)) / (order - 1)

    return min(num_steps * renyi(order) + math.log(1 / DELTA) / (order - 1) for order in range(2, 200))


def accuracy(params: Params, data: Batch) -> float:
    return float((classify(params, data["x"]).argmax(-1) == data["y"]).float().mean())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dp_sgd.py", description=__doc__)
    add = parser.add_argument
    add("--world", type=int, default=2, metavar="N", help="ranks to start on this machine (2)")
    add("--zero", type=int, default=3, choices=range(4), help="ZeRO stage: the same numbers, other memory (3)")
    add("--steps", type=int, default=300, metavar="N", help="steps (300)")
    add("--noise", type=float, default=1.0, metavar="X", help="standard deviation of the noise, over the norm (1.0)")
    add("--out", type=Path, default=Path("runs/dp_sgd"), metavar="DIR", help="for other ranks' output (runs/dp_sgd)")
    add("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args(argv)
    args.world = (ranks.here() or (0, args.world))[1]
    if ROOM % args.world:
        parser.error(f"--world {args.world}: needed a divisor of {ROOM}, the places in a batch")
    if args.noise <= 0:
        parser.error(f"--noise {args.noise}: needed a positive number")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return ranks.run(parse(argv), __file__, argv, train)


def train(args: argparse.Namespace, rank: int) -> None:
    # Whoever knows these keys can take the noise away: a real run draws its seed from the system and keeps it secret.
    data_key, test_key, draw_key = random.split(random.fold_in(random.key(args.seed), 1), 3)
    data, unseen = data_set(data_key, NUM_EXAMPLES), data_set(test_key, 2000)
    spec = fzero.Spec(step=private_step(args.noise), zero=args.zero)
    state = fzero.init(init, spec, key=random.key(args.seed))
    before = accuracy(fzero.unshard(state.tree["params"]), unseen)
    for number in range(args.steps):
        state = fzero.step(state, sampled(data, random.fold_in(draw_key, number), rank, args.world))
        if rank == 0 and (number + 1) % max(1, args.steps // 5) == 0:
            print(f"step {state.step:>5}  epsilon {epsilon(args.noise, state.step):.2f} at delta {DELTA}", flush=True)
    params = fzero.unshard(state.tree["params"])
    after = accuracy(params, unseen)
    if rank == 0:
        clipped = float((gradient_norms(params, data) > NORM).float().mean())
        print(f"accuracy on unseen points: {before:.1%} before, {after:.1%} after")
        print(f"{clipped:.0%} of the examples have a gradient longer than {NORM} now")
        print("good" if after > 0.8 else "not there yet: more --steps, or less --noise")


if __name__ == "__main__":
    sys.exit(main())
