"""Muon: orthogonalised momentum for matrices, another optimizer for all else. As `torch.optim.Muon` computes it.

    mu <- momentum * mu + (1 - momentum) * g
    d  =  momentum * mu + (1 - momentum) * g  if nesterov,  mu  otherwise
    o  =  orthogonalize(d)                                      (Newton-Schulz in bfloat16: fzero.optim._matrix)
    p  <- p - learning_rate * weight_decay * p - learning_rate * r * o

For a (rows, cols) matrix, r is sqrt(max(1, rows / cols)) with adjust="original". With "match_rms_adamw", whose learning
rates are AdamW's, r is 0.2 sqrt(max(rows, cols)). Source: Keller Jordan's Muon; Liu et al. 2025, "Muon is Scalable for
LLM Training".

All operations are pointwise, except `fzero::orthogonalize`. That is one op per matrix, and it needs all of the matrix.
A layout that keeps a matrix whole on one rank has nothing to gather. There is one moment per parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.errors import SpecError
from fzero.optim import _check, _moments, _ops
from fzero.optim._matrix import orthogonalize
from fzero.optim._named import named
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import GradientTransformation, Mask, PyTree, _with_holes, selected

_ADJUST = {
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / max(cols, 1))),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
}


class MuonState(NamedTuple):
    """`count`: updates made so far, scalar int64. `matrices`: their momentum, with None for other leaves: by this name
    a layout knows that it is to keep each of them in full on one rank (`fzero.plan.whole_leaves`). `others`: the state
    of `others=` over the other leaves, or () without.

    >>> muon(0.02).init({"w": torch.ones(1, 2)})
    MuonState(count=tensor(0), matrices={'w': tensor([[0., 0.]])}, others=())
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    matrices: PyTree
    others: PyTree


@named
def muon(
    learning_rate: float | Tensor | Schedule,
    weight_decay: float | Tensor = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    steps: int = 5,
    adjust: str = "original",
    mask: Mask | None = None,
    others: GradientTransformation | None = None,
    moments: str | None = None,
) -> GradientTransformation:
    """Muon for matrices, another optimizer for the rest.

    learning_rate, weight_decay, momentum, nesterov, eps: as in `torch.optim.Muon`; the rate may be a schedule.
    coefficients, steps: of Newton-Schulz. adjust: "original" or "match_rms_adamw". moments: None, "float32" or
    "bfloat16", as in `adamw`. mask: the leaves for Muon (default: all of two dimensions). others: for the rest.
    Embeddings and output heads are better left to `others`: name the hidden matrices in `mask`.

    Raises `SpecError` for a value out of range or of the wrong type, for a mask that selects a leaf of another number
    of dimensions, and for leaves left over without `others`; `TreeError` for params that are not floating-point
    tensors or gradients unlike them; `TypeError` where a derivative would have to pass through the step.

    >>> import fzero
    >>> tx = muon(0.1, weight_decay=0.0, others=fzero.optim.lion(0.01))
    >>> params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    >>> updates, _ = tx.update({"w": torch.eye(2), "b": torch.ones(2)}, tx.init(params), params)
    >>> updates["w"].round(decimals=2), updates["b"]
    (tensor([[-0.1100,  0.0000],
            [ 0.0000, -0.1100]]), tensor([-0.0100, -0.0100]))
    """
    _check_options(adjust, others)
    options = _Muon(
        schedule=as_schedule("muon", learning_rate),
        decay=_check.hyper("muon: weight_decay", weight_decay),
        momentum=_check.number("muon: momentum", momentum, high=1.0),
        nesterov=nesterov,
        newton_schulz=(
            _check.steps("muon: steps", steps, low=1),
            *_coefficients(coefficients),
            _check.number("muon: eps", eps, above=True),
        ),
        adjust=adjust,
        mask=mask,
        others=others,
        kind=_moments.moments("muon", moments),
    )
    return GradientTransformation(options.init, options.update)


def hidden_matrices(path: str, leaf: Tensor) -> bool:
    """A mask for `muon`: matrices that are neither an embedding nor an output head, by the words of their path.

    path: of the leaf, within `params`. leaf: its tensor.

    >>> hidden_matrices("h.0.mlp.weight", torch.ones(2, 2)), hidden_matrices("embed_tokens.weight", torch.ones(2, 2))
    (True, False)
    """
    return leaf.dim() == 2 and not any(word in path.lower() for word in ("embed", "lm_head"))


@dataclass(frozen=True)
class _Muon:
    """The options, checked."""

    schedule: Schedule
    decay: float | Tensor
    momentum: float
    nesterov: bool
    newton_schulz: tuple[int, float, float, float, float]
    adjust: str
    mask: Mask | None
    others: GradientTransformation | None
    kind: _moments.Moments

    def init(self, params: PyTree) -> MuonState:
        _check.trainable("muon", params)
        flags = _matrices(self.mask, self.others, params)
        rest = () if self.others is None else self.others.init(_with_holes(params, [not c for c in flags]))
        return MuonState(_check.zero_count(params), tree.map(self.kind.zeros, _with_holes(params, flags)), rest)

    def update(self, grads: PyTree, state: MuonState, params: PyTree) -> tuple[PyTree, MuonState]:
        """Steps the matrices, and the other leaves by `others`. Raises TreeError, and TypeError where a derivative
        would pass."""
        flags, structure = _matrices(self.mask, self.others, params), tree.flatten(params)[2]
        _check.alike("muon", "grads", grads, params, dtypes=False)
        held = _with_holes(params, flags)
        _, old, inner = tree.flatten(held)
        grad = _check.alike("muon", "grads", _with_holes(grads, flags), held, dtypes=self.kind.dtype is None)
        mu = self.kind.held("muon", "matrices", state.matrices, held)
        if _ops.watched(*old, *grad):
            raise TypeError(
                "muon: its orthogonalisation cannot be differentiated, nor transformed by torch.func: call update "
                "under torch.no_grad() on tensors that require grad, or differentiate through fzero.optim.sgd"
            )
        old, grad, mu = (self.kind.wide(tensors, old) for tensors in (old, grad, mu))
        moved, mu = self.stepped(old, grad, mu, self.schedule(state.count))
        passed, rest = [], state.others
        if self.others is not None:
            gaps = [not c for c in flags]
            result, rest = self.others.update(_with_holes(grads, gaps), rest, _with_holes(params, gaps))
            passed = tree.flatten(result)[1]
        both = iter(moved), iter(passed)
        updates = [next(both[0] if c else both[1]) for c in flags]
        count = state.count + 1
        mu = self.kind.stored(mu, count + _moments.FIRST)
        return tree.unflatten(structure, updates), MuonState(count, tree.unflatten(inner, mu), rest)

    def stepped(
        self, old: list[Tensor], grad: list[Tensor], mu: list[Tensor], rate: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(updates, the new momentum) of the matrices."""
        updates, keep = [], 1 - rate * self.decay
        scales: dict[float, Tensor] = {}  # leaves of one ratio share its scalar, so that on a mesh their work is one op
        mu = [torch.lerp(m, g, 1 - self.momentum) for m, g in zip(mu, grad, strict=True)]
        for p, g, m in zip(old, grad, mu, strict=True):
            o = orthogonalize(torch.lerp(g, m, self.momentum) if self.nesterov else m, *self.newton_schulz)
            ratio = _ADJUST[self.adjust](*p.shape)
            if ratio not in scales:
                scales[ratio] = rate * -ratio
            updates.append(_ops.delta(p * keep + o.to(p.dtype) * scales[ratio], p))
        return updates, mu


def _matrices(mask: Mask | None, others: GradientTransformation | None, params: PyTree) -> list[bool]:
    """For each leaf, whether muon steps it. Raises SpecError for a mask or a leaf that does not fit."""
    paths, leaves, _ = tree.flatten(params)
    flags = [p.dim() == 2 for p in leaves] if mask is None else selected("muon", mask, params)
    for path, leaf, flag in zip(paths, leaves, flags, strict=True):
        if flag and leaf.dim() != 2:
            raise SpecError(
                f"muon: the mask selects params/{path} of shape {tuple(leaf.shape)}, but muon steps matrices: leave it "
                "to others=, as in muon(0.02, mask=..., others=adamw(3e-4))"
            )
        if not flag and others is None:
            raise SpecError(
                f"muon: params/{path} of shape {tuple(leaf.shape)} is not among the matrices it steps, and nothing "
                "else does: write muon(0.02, others=fzero.optim.adamw(3e-4))"
            )
    return flags


def _coefficients(values: Any) -> tuple[float, float, float]:
    if not isinstance(values, (tuple, list)) or len(values) != 3:
        raise SpecError(f"muon: coefficients is {values!r}, but it must be three numbers: (3.4445, -4.775, 2.0315)")
    a, b, c = (_check.number(f"muon: coefficients[{i}]", x, low=-math.inf, above=True) for i, x in enumerate(values))
    return a, b, c


def _check_options(adjust: Any, others: Any) -> None:
    if not isinstance(adjust, str) or adjust not in _ADJUST:
        raise SpecError(f"muon: adjust is {_check.kind(adjust)}, but it must be 'original' or 'match_rms_adamw'")
    if others is not None and not isinstance(others, GradientTransformation):
        raise SpecError(
            f"muon: others is {_check.kind(others)}, not a GradientTransformation: write others=fzero.optim.adamw(3e-4)"
        )
