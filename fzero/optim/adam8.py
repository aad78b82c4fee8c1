"""AdamW with both moments in 8 bits: 2.125 bytes of optimizer state per parameter instead of 8.

The update is that of AdamW (see `fzero.optim.adam`), in float32. Between steps a moment is 8-bit codes with one fp32
scale for each 64 elements. `fzero.optim._adam8` describes the codes, the reasons for them and their accuracy.

In a compiled step the codes and scales lie beside their parameter. They are sharded like fp32 moments, the update runs
on slices, and every ZeRO stage gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import TreeError
from fzero.optim import _adam8, _check, _moments, _ops
from fzero.optim._named import named
from fzero.optim.adam import shrunk
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import GradientTransformation, Mask, PyTree, selected


class Blocks(NamedTuple):
    """A moment in 8 bits, as two pytrees like params: `codes` of the parameters' shapes, int8 or uint8, and `scales`,
    float32 of shape (ceil(numel / 64),)."""

    codes: PyTree
    scales: PyTree


class Adam8State(NamedTuple):
    """`count`: updates made so far, scalar int64. `mu`, `nu`: first and second moments in 8 bits.

    >>> adamw8bit(0.1).init({"w": torch.ones(2)}).mu
    Blocks(codes={'w': tensor([0, 0], dtype=torch.int8)}, scales={'w': tensor([0.])})
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    mu: Blocks
    nu: Blocks


@named
def adamw8bit(
    learning_rate: float | Tensor | Schedule,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.01,
    mask: Mask | None = None,
) -> GradientTransformation:
    """AdamW whose moments take one byte per element each. It raises the errors of `fzero.optim.adamw`.

    learning_rate, betas, eps, weight_decay, mask: as in `adamw`.

    Steps are computed in float32. Updates are float32 too, or of the parameter's dtype if that is wider.

    >>> tx, params = adamw8bit(0.1), {"w": torch.tensor([1.0, -1.0])}
    >>> updates, opt_state = tx.update({"w": torch.tensor([2.0, -3.0])}, tx.init(params), params)
    >>> updates
    {'w': tensor([-0.1010,  0.1010])}
    """
    where = "adamw8bit"
    schedule = as_schedule(where, learning_rate)
    beta1, beta2 = _check.two_betas(where, betas)
    eps = _check.number(f"{where}: eps", eps, above=True)
    decay = _check.hyper(f"{where}: weight_decay", weight_decay)
    kind = _moments.moments(where, "float32")  # of the step

    def init(params: PyTree) -> Adam8State:
        _check.trainable(where, params)
        if mask is not None:
            selected(where, mask, params)  # a rule that matches nothing is better known now than at the first update
        return Adam8State(_check.zero_count(params), _zeros(params, torch.int8), _zeros(params, torch.uint8))

    def update(grads: PyTree, state: Adam8State, params: PyTree) -> tuple[PyTree, Adam8State]:
        _, old, structure = tree.flatten(params)
        grad = _check.alike(where, "grads", grads, params, dtypes=False)
        moments = [column for name in ("mu", "nu") for column in _columns(where, name, getattr(state, name), params)]
        if _ops.watched(*old, *grad):
            raise TypeError(
                f"{where}: its kernel cannot be differentiated, nor transformed by torch.func: call update under "
                "torch.no_grad() on tensors that require grad, or differentiate through fzero.optim.sgd"
            )
        count, rate = state.count + 1, schedule(state.count)
        old, grad = kind.wide(old, old), kind.wide(grad, old)
        corrections = _ops.corrections(count, rate, beta1, beta2)
        stepped, shrink = [], rate * decay
        for p, g, chosen, *own in zip(old, grad, selected(where, mask, params), *moments, strict=True):
            literal = decay if isinstance(decay, float) and chosen else 0.0
            p = shrunk(p, shrink) if isinstance(decay, Tensor) and chosen else p  # the op takes a Python number alone
            stepped.append(_adam8.adamw8(p, g, *own, count, rate, beta1, beta2, eps, literal, *corrections))
        new, *columns = ([result[i] for result in stepped] for i in range(5))
        updates = [_ops.delta(n, p) for n, p in zip(new, old, strict=True)]
        trees = [tree.unflatten(structure, column) for column in columns]
        return tree.unflatten(structure, updates), Adam8State(count, Blocks(*trees[:2]), Blocks(*trees[2:]))

    return GradientTransformation(init, update)


def _zeros(params: PyTree, dtype: torch.dtype) -> Blocks:
    codes = tree.map(lambda p: torch.zeros(p.shape, dtype=dtype, device=p.device), params)
    scales = tree.map(lambda p: torch.zeros(_num_blocks(p), dtype=torch.float32, device=p.device), params)
    return Blocks(codes, scales)


def _num_blocks(p: Tensor) -> int:
    return -(-p.numel() // _adam8.BLOCK)


def _columns(where: str, name: str, moment: Blocks, params: PyTree) -> tuple[list[Tensor], list[Tensor]]:
    """The leaves of codes and scales; raises TreeError where they are not those of params."""
    codes = _check.alike(where, f"{name}.codes", moment.codes, params, dtypes=False)
    paths, scales, structure = tree.flatten(moment.scales)
    _, leaves, wanted = tree.flatten(params)
    if structure != wanted:
        raise TreeError(f"{where}: {name}.scales does not have the structure of params: make the state with init")
    for path, leaf, param in zip(paths, scales, leaves, strict=True):
        if leaf.shape != (_num_blocks(param),):
            raise TreeError(
                f"{where}: {name}.scales/{path} has shape {tuple(leaf.shape)}, but params/{path} has "
                f"{param.numel()} elements, which are {_num_blocks(param)} blocks of {_adam8.BLOCK}"
            )
    return codes, scales
