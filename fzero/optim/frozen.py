"""Adam whose second moment is frozen after a warm-up, so that its step is linear in what the gradients bring.

Codes that lose bits may then feed back what they lost: into a live second moment the lost part would come squared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fzero import tree
from fzero.optim import _check, _ops
from fzero.optim._named import named
from fzero.optim.adam import AdamState, adamw
from fzero.optim.schedules import Schedule, as_schedule
from fzero.optim.transform import FED, WHOLE, GradientTransformation, PyTree
from fzero.phases import Phases


@named
def freeze_nu(
    learning_rate: float | Tensor | Schedule,
    after: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
) -> Phases[GradientTransformation]:
    """AdamW for `after` steps of the run, then AdamW whose second moment keeps its value. For `Spec(optimizer=...)`.

    learning_rate, betas, eps, weight_decay, bias_correction: as in `adamw`. after: steps of the run, which are
    updates of the second moment: give it more than a few if steps may be skipped, and to a state that AdamW has trained
    the number of its updates.

    The phases are named "warmup" and "frozen". In the second `Precision(reduce="sign")` may code the gradients; in the
    first they travel whole. The state is AdamW's, in the parameters' dtypes. An element whose second
    moment is still 0 is only decayed from then on.

    >>> phases = freeze_nu(0.1, after=1, weight_decay=0.0)
    >>> params, state = [torch.ones(1)], phases["warmup"].init([torch.ones(1)])
    >>> _, state = phases["warmup"].update([torch.ones(1)], state, params)
    >>> updates, state = phases["frozen"].update([torch.full((1,), 3.0)], state, params)
    >>> updates, state.nu  # mu is 0.39, its bias 0.19
    ([tensor([-0.2053])], [tensor([0.0010])])
    """
    where = "freeze_nu"
    schedule = as_schedule(where, learning_rate)
    beta1, beta2 = _check.two_betas(where, betas)
    decay = _check.number(f"{where}: weight_decay", weight_decay)
    steps = _check.steps(f"{where}: after", after, low=1, phases=True)
    adam = adamw(schedule, (beta1, beta2), eps, decay, bias_correction=bias_correction)
    step = FrozenStep(schedule, beta1, 1 - beta2**steps, eps, decay, bias_correction)

    def frozen(grads: PyTree, state: AdamState, params: PyTree) -> tuple[PyTree, AdamState]:
        for name, like in (("grads", grads), ("mu", state.mu), ("nu", state.nu)):
            _check.alike(where, name, like, params)
        mu = tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mu, grads)
        return step.updates(params, mu, state.nu, state.count), AdamState(state.count + 1, mu, state.nu)

    return Phases.after(
        steps,
        ("warmup", adam._replace(feedback=WHOLE)),
        ("frozen", GradientTransformation(adam.init, frozen, feedback=FED)),
    )


@dataclass(frozen=True)
class FrozenStep:
    """Adam's step by a second moment that is no longer updated, whose bias is divided by `of_nu`."""

    schedule: Schedule
    beta1: float
    of_nu: float
    eps: float
    decay: float
    corrected: bool

    def updates(self, params: PyTree, mu: PyTree, nu: PyTree, count: Tensor) -> PyTree:
        """The updates after so many updates: 0 where nu is 0, but for the decay."""
        rate = self.schedule(count)
        size = rate / (1 - self.beta1 ** (count + 1).to(torch.float64)) if self.corrected else rate
        shrink = rate * self.decay  # float64 scalars: each leaf's kernel rounds them to its own dtype

        def update(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            root = (v / self.of_nu if self.corrected else v).sqrt()
            step = torch.where(v > 0, m / (root + self.eps), 0.0)
            return _ops.delta((p - size * step - shrink * p).to(p.dtype), p)

        return tree.map(update, params, mu, nu)
