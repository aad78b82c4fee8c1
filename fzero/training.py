"""training: the step that `Spec(loss=..., optimizer=...)` stands for. An ordinary pure function; write your own like
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fzero import optim
from fzero.functional import value_and_grad


def training_step(
    loss: Callable[..., Any], optimizer: optim.GradientTransformation, clip_norm: float | None = None
) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    """`step({"params", "opt_state"}, batch) -> (the same, {"loss"})`: gradients, clipping, update."""
    clip = optim.identity() if clip_norm is None else optim.clip_by_global_norm(clip_norm)

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        params = state["params"]
        value, grads = value_and_grad(loss)(params, batch)
        grads, _ = clip.update(grads, clip.init(params), params)
        updates, opt_state = optimizer.update(grads, state["opt_state"], params)
        return {"params": optim.apply_updates(params, updates), "opt_state": opt_state}, {"loss": value}

    return step


def initial_state(params: Any, optimizer: optim.GradientTransformation) -> dict[str, Any]:
    """The state that `training_step` starts from."""
    return {"params": params, "opt_state": optimizer.init(params)}
