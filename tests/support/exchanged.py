"""A trained model with odd sizes and a tied weight, and what the tests of foreign checkpoints put into files."""

import os
from pathlib import Path
from typing import Any

import torch
from helpers import same_bits
from torch import Tensor, nn

import fzero
from fzero.interop import from_module
from fzero.state.source import Entry


class Tied(nn.Module):
    """Odd sizes, a tied weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def tied() -> tuple[dict[str, Tensor], fzero.interop.Apply]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        params, _, apply = from_module(Tied())
    return params, apply


def spec_of(apply: fzero.interop.Apply, zero: int = 3, **options: Any) -> fzero.Spec:
    return fzero.Spec(
        loss=lambda p, b: apply(p, {}, b), optimizer=fzero.optim.adamw(1e-2), zero=zero, bucket_bytes=512, **options
    )


def ids(rank: int = 0) -> Tensor:
    return torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(rank))


def trained(zero: int = 3) -> fzero.State:
    params, apply = tied()
    return fzero.step(fzero.init(params, spec_of(apply, zero)), ids())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


class Stored:
    """Tensors as a source."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.held = held
        self.leaves = {name: Entry(tuple(x.shape), x.dtype) for name, x in held.items()}

    def read(self, path: str, start: int, stop: int) -> Tensor:
        return self.held[path].flatten()[start:stop]

    check = fill = None


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


class Harmless:
    """A class that nobody has allowed."""
