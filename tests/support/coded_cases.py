"""The meshes, parameters and batches of tests of messages of blocks."""

from __future__ import annotations

from typing import Any

import cases
import torch
from helpers import Run
from torch import Tensor

from fzero import tree

GRIDS: dict[str, dict[str, int]] = {
    "1": {"dp": 1}, "2": {"dp": 2}, "3": {"dp": 3}, "4": {"dp": 4}, "2x2": {"dp_out": 2, "dp": 2},
}  # fmt: skip


def start() -> Any:
    made = torch.Generator().manual_seed(7)
    return tree.map(lambda x: torch.randn(x.shape, generator=made) / 4, cases.layers(width=36))


def rows(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank + 10 * step))


def params_of(one: Run) -> dict[str, Tensor]:
    return {path: leaf for path, leaf in one.final.items() if path.startswith("params/")}


def same(one: Run, other: Run) -> bool:
    theirs = params_of(other)
    return all(torch.equal(leaf, theirs[path]) for path, leaf in params_of(one).items())
