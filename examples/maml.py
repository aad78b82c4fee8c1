"""Learning to learn (MAML): parameters from which a few gradient steps on ten points fit a new sine wave.

The inner loop is a loss like any other: two steps of SGD by `fzero.optim.sgd`, which is differentiable, with the
gradient of `torch.func.grad`, mapped over tasks by `torch.vmap`. The outer gradient goes through all of it. The
parameters are gathered once for the inner steps, whose fast weights are activations; the rest is the ordinary form with
`loss` and `optimizer`.

Finn, Abbeel, Levine: "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fzero
import ranks
from fzero import optim, random

Params = dict[str, Any]
LAYERS = ("first", "second", "last")  # without numbers: so small, they share one buffer and travel together
Batch = dict[str, Tensor]

WIDTH, SHOTS, INNER_STEPS = 40, 10, 2
INNER = optim.sgd(0.01)


def init(key: Tensor) -> Params:
    sizes = [1, WIDTH, WIDTH, 1]
    keys = random.split(key, 3)
    parts = zip(LAYERS, keys, sizes, sizes[1:], strict=False)
    return {name: {"w": random.normal(k, (i, o)) * math.sqrt(1 / i), "b": torch.zeros(o)} for name, k, i, o in parts}


def mlp(params: Params, x: Tensor) -> Tensor:
    """(n,) to (n,)."""
    x = x[:, None]
    for name in LAYERS[:-1]:
        x = torch.tanh(x @ params[name]["w"] + params[name]["b"])
    return (x @ params["last"]["w"] + params["last"]["b"])[:, 0]


def squared_error(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return (mlp(params, x) - y).square().mean()


def adapted(params: Params, x: Tensor, y: Tensor, num_steps: int = INNER_STEPS) -> Params:
    """The parameters after steps of SGD on one task's points."""
    opt = INNER.init(params)
    for _ in range(num_steps):
        grads = torch.func.grad(squared_error)(params, x, y)
        updates, opt = INNER.update(grads, opt, params)
        params = optim.apply_updates(params, updates)
    return params


def meta_loss(params: Params, batch: Batch) -> Tensor:
    """The error on a task's other points after adapting to its first ones, a mean over tasks; leaves are (tasks, n)."""

    def task(x: Tensor, y: Tensor, new_x: Tensor, new_y: Tensor) -> Tensor:
        return squared_error(adapted(params, x, y), new_x, new_y)

    return torch.vmap(task)(batch["x"], batch["y"], batch["new_x"], batch["new_y"]).mean()


def tasks(key: Tensor, num: int) -> Batch:
    """Sine waves: amplitude in [0.1, 5), phase in [0, pi), points in [-5, 5); float32 (num, SHOTS)."""
    keys = random.split(key, 4)
    amplitude = random.uniform(keys[0], (num, 1), low=0.1, high=5.0)
    phase = random.uniform(keys[1], (num, 1), low=0.0, high=math.pi)
    x, new_x = (random.uniform(k, (num, SHOTS), low=-5.0, high=5.0) for k in keys[2:])
    return {
        "x": x,
        "y": amplitude * torch.sin(x + phase),
        "new_x": new_x,
        "new_y": amplitude * torch.sin(new_x + phase),
    }


def errors(params: Params, batch: Batch, most: int = 5) -> list[float]:
    """The error on new points after 0, 1, ... `most` steps."""

    def task(num: int, x: Tensor, y: Tensor, new_x: Tensor, new_y: Tensor) -> Tensor:
        return squared_error(adapted(params, x, y, num), new_x, new_y)

    args = batch["x"], batch["y"], batch["new_x"], batch["new_y"]
    return [float(torch.vmap(lambda *a, num=num: task(num, *a))(*args).mean()) for num in range(most + 1)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="maml.py", description=__doc__)
    add = parser.add_argument
    add("--world", type=int, default=2, metavar="N", help="ranks to start on this machine (2)")
    add("--zero", type=int, default=3, choices=range(4), help="ZeRO stage: the same numbers, other memory (3)")
    add("--steps", type=int, default=800, metavar="N", help="outer steps (800)")
    add("--tasks", type=int, default=32, metavar="N", help="tasks per step, over all ranks (32)")
    add("--out", type=Path, default=Path("runs/maml"), metavar="DIR", help="where other ranks' output goes (runs/maml)")
    add("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args(argv)
    args.world = (ranks.here() or (0, args.world))[1]
    if args.tasks % args.world:
        parser.error(f"--tasks {args.tasks}: needed a multiple of {args.world} ranks")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return ranks.run(parse(argv), __file__, argv, train)


def train(args: argparse.Namespace, rank: int) -> None:
    data_key, test_key = random.split(random.fold_in(random.key(args.seed), 1))
    spec = fzero.Spec(loss=meta_loss, optimizer=optim.adam(1e-3), zero=args.zero)
    state = fzero.init(init, spec, key=random.key(args.seed))
    unseen = tasks(test_key, 500)
    before = errors(fzero.unshard(state.params), unseen)
    for number in range(args.steps):
        key = random.fold_in(random.fold_in(data_key, number), rank)
        state = fzero.step(state, tasks(key, args.tasks // args.world))
        if rank == 0 and (number + 1) % max(1, args.steps // 5) == 0:
            print(f"step {state.step:>5}  loss after adapting {float(state.metrics['loss']):.3f}", flush=True)
    after = errors(fzero.unshard(state.params), unseen)
    if rank == 0:
        print("error on new points of new tasks, after 0, 1, 2, ... steps on ten points:")
        print("  at first ", "  ".join(f"{error:6.3f}" for error in before))
        print("  meta-trained", "  ".join(f"{error:6.3f}" for error in after))
        learned = after[INNER_STEPS] < 0.5 * min(after[0], before[INNER_STEPS])
        print("good" if learned else "not there yet: more --steps")


if __name__ == "__main__":
    sys.exit(main())
