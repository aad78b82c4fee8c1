"""1-bit Adam: after a warm-up the variance is frozen, and the momentum travels in signs, with error feedback.

    warm-up, Adam:                                  coded, on each rank i of N, with nu as the warm-up left it:
      mu = b1 mu + (1 - b1) mean(g)                   m_i = b1 mu + (1 - b1) g_i
      nu = b2 nu + (1 - b2) mean(g)^2                 mu  = coded mean of m_i, with what was lost before
      p  = p - lr (mu / (sqrt(nu) + eps) + decay p)   p   = p - lr (mu / (sqrt(nu) + eps) + decay p)

Source: arXiv 2102.02888; DeepSpeed had it until September 2026. Four things differ from its code. A block of 64
elements has a scale of its own, not a tensor, so rows without gradients keep their bits. An element whose nu is still 0
is not updated, where Adam would divide by eps. What was lost is in checkpoints. Moments have their bias corrected, as
in `adamw`, unless `bias_correction=False`: without it the loss of short runs is another.

Bytes that a rank sends for each parameter and step of the second phase, at zero=0: 0.375 (N - 1) / N, and 8 of that in
the first. At the stages 1 to 3 mu is sharded, and so gathered, as parameters are: 4 more for each. State: 12 bytes for
a parameter (p, mu, nu), 4 for what this rank has lost, 4 / N for its slice of the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero import tree
from fzero.error_feedback import CodedError, coded_error, coded_mean
from fzero.errors import SpecError, TreeError
from fzero.optim import _check
from fzero.optim._named import named
from fzero.optim.adam import AdamState, adamw
from fzero.optim.frozen import FrozenStep
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import GradientTransformation, PyTree
from fzero.phases import Phases

WARMUP, CODED = "warmup", "coded"  # the names of the phases


class OnebitAdamState(NamedTuple):
    """count: updates so far, scalar int64. mu, nu: like params, float32. error: what the codes have lost."""

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    mu: PyTree
    nu: PyTree
    error: CodedError


@named
def onebit_adam(
    learning_rate: float | Tensor | Schedule,
    warmup_steps: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
) -> Phases[GradientTransformation]:
    """1-bit Adam (arXiv 2102.02888), with decoupled weight decay. For `Spec(optimizer=...)`, at any ZeRO stage.

    learning_rate, betas, eps, weight_decay, bias_correction: as in `adamw`. warmup_steps: of Adam, after which the
    variance is frozen and the momentum travels in signs: 15 to 25 % of a run. They count steps of the run, as
    `state.step` does. Parameters are float32.

    The optimizer takes local gradients in its second phase, so `clip_norm`, `clip_value`, a loss scale, `reduce="each"`
    and the axes `pp` and `tp` are refused. `nonfinite="skip"` is allowed. On one rank nothing is coded. Raises
    SpecError, and TreeError for parameters of another dtype.

    >>> phases = onebit_adam(0.1, warmup_steps=100)
    >>> phases.at(99), phases.at(100), phases["coded"].takes
    ('warmup', 'coded', 'local')
    >>> params = {"w": torch.ones(2)}
    >>> updates, _ = phases["warmup"].update(params, phases["warmup"].init(params), params)
    >>> updates
    {'w': tensor([-0.1000, -0.1000])}
    """
    where = "onebit_adam"
    schedule = as_schedule(where, learning_rate)
    beta1, beta2 = _check.two_betas(where, betas)
    eps = _check.number(f"{where}: eps", eps, above=True)
    decay = _check.number(f"{where}: weight_decay", weight_decay)
    warmup = _check.steps(f"{where}: warmup_steps", warmup_steps, low=1, phases=True)
    adam = adamw(schedule, (beta1, beta2), eps, decay, bias_correction=bias_correction)
    step = FrozenStep(schedule, beta1, 1 - beta2**warmup, eps, decay, bias_correction)

    def warm(grads: PyTree, state: OnebitAdamState, params: PyTree) -> tuple[PyTree, OnebitAdamState]:
        updates, after = adam.update(grads, AdamState(*_checked(state)[:3]), params)
        return updates, OnebitAdamState(after.count, after.mu, after.nu, state.error)

    def coded(grads: PyTree, state: OnebitAdamState, params: PyTree) -> tuple[PyTree, OnebitAdamState]:
        for name, like in (("grads", grads), ("mu", _checked(state).mu), ("nu", state.nu)):
            _check.alike(where, name, like, params)
        own = tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mu, grads)
        mu, error = coded_mean(own, state.error, "sign", both_ways=True)
        updates = step.updates(params, mu, state.nu, state.count)
        return updates, OnebitAdamState(state.count + 1, mu, state.nu, error)

    return Phases.after(
        warmup,
        (WARMUP, GradientTransformation(_first, warm)),
        (CODED, GradientTransformation(_first, coded, takes="local")),
    )


def _first(params: PyTree) -> OnebitAdamState:
    """The first state. Raises TreeError for parameters of another dtype than float32."""
    _check.trainable("onebit_adam", params)
    for path, leaf in zip(*tree.flatten(params)[:2], strict=True):
        if leaf.dtype is not torch.float32:
            raise TreeError(
                f"onebit_adam: params/{path} is {leaf.dtype}, but what travels in codes is kept in float32: hold it in "
                "float32, with Precision(compute='bf16') if it is to be computed in fewer bits"
            )
    mu, nu = (tree.map(torch.zeros_like, params) for _ in range(2))
    return OnebitAdamState(_check.zero_count(params), mu, nu, coded_error(params, both_ways=True))


def _checked(state: OnebitAdamState) -> OnebitAdamState:
    """The state. Raises SpecError for that of another optimizer."""
    if not isinstance(state, OnebitAdamState):
        raise SpecError(f"onebit_adam: opt_state is {_check.kind(state)}: make it with this optimizer's init")
    return state
