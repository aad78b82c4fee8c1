"""running_statistics: the running statistics of a model, as leaves of the state's params that do not train.

A BatchNorm in training does not read its statistics: it writes keep * old + (1 - keep) * (those of its rows), for
keep = 1 - momentum. So the loss gives it zeros, and finds in their place what one micro batch adds. A window of n micro
batches one after the other, as the stock Trainer runs them, comes to

    keep^n * old + sum over its micro batches i of keep^(n - 1 - i) * (what i adds)

and with momentum None, an average over all batches so far, to (count * old + sum of what each adds) / (count + n). On
several ranks each normalises by its own rows, and what is kept is the mean over the ranks (`fzero.interop.with_buffers`
does so too; DistributedDataParallel keeps those of rank 0, and loses what the others saw).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fzero._torch_compat import BatchNorm, NormBase

MEANS = ("running_mean", "running_var")
COUNT = "num_batches_tracked"


@dataclass(frozen=True)
class Statistics:
    """What is tracked of a module: by the name of a buffer its momentum, and the name of its count. Immutable."""

    momentum: Mapping[str, float | None]
    counts: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tracked buffers."""
        return (*self.momentum, *self.counts)

    def split(self, leaves: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(the parameters, the statistics) of the state's params."""
        held = {name: leaves[name] for name in self.names}
        return {name: leaf for name, leaf in leaves.items() if name not in held}, held

    def updated(
        self, held: Mapping[str, Tensor], added: Mapping[str, Tensor], batch: Mapping[str, Tensor], parts: int
    ) -> dict[str, Tensor]:
        """What this micro batch gives to the mean over `parts` of them, which is what is held next.

        added: the buffers after a forward that began with zeros. batch: what `window` adds to the micro batch, `weight`
        (0: it is a copy), `later` (how many come after it) and `number` (how many there are), each of one element.
        """
        weight, later, number = (batch[name].reshape(()).to(torch.float64) for name in ("weight", "later", "number"))
        found = {name: held[name].to(torch.float64) + number for name in self.counts}
        for name, momentum in self.momentum.items():
            old, new = held[name].to(torch.float64), added[name].to(torch.float64) * weight * parts
            if momentum is None:
                count = held[f"{name.rpartition('.')[0]}.{COUNT}".lstrip(".")].to(torch.float64)
                found[name] = (count * old + new) / (count + number)
            else:
                found[name] = (1 - momentum) ** number * old + (1 - momentum) ** later * new
        return found


def without_count(copy: nn.Module) -> None:
    """Lets the layers of a copy that average over all batches write those of their rows as they are: their count, which
    they would ask for on the host, is a leaf of the state."""
    for part in copy.modules():
        if isinstance(part, BatchNorm) and part.momentum is None:
            part.momentum = 1.0


def tracked(module: nn.Module) -> Statistics:
    """The statistics that a module writes in the modes that its parts are in."""
    momentum: dict[str, float | None] = {}
    counts = []
    for path, part in module.named_modules():
        if not isinstance(part, NormBase) or not part.training or part.running_mean is None:
            continue
        prefix = f"{path}." if path else ""
        momentum |= dict.fromkeys((prefix + name for name in MEANS), part.momentum)
        if isinstance(part, BatchNorm) and part.num_batches_tracked is not None:
            counts.append(prefix + COUNT)
    return Statistics(momentum, tuple(counts))


def of_window(number: int, parts: int, device: Any) -> dict[str, Tensor]:
    """`later` and `number` of a window of `number` micro batches, filled up to `parts`."""
    later = [max(number - 1 - i, 0) for i in range(parts)]
    return {"later": torch.tensor(later, device=device), "number": torch.full((parts,), number, device=device)}
