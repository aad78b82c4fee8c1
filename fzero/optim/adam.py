"""Adam and AdamW.

With gradient g, step number t = 1, 2, ... and learning rate a (Kingma & Ba 2015; Loshchilov & Hutter 2019):

    adamw:  p <- p - a * weight_decay * p            adam:  g <- g + weight_decay * p
    mu <- beta1 * mu + (1 - beta1) * g
    nu <- beta2 * nu + (1 - beta2) * g^2
    p  <- p - a * (mu / (1 - beta1^t)) / (sqrt(nu / (1 - beta2^t)) + eps)

The order of operations and the defaults are those of `torch.optim` with `fused=True`, whose kernel this is. The
parameters of a captured step are bit for bit the same. Moments have the dtype of their parameter, or the dtype that
`moments=` names (`fzero.optim._moments`); then the step is computed in float32 at least. Per step and leaf the kernel
reads four tensors and writes three.

`update` returns `delta(new, p)`. `fzero.optim._ops` explains how `apply_updates` turns it into `new` without rounding.
A transformation after Adam that changes the updates (a `scale`, say) keeps its meaning and costs that folding. The
kernel has no derivative and no batching rule: a loss that differentiates through an optimizer step needs `sgd`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fzero import tree
from fzero.optim import _check, _moments, _ops
from fzero.optim._named import named
from fzero.optim.schedules import Schedule, as_betas, as_schedule
from fzero.optim.transform import GradientTransformation, Mask, PyTree, selected

Betas: TypeAlias = tuple[float | Schedule, float | Schedule]
ENDLESS = 1 << 62  # a step number at which beta^t is 0, and so no bias is left to correct


class AdamState(NamedTuple):
    """`count`: updates made so far, scalar int64. `mu`, `nu`: first and second moments, each a pytree like params, in
    the dtype that `moments=` says.

    >>> adam(0.1).init({"w": torch.ones(2)})
    AdamState(count=tensor(0), mu={'w': tensor([0., 0.])}, nu={'w': tensor([0., 0.])})
    """

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    mu: PyTree
    nu: PyTree


@named
def adam(
    learning_rate: float | Tensor | Schedule,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.0,
    moments: str | None = None,
    bias_correction: bool = True,
) -> GradientTransformation:
    """Adam; `weight_decay` is an L2 term added to the gradient, as in `torch.optim.Adam`.

    learning_rate, weight_decay: numbers or scalar tensors; the rate may be a schedule. betas: each a number or a
    schedule; with a schedule (`fzero.optim.one_cycle`) the step is plain arithmetic instead of the fused kernel. eps: a
    number.
    bias_correction: False leaves out both divisions by 1 - beta^t.
    moments: the dtype in which mu and nu are kept: None (their parameter's), "float32", or "bfloat16" (rounded
    stochastically: half the memory of float32 moments). With a dtype given, the step is computed in float32 at least,
    gradients may have any dtype, and updates are float32 at least; `apply_updates` rounds them into the parameter.

    Raises `SpecError` for a value out of range or of the wrong type, `TreeError` for params that are not
    floating-point tensors or gradients unlike them, and `TypeError` where a derivative would have to pass through the
    step.

    >>> tx, params = adam(0.1), {"w": torch.tensor([1.0, -1.0])}
    >>> updates, opt_state = tx.update({"w": torch.tensor([2.0, -3.0])}, tx.init(params), params)
    >>> updates
    {'w': tensor([-0.1000,  0.1000])}
    """
    _check.flag("adam: bias_correction", bias_correction)
    chosen = {"decoupled": False, "corrected": bias_correction}
    return _adam("adam", learning_rate, betas, eps, weight_decay, moments, None, **chosen)


@named
def adamw(
    learning_rate: float | Tensor | Schedule,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.01,
    mask: Mask | None = None,
    moments: str | None = None,
    bias_correction: bool = True,
) -> GradientTransformation:
    """AdamW: weight decay decoupled from the gradient, as in `torch.optim.AdamW`.

    learning_rate, betas, eps, weight_decay, moments, bias_correction: as in `adam`. mask: the leaves that decay (all by
    default), in any form that `masked` takes.

    >>> tx = adamw(0.1, weight_decay=0.5, mask="**/w")
    >>> params = {"a": {"w": torch.ones(1), "bias": torch.ones(1)}}
    >>> zero = {"a": {"w": torch.zeros(1), "bias": torch.zeros(1)}}
    >>> tx.update(zero, tx.init(params), params)[0]
    {'a': {'w': tensor([-0.0500]), 'bias': tensor([0.])}}

    With bfloat16 moments a parameter takes 4 bytes of state, not 8:

    >>> tx, params = adamw(0.1, moments="bfloat16"), [torch.ones(2)]
    >>> updates, opt_state = tx.update(params, tx.init(params), params)
    >>> updates, opt_state.mu[0].dtype
    ([tensor([-0.1010, -0.1010])], torch.bfloat16)
    """
    _check.flag("adamw: bias_correction", bias_correction)
    chosen = {"decoupled": True, "corrected": bias_correction}
    return _adam("adamw", learning_rate, betas, eps, weight_decay, moments, mask, **chosen)


def _adam(
    where: str,
    learning_rate: float | Tensor | Schedule,
    betas: Betas,
    eps: float,
    weight_decay: float | Tensor,
    moments: str | None,
    mask: Mask | None,
    *,
    decoupled: bool,
    corrected: bool,
) -> GradientTransformation:
    """Adam or AdamW (`decoupled`), with its arguments checked. `where` is its name in messages."""
    schedule = as_schedule(where, learning_rate)
    beta1, beta2 = as_betas(where, betas)
    cycled = callable(beta1) or callable(beta2)
    eps = _check.number(f"{where}: eps", eps, above=True)
    decay = _check.hyper(f"{where}: weight_decay", weight_decay)
    kind = _moments.moments(where, moments)

    def init(params: PyTree) -> AdamState:
        _check.trainable(where, params)
        if mask is not None:
            selected(where, mask, params)  # a rule that matches nothing is better known now than at the first update
        return AdamState(_check.zero_count(params), tree.map(kind.zeros, params), tree.map(kind.zeros, params))

    def update(grads: PyTree, state: AdamState, params: PyTree) -> tuple[PyTree, AdamState]:
        _, old, structure = tree.flatten(params)
        grad = _check.alike(where, "grads", grads, params, dtypes=kind.dtype is None)
        mu, nu = kind.held(where, "mu", state.mu, params), kind.held(where, "nu", state.nu, params)
        if _ops.watched(*old, *grad):
            raise TypeError(
                f"{where}: its fused kernel cannot be differentiated, nor transformed by torch.func: call update under "
                "torch.no_grad() on tensors that require grad, or differentiate through fzero.optim.sgd"
            )
        count, rate = state.count + 1, schedule(state.count)
        old, grad, mu, nu = (kind.wide(tensors, old) for tensors in (old, grad, mu, nu))
        t = count if corrected else torch.full_like(count, ENDLESS)
        now = _Scalars.of(beta1, beta2, state.count, t, rate) if cycled else None
        corrections = () if callable(beta1) or callable(beta2) else _ops.corrections(t, rate, beta1, beta2)
        stepped, shrink = [], rate * decay  # one scalar for all leaves, or their work would not be one op on a mesh
        for p, g, m, v, chosen in zip(old, grad, mu, nu, selected(where, mask, params), strict=True):
            literal = 0.0 if cycled or isinstance(decay, Tensor) or not chosen else decay
            if chosen and (cycled or isinstance(decay, Tensor)):  # the kernel takes a Python number alone
                p, g = (shrunk(p, shrink), g) if decoupled else (p, (g + p * decay).to(g.dtype))
            if now is not None:
                stepped.append(now.stepped(p, g, m, v, eps))
            else:
                stepped.append(_ops.adamw(p, g, m, v, t, rate, beta1, beta2, eps, literal, decoupled, *corrections))
        new, mu, nu = ([triple[i] for triple in stepped] for i in range(3))
        updates = [_ops.delta(n, p) for n, p in zip(new, old, strict=True)]
        mu, nu = kind.stored(mu, count + _moments.FIRST), kind.stored(nu, count + _moments.SECOND)
        state = AdamState(count, tree.unflatten(structure, mu), tree.unflatten(structure, nu))
        return tree.unflatten(structure, updates), state

    return GradientTransformation(init, update)


class _Scalars(NamedTuple):
    """What a step whose betas are schedules needs, scalar float64 each, once for all leaves: the shares of the old and
    the new in mu and nu, the rate over mu's correction, and nu's correction."""

    old1: Tensor
    new1: Tensor
    old2: Tensor
    new2: Tensor
    size: Tensor
    correction: Tensor

    @classmethod
    def of(cls, beta1: float | Schedule, beta2: float | Schedule, count: Tensor, t: Tensor, rate: Tensor) -> _Scalars:
        old1, old2 = (as_schedule("adam", beta)(count) for beta in (beta1, beta2))
        t = t.to(torch.float64)
        return cls(old1, 1 - old1, old2, 1 - old2, rate / (1 - old1**t), 1 - old2**t)

    def stepped(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """(new parameter, mu, nu) of a leaf, in their dtypes: a 0-d leaf would become float64."""
        m = (m * self.old1 + g * self.new1).to(m.dtype)
        v = (v * self.old2 + g * g * self.new2).to(v.dtype)
        return (p - m * self.size / ((v / self.correction).sqrt() + eps)).to(p.dtype), m, v


def shrunk(p: Tensor, by: Tensor) -> Tensor:
    """`p` less the part `by` (0-d) of itself, in its dtype."""
    return (p - p * by).to(p.dtype)  # a 0-d leaf would become float64
