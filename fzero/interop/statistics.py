"""statistics: training a module that writes to its buffers, as BatchNorm and spectral_norm do."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from fzero import optim, tree
from fzero.compile.resolve import flagged
from fzero.functional import pmax, pmean, value_and_grad
from fzero.optim import GradientTransformation


def with_buffers(
    loss: Callable[..., tuple[Tensor, Any]], params: Any, buffers: Any, optimizer: GradientTransformation
) -> tuple[dict[str, Any], Callable[[Any, Any], Any]]:
    """Returns (the first state, the step) of `loss(params, buffers, batch) -> (value, new buffers)`.

    loss: of a module taken with `mutable=True`. params, buffers: of `from_module`. optimizer: an `fzero.optim`
    transformation.

    They are for `fzero.init(state, fzero.Spec(step=step))`. The state is {"params", "buffers", "opt"}. Each rank
    normalises by its own part of the batch. The new buffers are means over the ranks, so that all ranks hold the same.
    Integers, such as counts of batches, become the largest over the ranks. If some of the params require grad and
    others do not, the latter are frozen.

    >>> import torch, fzero
    >>> from fzero.interop import from_module
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    >>> params, buffers, apply = from_module(net, mutable=True)
    >>> def loss(params, buffers, batch):
    ...     output, buffers = apply(params, buffers, batch)
    ...     return output[:, 0].square().mean(), buffers
    >>> state, step = with_buffers(loss, params, buffers, fzero.optim.sgd(0.1))
    >>> state = fzero.step(fzero.init(state, fzero.Spec(step=step)), torch.randn(8, 4))
    >>> int(state.tree["buffers"]["1.num_batches_tracked"].full())
    1
    """

    trained = flagged(params)

    def split(params: Any) -> tuple[Any, Any]:
        return (params, None) if trained is None else tree.partition(params, lambda path, _: path in trained)

    @wraps(loss)  # errors name the loss
    def swapped(train: Any, batch: Any, buffers: Any, frozen: Any) -> tuple[Tensor, Any]:
        return loss(tree.merge(train, frozen), buffers, batch)

    def step(state: Any, batch: Any) -> Any:
        train, frozen = split(state["params"])
        (value, new), grads = value_and_grad(swapped, has_aux=True)(train, batch, state["buffers"], frozen)
        new = tree.map(lambda x: pmean(x) if x.is_floating_point() else pmax(x), new)
        updates, opt = optimizer.update(grads, state["opt"], train)
        params = tree.merge(optim.apply_updates(train, updates), frozen)
        return {"params": params, "buffers": new, "opt": opt}, {"loss": value}

    return {"params": params, "buffers": buffers, "opt": optimizer.init(split(params)[0])}, step
