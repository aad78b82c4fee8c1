"""data_ranks: rows by a rank's place on the data axes: ranks that differ in `tp` or `pp` alone are given the same.

transformers and Accelerate (1.15) take every process for a data rank. What they make of it, in four places, is made of
the mesh's data ranks: the shards of a data loader, what is gathered for metrics, and by the Trainer's `get_tp_size`,
which is transformers' name for ranks that share a batch, the batch of a step and the number of its items.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply

from fzero.ir.mesh import Mesh


def same_batch(mesh: Mesh) -> int:
    """How many ranks are given one batch."""
    return mesh.world_size // mesh.data_ranks


def limit(accelerator: Accelerator, mesh: Mesh) -> None:
    """Lets an accelerator shard its data loaders by data rank, and gather for metrics the rows of each of them once."""
    if same_batch(mesh) == 1:
        return
    ranks = range(mesh.world_size)
    first = [next(r for r in ranks if mesh.data_rank(r) == place) for place in range(mesh.data_ranks)]
    stock = accelerator.gather_for_metrics

    def prepared(data_loader: Any, device_placement: bool | None = None, **more: Any) -> Any:
        made = prepare_data_loader(
            data_loader, accelerator.device, num_processes=mesh.data_ranks,
            process_index=mesh.data_rank(accelerator.process_index), split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=accelerator.rng_types.copy(), dispatch_batches=False, even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler, data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking, use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )  # fmt: skip
        accelerator._dataloaders.append(made)
        return made

    def once(value: torch.Tensor) -> torch.Tensor:
        return value.unflatten(0, (mesh.world_size, -1))[first].flatten(0, 1)

    def gathered(value: Any) -> Any:
        return recursively_apply(once, type(accelerator).gather(accelerator, value))

    def for_metrics(value: Any, **more: Any) -> Any:
        vars(accelerator)["gather"] = gathered  # which `gather_for_metrics` calls
        try:
            return stock(value, **more)
        finally:
            del vars(accelerator)["gather"]

    vars(accelerator).update(prepare_data_loader=prepared, gather_for_metrics=for_metrics)


@contextlib.contextmanager
def alone(accelerator: Accelerator) -> Iterator[None]:
    """While here, `gather` gives back what it is given: what is counted is of this rank."""
    held = vars(accelerator).get("gather")
    vars(accelerator)["gather"] = lambda value: value
    try:
        yield
    finally:
        del vars(accelerator)["gather"]
        if held is not None:
            vars(accelerator)["gather"] = held
