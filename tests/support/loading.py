"""Every rank's part of a save and of a load in one process, for the tests of loading.

`take` and `shards.write` are what one rank of `fzero.save` does, `wanted` and `Checkpoint.fill` what one rank of
`fzero.load` does: so any world can be saved and loaded without messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import torch
from helpers import same_bits
from torch import Tensor

import fzero
from fzero import tree
from fzero.checkpoint import commit, shards
from fzero.checkpoint.load import wanted
from fzero.checkpoint.manifest import shard_name
from fzero.checkpoint.reader import Checkpoint
from fzero.checkpoint.save import take
from fzero.disk.calls import Disk
from fzero.plan.state_plan import Plan
from fzero.state import storage

WORLDS, STAGES = (1, 2, 3, 4, 8), (0, 1, 2, 3)


class Quick(Disk):
    """Without the waits for the disk; counts the bytes that are read of each file."""

    def __init__(self) -> None:
        self.read_bytes: dict[str, int] = {}

    def run(self, kind: str, path: Path, call: Callable[[], Any]) -> Any:
        return None if kind in ("sync", "sync_directory") else call()

    def read_into(self, path: Path, start: int, view: memoryview) -> None:
        self.read_bytes[path.name] = self.read_bytes.get(path.name, 0) + len(view)
        super().read_into(path, start, view)


def write(
    run: Path, plan: Plan, memory: Sequence[dict[str, Tensor]], treedef: Any, step: int = 7, disk: Disk | None = None
) -> Path:
    """A committed checkpoint of every rank's buffers, each shard as its rank writes it."""
    disk = disk or Quick()
    taken = [take(plan, memory[rank], rank, treedef=treedef, step=step) for rank in range(plan.world_size)]
    temporary = run / f".tmp-step-{step:08d}-00000000"
    run.mkdir(exist_ok=True)
    temporary.mkdir()
    records = [shards.write(disk, temporary / shard_name(rank), one.parts) for rank, one in enumerate(taken)]
    return commit.commit(run, temporary, replace(taken[0].manifest, shards=tuple(records)), disk)


def read(directory: Path, plan: Plan, disk: Disk | None = None) -> list[dict[str, Tensor]]:
    """Every rank's buffers from a checkpoint."""
    ranks = []
    for rank in range(plan.world_size):
        memory = storage.allocate(plan, storage.block_of("cpu"), rank)
        source = Checkpoint(directory, disk or Quick())
        wants = wanted(plan, rank, memory, set())
        source.check(wants)
        source.fill(wants)
        ranks.append(memory)
    return ranks


def noise(like: Tensor, seed: int) -> Tensor:
    """Any bits at all, of a tensor's shape and dtype: NaNs with payloads, infinities, -0.0."""
    bits = torch.randint(0, 256, (like.numel() * like.itemsize,), generator=models.generator(0, seed))
    bits = bits.to(torch.uint8)
    if like.dtype is torch.bool:
        bits &= 1
    return bits.view(like.dtype).view(like.shape)


MUON = fzero.optim.muon(0.02, others=fzero.optim.adamw(1e-3))
OPTIMIZERS = {
    "adamw": fzero.optim.adamw(1e-3),
    "adamw8": fzero.optim.adamw8bit(1e-3),
    "muon": MUON,
    "groups": fzero.optim.multi_transform({"**/b": fzero.optim.sgd(0.1, momentum=0.9), "**": fzero.optim.adamw(1e-3)}),
}


def flat(state: fzero.State) -> dict[str, Tensor]:
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def same(a: fzero.State, b: fzero.State) -> bool:
    one, two = flat(a), flat(b)
    return one.keys() == two.keys() and all(same_bits(one[path], two[path]) for path in one)
