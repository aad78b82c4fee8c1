"""One of two ranks on nodes of their own (test_placement): the doctor's lines, then a pipeline; prints JSON."""

from __future__ import annotations

import hashlib
import json
import os

import cases
import torch

import fzero
from fzero.session.session import session_of
from fzero.tools import finding, speed_probes


def digest(leaf: torch.Tensor) -> str:
    return hashlib.sha256(leaf.contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    told = [
        " ".join(finding.line(one).split()) for one in speed_probes.links("pp=2", os.environ) if one.name == "mesh pp"
    ]
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # the doctor's store may still be there
    init, loss = cases.gpt(64, 16, 4, 2)
    spec = fzero.Spec(
        loss=loss, optimizer=fzero.optim.adamw(1e-2), microbatches=4, reduce="end", mesh={"pp": 2}, pipeline="1f1b"
    )
    state = fzero.init(init(fzero.random.key(0)), spec)
    losses = []
    for step in range(3):
        state = fzero.step(state, cases.tokens(4, 8, 64, step))
        losses.append(float(state.metrics["loss"]))
    paths, leaves, _ = fzero.tree.flatten(fzero.unshard(state.tree))
    transport = session_of(state).transport
    found = {"told": told, "losses": losses, "transport": transport.name, "why": transport.why}
    bits = {path: digest(leaf) for path, leaf in zip(paths, leaves, strict=True)}
    print(json.dumps({**found, "bits": bits}), flush=True)
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
