"""The job that the recipes of this folder start: a small network, saved as it goes, resumed if it was stopped.

It takes its rank from the launcher's environment. At the end each rank has the same parameters, and rank 0 prints their
digest: a job that was stopped and started again prints the digest of one that was not.

    torchrun --nproc-per-node 2 examples/launch/job.py --folder runs/job --steps 60
"""

import argparse
import hashlib
import time

import torch

import fzero


def loss(params: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = torch.tanh(params["words"][batch["x"]] @ params["w1"])
    return torch.nn.functional.cross_entropy((hidden @ params["w2"]).flatten(0, 1), batch["y"].flatten())


def init(key: torch.Tensor) -> dict[str, torch.Tensor]:
    k = fzero.random.split(key, 3)
    shapes = {"words": (256, 32), "w1": (32, 64), "w2": (64, 256)}
    return {name: 0.1 * fzero.random.normal(one, shape) for one, (name, shape) in zip(k, shapes.items(), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/job", help="the folder of the checkpoints, the same for all ranks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep after each step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--local_rank", type=int, help="what the deepspeed launcher passes; the environment has it too")
    given = parser.parse_args()
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), zero=3, device=given.device, timeout=120)
    tokens = fzero.data.Tokens(torch.arange(20_000) * 7 % 251, sequence=16, seed=1)
    with fzero.Checkpointer(given.folder, every=given.every, keep=2) as saver:
        state = saver.resume(init, spec, key=fzero.random.key(0))
        first = state.step
        batches = tokens.batches(16, position=saver.extra.get("position", 0))
        while state.step < given.steps:
            state = fzero.step(state, next(batches))
            saver.after(state, {"position": batches.position})
            time.sleep(given.pause)
        full = fzero.unshard(state.params)
    digest = hashlib.sha256(b"".join(full[name].cpu().numpy().tobytes() for name in sorted(full))).hexdigest()[:16]
    if batches.rank == 0:
        print(f"steps {first} to {state.step} on {batches.world_size} ranks, digest {digest}", flush=True)


if __name__ == "__main__":
    main()
