"""optimizers: each optimizer as fzero's and as the reference's: torch.optim, or the textbook's formula by hand.

A reference steps a dict of leaves in place and gives the moments that fzero keeps under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fzero import optim

Leaves = dict[str, Tensor]
EPS = 1e-2  # of what divides by the root of a second moment. No less than rates: no update is larger than its gradient


@dataclass(frozen=True)
class Row:
    """One optimizer. make: fzero's. reference: makes a function (leaves, gradients, step from 0) -> moments by name.

    exact: parameters are compared too; else losses and moments before the first update alone. linear: names of moments
    that are the first gradient, times a factor. tolerance: of parameters in float64. jumps: a gradient that is rounding
    alone, such as that of a key's bias, moves its leaf as far as any other.
    """

    make: Callable[[], Any]
    reference: Callable[[], Callable[[Leaves, Leaves, int], Mapping[str, Leaves]]]
    exact: bool = True
    linear: tuple[str, ...] = ()
    tolerance: float = 1e-12
    steps: int | None = field(default=None)
    jumps: bool = False


def _torch(name: str, moments: Mapping[str, str], rate: Callable[[int], float] | None = None, **options: Any) -> Any:
    """An optimizer of torch.optim. moments: its names to fzero's."""

    def start() -> Any:
        made: dict[str, Any] = {}

        def step(leaves: Leaves, grads: Leaves, count: int) -> Mapping[str, Leaves]:
            if not made:
                made["own"] = getattr(torch.optim, name)(list(leaves.values()), foreach=False, **options)
            own = made["own"]
            if rate is not None:
                own.param_groups[0]["lr"] = rate(count)
            for path, leaf in leaves.items():
                leaf.grad = grads[path].clone()
            own.step()
            return {
                ours: {path: own.state[leaf][theirs] for path, leaf in leaves.items()}
                for theirs, ours in moments.items()
            }

        return step

    return start


def _lion() -> Any:
    held: Leaves = {}

    def step(leaves: Leaves, grads: Leaves, count: int) -> Mapping[str, Leaves]:
        for path, p in leaves.items():
            m = held.get(path, torch.zeros_like(p))
            p.copy_(p - 0.01 * (torch.sign(0.9 * m + 0.1 * grads[path]) + 0.1 * p))
            held[path] = 0.99 * m + 0.01 * grads[path]
        return {"mu": dict(held)}

    return step


def _nadam() -> Any:
    """torch.optim.NAdam's formulas; its own product of momenta is rounded to float32."""
    mu: Leaves = {}
    nu: Leaves = {}
    product = [1.0]

    def step(leaves: Leaves, grads: Leaves, count: int) -> Mapping[str, Leaves]:
        n = count + 1
        now, following = (0.9 * (1 - 0.5 * 0.96 ** (k * 4e-3)) for k in (n, n + 1))
        product[0] *= now
        for path, p in leaves.items():
            g = grads[path]
            mu[path] = 0.9 * mu.get(path, torch.zeros_like(p)) + 0.1 * g
            nu[path] = 0.999 * nu.get(path, torch.zeros_like(p)) + 0.001 * g * g
            root = (nu[path] / (1 - 0.999**n)).sqrt() + EPS
            ahead = following / (1 - product[0] * following) * mu[path]
            p.copy_(p - 0.01 * ((1 - now) / (1 - product[0]) * g + ahead) / root)
        return {"mu": dict(mu), "nu": dict(nu)}

    return step


def _lamb() -> Any:
    mu: Leaves = {}
    nu: Leaves = {}

    def step(leaves: Leaves, grads: Leaves, count: int) -> Mapping[str, Leaves]:
        n = count + 1
        for path, p in leaves.items():
            g = grads[path]
            mu[path] = 0.9 * mu.get(path, torch.zeros_like(p)) + 0.1 * g
            nu[path] = 0.999 * nu.get(path, torch.zeros_like(p)) + 0.001 * g * g
            u = mu[path] / (1 - 0.9**n) / ((nu[path] / (1 - 0.999**n)).sqrt() + EPS) + 0.1 * p
            p.copy_(p - 0.01 * _ratio(p, u) * u)
        return {}

    return step


def _lars() -> Any:
    held: Leaves = {}

    def step(leaves: Leaves, grads: Leaves, count: int) -> Mapping[str, Leaves]:
        for path, p in leaves.items():
            u = grads[path] + 0.1 * p
            held[path] = 0.9 * held.get(path, torch.zeros_like(p)) - 0.1 * 0.1 * _ratio(p, u) * u
            p.copy_(p + held[path])
        return {}

    return step


def _ratio(p: Tensor, u: Tensor) -> Tensor:
    a, b = torch.linalg.vector_norm(p), torch.linalg.vector_norm(u)
    return torch.where((a == 0) | (b == 0), torch.ones_like(a), a / b)


def _none() -> Any:
    return lambda leaves, grads, count: {}


def _rate(count: Any) -> Any:
    """A learning rate by the number of updates, an int or a 0-d tensor."""
    return 0.1 * 0.5 ** (count.double() if isinstance(count, Tensor) else count)


_ADAM = {"exp_avg": "mu", "exp_avg_sq": "nu"}
TABLE: dict[str, Row] = {
    "sgd": Row(lambda: optim.sgd(0.1), _torch("SGD", {}, lr=0.1)),
    "scheduled": Row(lambda: optim.sgd(_rate), _torch("SGD", {}, _rate, lr=0.1)),
    "momentum": Row(
        lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        _torch("SGD", {"momentum_buffer": "momentum"}, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        linear=("momentum",),
    ),
    "adam": Row(lambda: optim.adam(0.01, eps=EPS), _torch("Adam", _ADAM, lr=0.01, eps=EPS), linear=("mu",)),
    "adamw": Row(
        lambda: optim.adamw(0.01, eps=EPS, weight_decay=0.1),
        _torch("AdamW", _ADAM, lr=0.01, eps=EPS, weight_decay=0.1),
        linear=("mu",),
    ),
    "rmsprop": Row(
        lambda: optim.rmsprop(0.01, eps=EPS, momentum=0.9, centered=True),
        _torch("RMSprop", {}, lr=0.01, eps=EPS, momentum=0.9, centered=True),
        tolerance=1e-10,  # the root of a difference of two squares
    ),
    "adagrad": Row(lambda: optim.adagrad(0.01, eps=EPS), _torch("Adagrad", {}, lr=0.01, eps=EPS)),
    "adadelta": Row(lambda: optim.adadelta(eps=EPS), _torch("Adadelta", {}, lr=1.0, eps=EPS)),
    "nadam": Row(lambda: optim.nadam(0.01, eps=EPS), _nadam, linear=("mu",)),
    "radam": Row(lambda: optim.radam(0.01, eps=EPS), _torch("RAdam", _ADAM, lr=0.01, eps=EPS), linear=("mu",)),
    "lamb": Row(lambda: optim.lamb(0.01, eps=EPS, weight_decay=0.1), _lamb),
    "lars": Row(lambda: optim.lars(0.1, weight_decay=0.1, trust_coefficient=0.1), _lars),
    "lion": Row(lambda: optim.lion(0.01, weight_decay=0.1), _lion, exact=False, linear=("mu",), steps=1),
    "adafactor": Row(
        lambda: optim.adafactor(0.01), _torch("Adafactor", {}, lr=0.01, eps=(None, 1e-3)), tolerance=1e-9, jumps=True
    ),
    "muon": Row(lambda: optim.muon(0.02, others=optim.adamw(0.01)), _none, exact=False, steps=1),
    "adamw8bit": Row(lambda: optim.adamw8bit(0.01), _none, exact=False, steps=1),
}
WEIGHTS = {"sgd": 3, "momentum": 3, "adam": 3, "adamw": 4}  # of others: 1
