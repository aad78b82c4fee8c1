"""Two networks and two optimizers in one step: a GAN that learns eight clusters on a ring, and an average of it.

The step is a pure function of a state with a critic, a generator, their optimizers' states and an average of the
generator. The loss is R3GAN's (Huang et al., "The GAN is dead; long live the GAN!", 2024): a relativistic pair loss,
and the squared gradient of the critic in its input, at real and at made points. That gradient is `vmap(grad(critic))`
inside the loss, so training goes through it twice; nothing of this knows that the state is sharded.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
import ranks
from fzero import optim, random, tree

NUM_CLUSTERS, SPREAD = 8, 0.05
NOISE_DIM, WIDTH = 8, 64
PENALTY = 0.1
AVERAGED = 0.98  # of the average, what a step keeps

Params = dict[str, Any]
LAYERS = ("first", "second", "last")  # without numbers: so small, they share one buffer and travel together
OPTIMIZERS = {name: optim.adam(2e-3, betas=(0.0, 0.99)) for name in ("critic", "generator")}


def init(key: Tensor) -> Params:
    """The state: parameters, optimizer states, the generator's average, and the key that noise comes from."""
    critic_key, generator_key, noise_key = random.split(key, 3)
    params = {
        "critic": init_mlp(critic_key, [2, WIDTH, WIDTH, 1]),
        "generator": init_mlp(generator_key, [NOISE_DIM, WIDTH, WIDTH, 2]),
    }
    opt = {name: tx.init(params[name]) for name, tx in OPTIMIZERS.items()}
    return {"params": params, "opt": opt, "average": params["generator"], "key": noise_key}


def init_mlp(key: Tensor, sizes: Sequence[int]) -> Params:
    keys = random.split(key, len(sizes) - 1)
    parts = zip(LAYERS, keys, sizes, sizes[1:], strict=False)
    return {name: {"w": random.normal(k, (i, o)) / math.sqrt(i), "b": torch.zeros(o)} for name, k, i, o in parts}


def mlp(params: Params, x: Tensor) -> Tensor:
    for name in LAYERS[:-1]:
        x = F.leaky_relu(x @ params[name]["w"] + params[name]["b"], 0.2)
    return x @ params["last"]["w"] + params["last"]["b"]


def make(generator: Params, num: int, key: Tensor) -> Tensor:
    """(num, 2): points that the generator makes of noise."""
    return mlp(generator, random.normal(key, (num, NOISE_DIM)))


def critic_loss(critic: Params, real: Tensor, generator: Params, key: Tensor) -> Tensor:
    """How much better real points (B, 2) should score than made ones, and two penalties."""
    made = make(generator, len(real), key)

    def score(x: Tensor) -> Tensor:
        return mlp(critic, x).squeeze(-1)

    steepness = [torch.vmap(torch.func.grad(score))(x).square().sum(1).mean() for x in (real, made)]
    return F.softplus(score(made) - score(real)).mean() + PENALTY * (steepness[0] + steepness[1])


def generator_loss(generator: Params, real: Tensor, critic: Params, key: Tensor) -> Tensor:
    return F.softplus(mlp(critic, real) - mlp(critic, make(generator, len(real), key))).mean()


def step(state: Params, real: Tensor) -> tuple[Params, Params]:
    """Both networks move at once, each against the other as it was; then the average follows the generator."""
    params, opt, losses = dict(state["params"]), dict(state["opt"]), {}
    critic, generator = params["critic"], params["generator"]
    next_key, *keys = random.split(state["key"], 3)
    # Every rank, and every microbatch, is given a key of its own made of this one.
    losses["critic"], critic_grads = fzero.value_and_grad(critic_loss, key=keys[0])(critic, real, generator)
    losses["generator"], generator_grads = fzero.value_and_grad(generator_loss, key=keys[1])(generator, real, critic)
    for name, grads in (("critic", critic_grads), ("generator", generator_grads)):
        updates, opt[name] = OPTIMIZERS[name].update(grads, opt[name], params[name])
        params[name] = optim.apply_updates(params[name], updates)
    average = tree.map(lambda a, p: AVERAGED * a + (1 - AVERAGED) * p, state["average"], params["generator"])
    return {"params": params, "opt": opt, "average": average, "key": next_key}, losses


def real_points(key: Tensor, num: int) -> Tensor:
    """(num, 2): points of the clusters, each as likely."""
    which, where = random.split(key)
    angle = random.randint(which, 0, NUM_CLUSTERS, num) * (2 * math.pi / NUM_CLUSTERS)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + SPREAD * random.normal(where, (num, 2))


def quality(generator: Params, key: Tensor, num: int = 4000) -> tuple[float, int]:
    """The share of made points within four deviations of a cluster, and how many clusters have a fair share of them."""
    points = make(generator, num, key)
    angle = torch.arange(NUM_CLUSTERS) * (2 * math.pi / NUM_CLUSTERS)
    centres = torch.stack([angle.cos(), angle.sin()], dim=1)
    nearest = torch.cdist(points, centres).min(dim=1)
    good = nearest.values < 4 * SPREAD
    counts = nearest.indices[good].bincount(minlength=NUM_CLUSTERS)
    return float(good.float().mean()), int((counts > num / NUM_CLUSTERS / 4).sum())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gan.py", description=__doc__)
    add = parser.add_argument
    add("--world", type=int, default=2, metavar="N", help="ranks to start on this machine (2)")
    add("--zero", type=int, default=3, choices=range(4), help="ZeRO stage: the same numbers, other memory (3)")
    add("--steps", type=int, default=1000, metavar="N", help="steps, of both networks (1000)")
    add("--batch", type=int, default=256, metavar="N", help="real points per step, over all ranks (256)")
    add("--out", type=Path, default=Path("runs/gan"), metavar="DIR", help="where other ranks' output goes (runs/gan)")
    add("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args(argv)
    args.world = (ranks.here() or (0, args.world))[1]
    if args.batch % args.world:
        parser.error(f"--batch {args.batch}: needed a multiple of {args.world} ranks")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return ranks.run(parse(argv), __file__, argv, train)


def train(args: argparse.Namespace, rank: int) -> None:
    data_key, test_key = random.split(random.fold_in(random.key(args.seed), 1))
    state = fzero.init(init, fzero.Spec(step=step, zero=args.zero), key=random.key(args.seed))
    start = quality(fzero.unshard(state.tree["average"]), test_key)
    for number in range(args.steps):
        key = random.fold_in(random.fold_in(data_key, number), rank)
        state = fzero.step(state, real_points(key, args.batch // args.world))
        if rank == 0 and (number + 1) % max(1, args.steps // 5) == 0:
            critic, generator = (float(state.metrics[name]) for name in ("critic", "generator"))
            print(f"step {state.step:>5}  critic {critic:.3f}  generator {generator:.3f}", flush=True)
    share, found = quality(fzero.unshard(state.tree["average"]), test_key)
    if rank == 0:
        print(
            f"points on a cluster: {start[0]:.0%} before, {share:.0%} after; clusters found: {found} of {NUM_CLUSTERS}"
        )
        print("good" if found == NUM_CLUSTERS and share > 0.5 else "not there yet: more --steps")


if __name__ == "__main__":
    sys.exit(main())
