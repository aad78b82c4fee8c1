"""Training over slow links: 0/1 Adam, 1-bit LAMB and DiLoCo, as steps and optimizers with phases.

    python examples/coded_training.py --method diloco
    torchrun --nproc-per-node 2 examples/coded_training.py --method zero-one

Each is written with `fzero.Phases`, `fzero.value_and_grad(reduce=False)`, `fzero.coded_mean` and leaves per rank. What
a rank sends is in each phase's program: the example prints the bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.ir.program import wire_bytes
from fzero.phases import Phases

Loss = Callable[[Any, Any], Any]


# --- DiLoCo -----------------------------------------------------------------------------------------------------------


def diloco(
    loss: Loss, inner: optim.GradientTransformation, every: int, lr: float = 0.7, momentum: float = 0.9,
    codec: str | None = None,
) -> tuple[Callable[[Any], Any], Phases[Callable[[Any, Any], Any]]]:  # fmt: skip
    """(the first state of params, the step) of DiLoCo (arXiv 2311.08105): each rank takes `every` steps of its own.

    Then the mean of what they have moved is the gradient of an outer SGD with Nesterov's momentum.

    codec: in which that mean travels, with error feedback; None: float32.
    """
    outer = optim.sgd(lr, momentum=momentum, nesterov=True)

    def first(params: Any) -> dict[str, Any]:
        own = {"params": params, "opt_state": inner.init(params)}
        error = None if codec is None else fzero.coded_error(params)
        return {"params": params, "own": fzero.per_rank(own), "outer": outer.init(params), "error": error}

    def local(state: Any, batch: Any) -> Any:
        own = state["own"]
        value, grads = fzero.value_and_grad(loss, reduce=False)(own["params"], batch)
        updates, opt_state = inner.update(grads, own["opt_state"], own["params"])
        own = {"params": optim.apply_updates(own["params"], updates), "opt_state": opt_state}
        return {**state, "own": own}, {"loss": value}

    def meeting(state: Any, batch: Any) -> Any:
        state, metrics = local(state, batch)
        moved = tree.map(torch.sub, state["params"], state["own"]["params"])
        if codec is None:
            mean, error = fzero.pmean(moved), None
        else:
            mean, error = fzero.coded_mean(moved, state["error"], codec)
        updates, after = outer.update(mean, state["outer"], state["params"])
        params = optim.apply_updates(state["params"], updates)
        own = {**state["own"], "params": params}
        return {"params": params, "own": own, "outer": after, "error": error}, metrics

    of = lambda step: "outer" if step % every == every - 1 else "inner"  # noqa: E731
    return first, Phases(of, {"inner": local, "outer": meeting})


# --- 0/1 Adam ---------------------------------------------------------------------------------------------------------


def zero_one_adam(
    loss: Loss, lr: optim.Schedule, freeze: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    doubled_after: int = 16, longest: int = 16,
) -> tuple[Callable[[Any], Any], Phases[Callable[[Any, Any], Any]]]:  # fmt: skip
    """(the first state of params, the step) of 0/1 Adam (arXiv 2202.06009).

    For `freeze` steps gradients travel in signs. At some steps they travel in float32, and the variance is updated; the
    distance of these doubles after each `doubled_after` of them. Then each rank takes local steps. Their number doubles
    after each `doubled_after` meetings, up to `longest`; what all have moved travels in signs.
    """
    b1, b2 = betas
    signs = lambda value, error: fzero.coded_mean(value, error, "sign", both_ways=True)  # noqa: E731
    scale = lambda nu: tree.map(lambda v: torch.where(v > 0, v.sqrt() + eps, torch.inf), nu)  # noqa: E731

    def first(params: Any) -> dict[str, Any]:
        zeros = lambda: tree.map(torch.zeros_like, params)  # noqa: E731
        own = fzero.per_rank({"mu": zeros(), "moved": zeros()})
        sums = {"count": torch.tensor(0), "rates": torch.tensor(0.0)}
        error = fzero.coded_error(params, both_ways=True)
        return {"params": params, "mu": zeros(), "nu": zeros(), "own": own, **sums, "error": error}

    def together(state: Any, mean: Any, nu: Any, error: Any, value: Tensor) -> Any:
        """A step of all ranks from a mean of gradients."""
        mu = tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["mu"], mean)
        rate = lr(state["count"]).float()
        params = tree.map(lambda p, m, s: p - rate * m / s, state["params"], mu, scale(nu))
        new = {"params": params, "mu": mu, "nu": nu, "own": {**state["own"], "mu": mu}, "error": error}
        return {**state, **new, "count": state["count"] + 1}, {"loss": value}

    def full(state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(loss)(state["params"], batch)
        nu = tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state["nu"], grads)
        return together(state, grads, nu, state["error"], value)

    def coded(state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(loss, reduce=False)(state["params"], batch)
        mean, error = signs(grads, state["error"])
        return together(state, mean, state["nu"], error, value)

    def local(state: Any, batch: Any) -> Any:
        own = state["own"]
        here = tree.map(lambda p, u, s: p - u / s, state["params"], own["moved"], scale(state["nu"]))
        value, grads = fzero.value_and_grad(loss, reduce=False)(here, batch)
        rate = lr(state["count"]).float()
        mu = tree.map(lambda m, g: b1 * m + (1 - b1) * g, own["mu"], grads)
        moved = tree.map(lambda u, m: u + rate * m, own["moved"], mu)
        sums = {"count": state["count"] + 1, "rates": state["rates"] + rate}
        return {**state, **sums, "own": {"mu": mu, "moved": moved}}, {"loss": value}

    def meeting(state: Any, batch: Any) -> Any:
        state, metrics = local(state, batch)
        moved, error = signs(state["own"]["moved"], state["error"])
        params = tree.map(lambda p, u, s: p - u / s, state["params"], moved, scale(state["nu"]))
        mu = tree.map(lambda u: u / state["rates"], moved)
        own = {"mu": mu, "moved": tree.map(torch.zeros_like, moved)}
        rates = torch.zeros_like(state["rates"])
        return {**state, "params": params, "mu": mu, "own": own, "rates": rates, "error": error}, metrics

    def switch(state: Any, batch: Any) -> Any:
        """The first meeting: what codes of gradients have lost is not in the units of what is moved."""
        return meeting({**state, "error": tree.map(torch.zeros_like, state["error"])}, batch)

    known = [(0, 1, 0)]  # by step: the next one that is full or a meeting, the distance, how many there were at it

    def of(step: int) -> str:
        while len(known) <= step:
            at, distance, many = known[-1]
            if at == len(known) - 1:
                many += 1
                if many == doubled_after:
                    distance, many = distance * 2 if len(known) < freeze else min(2 * distance, longest), 0
                at += distance
            known.append((freeze, 1, 0) if len(known) == freeze else (at, distance, many))
        if step == freeze:
            return "switch"
        due = known[step][0] == step
        return ("full" if due else "coded") if step < freeze else "meeting" if due else "local"

    return first, Phases(of, {"full": full, "coded": coded, "local": local, "switch": switch, "meeting": meeting})


# --- 1-bit LAMB -------------------------------------------------------------------------------------------------------


class OnebitLambState(NamedTuple):
    """fresh: the variance of the gradients that momenta tell of. ratio: of each leaf, the mean trust ratio of the
    warm-up. factor: what it was last multiplied by."""

    count: Tensor  # type: ignore[assignment]  # tuples have a method of this name
    mu: Any
    nu: Any
    fresh: Any
    ratio: Any
    factor: Any
    error: Any


def onebit_lamb(
    lr: optim.Schedule, warmup_steps: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
    of_ratio: float = 0.9, bounds: tuple[float, float] = (0.5, 4.0), change: float = 0.1,
) -> Phases[optim.GradientTransformation]:  # fmt: skip
    """1-bit LAMB (arXiv 2104.06069): LAMB; then momenta travel in signs, the variance is frozen, and the trust ratio is
    its mean in the warm-up times a factor, which follows how the variance of the mean gradients changes.

    The paper scales momenta of leaves to one size before they are coded. Here each 64 elements have their own scale.
    """
    b1, b2 = betas

    def init(params: Any) -> OnebitLambState:
        zeros = lambda: tree.map(torch.zeros_like, params)  # noqa: E731
        ones = lambda value: tree.map(lambda p: torch.full((), value), params)  # noqa: E731
        error = fzero.coded_error(params, both_ways=True)
        return OnebitLambState(torch.tensor(0), zeros(), zeros(), zeros(), ones(0.0), ones(1.0), error)

    def direction(m: Tensor, v: Tensor) -> Tensor:
        return torch.where(v > 0, m / (v.sqrt() + eps), 0.0)

    def warm(grads: Any, state: OnebitLambState, params: Any) -> Any:
        mu = tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        u = tree.map(direction, mu, nu)

        def trust(p: Tensor, u: Tensor) -> Tensor:
            size, length = p.square().sum().sqrt(), u.square().sum().sqrt()
            return torch.where((size > 0) & (length > 0), size / length, 1.0)

        now = tree.map(trust, params, u)
        ratio = tree.map(lambda r, c: of_ratio * r + (1 - of_ratio) * c, state.ratio, now)
        rate = lr(state.count).float()
        updates = tree.map(lambda c, u: -rate * c * u, now, u)
        return updates, OnebitLambState(state.count + 1, mu, nu, nu, ratio, state.factor, state.error)

    def coded(grads: Any, state: OnebitLambState, params: Any) -> Any:
        own = tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        mu, error = fzero.coded_mean(own, state.error, "sign", both_ways=True)
        mean = tree.map(lambda new, old: (new - b1 * old) / (1 - b1), mu, state.mu)
        fresh = tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.fresh, mean)

        def factor(frozen: Tensor, fresh: Tensor, last: Tensor) -> Tensor:
            most = ((frozen.sqrt() + eps) / (fresh.sqrt() + eps)).max().clamp(*bounds)
            return torch.minimum(torch.maximum(most, last * (1 - change)), last * (1 + change))

        factors = tree.map(factor, state.nu, fresh, state.factor)
        rate, unbiased = lr(state.count).float(), 1 - of_ratio**warmup_steps
        updates = tree.map(
            lambda r, f, m, v: -rate * (r / unbiased) * f * direction(m, v), state.ratio, factors, mu, state.nu
        )
        return updates, OnebitLambState(state.count + 1, mu, state.nu, fresh, state.ratio, factors, error)

    return Phases.after(
        warmup_steps,
        ("warmup", optim.GradientTransformation(init, warm)),
        ("coded", optim.GradientTransformation(init, coded, takes="local")),
    )


# --- a small run ------------------------------------------------------------------------------------------------------


def toy_params(key: Tensor) -> Any:
    first, second = fzero.random.split(key)
    return {"w": fzero.random.normal(first, (64, 128)) / 8, "out": fzero.random.normal(second, (128, 64)) / 11}


def toy_loss(params: Any, x: Tensor) -> Tensor:
    """How far a network of one layer is from turning x round."""
    return (torch.tanh(x @ params["w"]) @ params["out"] - x.flip(1)).square().mean()


def toy_batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


def toy_spec(method: str, steps: int) -> tuple[Any, fzero.Spec]:
    """(the first state, or params, as a function of a key; the spec) of a method."""
    rate, slower = (optim.warmup_cosine(lr, steps // 10, steps) for lr in (1e-2, 3e-3))
    if method == "onebit-lamb":
        return toy_params, fzero.Spec(loss=toy_loss, optimizer=onebit_lamb(rate, steps // 5), zero=0)
    if method == "onebit-adam":
        onebit = optim.onebit_adam(slower, steps // 5, (0.9, 0.99))
        return toy_params, fzero.Spec(loss=toy_loss, optimizer=onebit, zero=0)
    if method == "zero-one":
        first, step = zero_one_adam(toy_loss, rate, freeze=steps // 2)
    else:
        first, step = diloco(toy_loss, optim.adamw(slower), every=8, codec="int8")
    return lambda key: first(toy_params(key)), fzero.Spec(step=step, zero=0)


METHODS = ("diloco", "zero-one", "onebit-lamb", "onebit-adam")


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", choices=METHODS, default="diloco")
    parser.add_argument("--steps", type=int, default=80)
    asked = parser.parse_args(argv)
    params, spec = toy_spec(asked.method, asked.steps)
    state, losses = fzero.init(params, spec), []
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for number in range(asked.steps):
        state = fzero.step(state, toy_batch(rank, number))
        losses.append(float(state.metrics["loss"]))
    if rank == 0:
        print(f"{asked.method}: the loss was {losses[0]:.3f} and is {losses[-1]:.3f}")
        for name in spec.phases.each if spec.phases else ():
            lowered = fzero.lower(spec, params, toy_batch(0, 0), world_size=2, phase=name)
            sent = sum(wire_bytes(lowered.program, op) for op in lowered.program.ops)
            print(f"  {name}: {sent:,} bytes that each of 2 ranks sends in a step")
    return losses


if __name__ == "__main__":
    main()
