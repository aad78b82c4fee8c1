"""trainer_step: the Trainer's loss and its evaluation as pure functions, and the batch that fzero's step is given.

transformers takes the gradient of a sum over a window's micro batches and of a mean over the ranks. It sums what the
trainer's own `compute_loss` returns: a loss that was divided by `num_items_in_batch`, the tokens of the window over all
ranks, or else the mean of a micro batch, divided by their number. Either is a `fzero.Mean`, whose count is 1 a rank,
or 1 a micro batch. A short window is filled up with copies of its first micro batch, whose weight is 0. A last micro
batch of fewer rows, whose mean no added rows may change, is computed at its own size in a program of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn

import fzero
from fzero import tree
from fzero.capture.provenance import describe
from fzero.errors import CaptureError
from fzero.interop.module import Functional
from fzero.interop.trainer import shapes
from fzero.interop.trainer.running_statistics import Statistics, of_window, without_count
from fzero.training import UPDATED

LOGGED = "logged"  # the metric that holds what compute_loss logs: a list of {name: number}
LOSSES = "losses"  # the metric that holds the loss of each micro batch of each data rank, over their number


def loss_of(trainer: Any, module: Functional, statistics: Statistics) -> Callable[[Any, Any], Any]:
    """The loss of a window, as `window` made it, for `fzero.Spec(loss=)`. Its metrics are the losses of the micro
    batches and what `compute_loss` logs; the statistics that the module writes are updated leaves."""

    def one(params: Any, buffers: Any, inputs: Any, count: Any) -> tuple[Tensor, list[dict[str, Tensor]], Any]:
        """(the loss of a micro batch, what it logs, the statistics that it adds)."""

        def call(copy: Any) -> Any:
            without_count(copy)
            with forward_only(copy), trainer.noting() as entries:
                return trainer.compute_loss(copy, dict(inputs), num_items_in_batch=count), entries

        found = module.apply.call(params, buffers, call)
        (value, entries), added = found if statistics.names else (found, {})
        return value.float().reshape(()), [_logged(entry, value) for entry in entries], added

    def loss(params: Any, batch: Any) -> Any:
        items, weight = batch.get("items"), batch["weight"].reshape(())
        count = None if items is None else items.reshape(())
        params, held = statistics.split(params)
        buffers = {**module.buffers, **tree.map(torch.zeros_like, held)}
        found = one(params, buffers, batch["inputs"], count)
        if "tail" in batch:
            last = batch["last"].reshape(())
            found = tree.map(lambda a, b: torch.where(last, b, a), found, one(params, buffers, batch["tail"], count))
        value, entries, added = found
        alone = value.detach()
        metrics: dict[str, Any] = {LOSSES: torch.where(batch["slots"].reshape(-1), alone, torch.zeros_like(alone))}
        if entries:
            metrics[LOGGED] = [{name: fzero.Mean(x * weight, weight) for name, x in e.items()} for e in entries]
        if held:
            metrics[UPDATED] = statistics.updated(held, added, batch, trainer.args.gradient_accumulation_steps)
        return fzero.Mean(value * weight, batch["count"].reshape(())), metrics

    return loss


def _logged(entry: Mapping[str, Any], like: Tensor) -> dict[str, Tensor]:
    """What `compute_loss` gave to `self.log`, as 0-d tensors. Raises CaptureError for what is no number."""
    values = {}
    for name, value in entry.items():
        if isinstance(value, (bool, int, float)):
            value = torch.full((), float(value), device=like.device)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise CaptureError(
                f"self.log({{{name!r}: ...}}) in compute_loss is given {describe(value)}: needed a tensor of one "
                "number, which is a metric of the step. Log its .mean()"
            )
        values[name] = value.detach().reshape(()).to(torch.promote_types(value.dtype, torch.float32))
    return values


def numbers(metrics: Any) -> list[dict[str, float]]:
    """The entries for transformers' log among the metrics of a step, or the results of an evaluation."""
    return [{name: float(value) for name, value in entry.items()} for entry in metrics.get(LOGGED, ())]


@contextmanager
def forward_only(copy: nn.Module) -> Iterator[None]:
    """Leaves autocast for all but the forward of this copy of the module, whose results are made fp32: so Accelerate
    prepares a model. Without an autocast nothing is done."""
    kind = next((p.device.type for p in copy.parameters()), "cpu")
    if not torch.is_autocast_enabled(kind):
        yield
        return
    forward, dtype = copy.forward, torch.get_autocast_dtype(kind)

    @functools.wraps(forward)
    def by_op(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype):
            outputs = forward(*args, **kwargs)
        return convert_to_fp32(outputs)

    copy.forward = by_op
    with torch.autocast(kind, enabled=False):
        yield


def window(
    batches: Sequence[shapes.Batch], items: Any, microbatches: int, scaled: bool, place: tuple[int, int], device: Any,
    tracks: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The batch of a step: the micro batches of a window, of one shape. The last may have fewer rows: then a batch of
    whole rows lies in its place, and `tail` holds it once for each micro batch, of which the loss takes the last.

    items: tokens of the window over all ranks, or of this one, or None. scaled: whether the loss has been divided by
    them. place: this data rank, and how many there are. tracks: whether the model has running statistics.
    """
    short, number, more = microbatches - len(batches), len(batches), {}
    if shapes.num_rows(batches[-1]) != shapes.num_rows(batches[0]):
        last = torch.arange(microbatches, device=device) == number - 1
        more = {"tail": shapes.joined([batches[-1]] * microbatches), "last": last}
        batches = [*batches[:-1], batches[0]]
    weight, once, slots = _of_places(number, microbatches, place, device)
    batch = {
        "inputs": shapes.joined([*batches, *[batches[0]] * short]),
        "weight": weight,
        "count": once if scaled else weight,
        "slots": slots,
        **(of_window(number, microbatches, device) if tracks else {}),
        **more,
    }
    return batch if items is None else {**batch, "items": whole(items, device).expand(microbatches).contiguous()}


@functools.lru_cache(maxsize=16)
def _of_places(number: int, microbatches: int, place: tuple[int, int], device: Any) -> tuple[Tensor, Tensor, Tensor]:
    """For each micro batch of a window, whether it is one of its `number`, whether it is the first, and which entry of
    the metric LOSSES is its own on this data rank. A step only reads them."""
    rank, ranks = place
    index = torch.arange(microbatches)
    own = torch.eye(microbatches, dtype=torch.bool)
    slots = F.pad(own, (rank * microbatches, (ranks - rank - 1) * microbatches))
    weight, once = (index < number).to(torch.int64), (index == 0).to(torch.int64)
    return weight.to(device), once.to(device), slots.to(device)


def losses(metrics: Any, number: int, microbatches: int, scaled: bool, place: tuple[int, int]) -> Tensor:
    """What the stock Trainer's `training_step` returns on this rank for each of the `number` micro batches of a
    window: fp32, shape (number,). The others are as in `window`."""
    rank, ranks = place
    own = metrics[LOSSES][rank * microbatches :][:number] * (microbatches * ranks)
    return own if scaled else own / number


def filtered(values: Tensor, so_far: Tensor, steps: int) -> Tensor:
    """The sum of losses. In the place of one that is not finite comes the mean of all that were logged so far, as
    transformers' `logging_nan_inf_filter` has it. so_far: the sum before. steps: since the last log, with this one.

    >>> filtered(torch.tensor([2.0, torch.nan]), torch.tensor(4.0), 2)
    tensor(5.)
    """
    total = so_far.clone()
    for value in values:
        total = total + (value if value.isfinite() else total / steps)
    return total - so_far


def whole(items: Any, device: Any) -> Tensor:
    """A number of items as an int64 tensor, which no precision rounds."""
    return torch.as_tensor(items, device=device).reshape(-1)[:1].round().to(torch.int64)


def scored_of(
    trainer: Any, module: Functional, statistics: Statistics, loss_only: bool, ignored: Any, stock: Callable[..., Any]
) -> Any:
    """The function of `fzero.evaluate`: transformers' own `prediction_step` on a copy of the module.

    Returns {"loss": this rank's, of shape (1,), "outputs": its logits, LOGGED: what compute_loss logs}, without what
    there is not.
    """

    def scored(params: Any, batch: Any) -> dict[str, Any]:
        items = batch.get("items")

        def call(copy: Any) -> Any:
            with trainer.counted(items), forward_only(copy), trainer.noting() as entries:
                loss, outputs, _ = stock(copy, dict(batch["inputs"]), loss_only, ignore_keys=ignored)
            return loss, outputs, [_logged(entry, tree.flatten(batch)[1][0]) for entry in entries] or None

        params, held = statistics.split(params)
        loss, outputs, logged = module.apply.call(params, {**module.buffers, **held}, call)
        found = {"loss": None if loss is None else loss.float().reshape(1), "outputs": outputs, LOGGED: logged}
        return {name: value for name, value in found.items() if value is not None}

    return scored
