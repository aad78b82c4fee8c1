"""trainer_step: the Trainer's loss and its evaluation as pure functions, and the batch that fzero's step is given.

transformers takes the gradient of a sum over a window's micro batches and of a mean over the ranks. It sums what the
trainer's own `compute_loss` returns: a loss that was divided by `num_items_in_batch`, the tokens of the window over all
ranks, or else the mean of a micro batch, divided by their number. Either is a `fzero.Mean`, whose count is 1 a rank,
or 1 a micro batch. A short window is filled up with copies of its first micro batch, whose weight is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
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


def loss_of(trainer: Any, module: Functional, statistics: Statistics) -> Callable[[Any, Any], Any]:
    """The loss of a window, as `window` made it, for `fzero.Spec(loss=)`. What `compute_loss` logs is its metrics, and
    the statistics that the module writes are updated leaves."""

    def loss(params: Any, batch: Any) -> Any:
        items, weight = batch.get("items"), batch["weight"].reshape(())
        inputs, count = dict(batch["inputs"]), None if items is None else items.reshape(())

        def call(copy: Any) -> Any:
            without_count(copy)
            with forward_only(copy), trainer.noting() as entries:
                return trainer.compute_loss(copy, inputs, num_items_in_batch=count), entries

        params, held = statistics.split(params)
        buffers = {**module.buffers, **tree.map(torch.zeros_like, held)}
        found = module.apply.call(params, buffers, call)
        (value, entries), added = found if held else (found, {})
        mean = fzero.Mean(value.float() * weight, batch["count"].reshape(()))
        means = [{name: fzero.Mean(x * weight, weight) for name, x in _logged(e, weight).items()} for e in entries]
        metrics: dict[str, Any] = {LOGGED: means} if means else {}
        if held:
            metrics[UPDATED] = statistics.updated(held, added, batch, trainer.args.gradient_accumulation_steps)
        return (mean, metrics) if metrics else mean

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
    batches: Sequence[shapes.Batch], items: Any, microbatches: int, scaled: bool, device: Any, tracks: bool = False
) -> dict[str, Any]:
    """The batch of a step: the micro batches of a window, of one shape.

    items: tokens of the window over all ranks, or None. scaled: whether the loss has been divided by them. tracks:
    whether the model has running statistics.
    """
    short = microbatches - len(batches)
    weight = torch.tensor([1] * len(batches) + [0] * short, device=device)
    once = torch.tensor([1] + [0] * (microbatches - 1), device=device)
    batch = {
        "inputs": shapes.joined([*batches, *[batches[0]] * short]),
        "weight": weight,
        "count": once if scaled else weight,
        **(of_window(len(batches), microbatches, device) if tracks else {}),
    }
    return batch if items is None else {**batch, "items": whole(items, device).expand(microbatches).contiguous()}


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
