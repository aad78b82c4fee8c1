"""training: the step that `Spec(loss=..., optimizer=...)` stands for. It is an ordinary pure function; write your own
like it.

The state is {"params", "opt_state"}, with "key" if randomness is asked for, "loss_scale" with fp16, and "error" where
gradients travel in codes whose loss is fed back. The optimizer sees fp32 parameters, and only the trainable ones. A
step whose gradients are not finite may be skipped. Every leaf then keeps its bits, on every rank, because the flag is
computed from reduced gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch

from fzero import optim, random, tree
from fzero.capture.graph import PerRank
from fzero.capture.provenance import called, defined_at
from fzero.error_feedback import first_error
from fzero.errors import CaptureError, TreeError, leaf_name
from fzero.functional import with_metrics
from fzero.optim.transform import FED
from fzero.precision import LOW, Precision
from fzero.spec import Spec

UPDATED = "updated"  # a loss's metric {path: value}: what leaves of params that do not train become, as statistics
STEPS_OWN = ("loss", "grad_norm", "update_norm", "finite", "loss_scale", "skipped")  # the names of its metrics


@dataclass(frozen=True)
class Training:
    """The parts of the step; the fields are those of `fzero.Spec`. Immutable."""

    loss: Callable[..., Any]
    optimizer: optim.GradientTransformation
    precision: Precision = field(default_factory=Precision)
    trainable: tuple[str, ...] | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    nonfinite: str = "ignore"

    def init(self, params: Any, key: torch.Tensor | None = None) -> dict[str, Any]:
        """Returns the first state. Raises TreeError if no leaf that is to train can train."""
        self._check(params)
        params = tree.map_with_path(self._held, params)
        state = {"params": params, "opt_state": self.optimizer.init(self._master(self._split(params)[0]))}
        if key is not None:
            state["key"] = key
        if self.precision.loss_scale is not None:
            state["loss_scale"] = self.precision.loss_scale.init(_device(params))
        if self.precision.feeds_back:
            state["error"] = first_error(self._split(params)[0], self.precision)
        return state

    def step(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        """`(state, batch) -> (state, metrics)`: gradients, clipping, update."""
        scaler = self.precision.loss_scale
        scaling = state["loss_scale"] if scaler else {}
        train, frozen = self._split(state["params"])
        next_key, draw = random.split(state["key"]) if "key" in state else (None, None)
        loss = self.loss if frozen is None else _joined(self.loss, self.precision)
        arguments = (batch,) if frozen is None else (batch, frozen)
        local = self.optimizer.takes == "local"
        precision, error = self._codes(state)
        (value, own), grads, *errors = with_metrics(
            loss, key=draw, scale=scaling.get("scale"), precision=precision, reduce=not local, error=error
        )(train, *arguments)
        frozen = _updated(loss, frozen, own.pop(UPDATED, {}))
        _check_names(loss, own)
        metrics = {"loss": value, **own}
        if not local:
            grads, metrics = self._clipped(grads, metrics)
        master = self._master(train)
        update = called(self.optimizer.update, "(grads, opt_state, params)", grads, state["opt_state"], master)
        updates, opt_state = _pair(update)
        train = self._rounded(optim.apply_updates(master, updates), train, draw)
        new = {"params": tree.merge(train, frozen), "opt_state": opt_state}
        if "error" in state:
            new["error"] = errors[0] if errors else state["error"]
        if self.nonfinite == "ignore":
            return new if next_key is None else {**new, "key": next_key}, metrics
        if local:  # the gradients differ between ranks; what is made of them does not
            metrics["update_norm"] = optim.global_norm(updates)
        finite = torch.isfinite(metrics["update_norm" if local else "grad_norm"])
        metrics["finite"] = finite
        new = _where(finite, new, state)
        if next_key is not None:  # another draw may do better: a skipped step uses its key up
            new["key"] = next_key if self.nonfinite == "skip" else torch.where(finite, next_key, state["key"])
        if scaler is not None and scaling is not None:
            new["loss_scale"] = scaler.update(scaling, finite)
            metrics |= {"loss_scale": scaling["scale"], "skipped": new["loss_scale"]["skipped"]}
        return new, metrics

    # --- pieces

    def _split(self, params: Any) -> tuple[Any, Any]:
        """Returns (the leaves that train, the rest or None): leaves under the rules, and floating ones only."""
        rules = self.trainable or ("**",)

        def trains(path: str, leaf: torch.Tensor) -> bool:
            return not _counts(leaf) and any(tree.matches(rule, path) for rule in rules)

        train, frozen = tree.partition(params, trains)
        return (train, frozen) if tree.flatten(frozen)[1] else (params, None)

    def _codes(self, state: Any) -> tuple[Precision, Any]:
        """(the policy of this phase, what earlier codes have lost): an optimizer that wants whole gradients gets
        them."""
        if not self.precision.feeds_back:
            return self.precision, None
        if self.optimizer.feedback == FED:
            return self.precision, state["error"]
        return replace(self.precision, reduce=None, exact=self.precision.exact if self.precision.gather else None), None

    def _check(self, params: Any) -> None:
        """Raises TreeError for a per-rank parameter, and for a rule under which no leaf can train."""
        paths, leaves, _ = tree.flatten(params)
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, PerRank):
                raise TreeError(
                    f"{leaf_name('params', path)} is per_rank: parameters are the same on every rank. Keep it in the "
                    "state of a step= of your own"
                )
        for rule in self.trainable or ("**",):
            named = [leaf for path, leaf in zip(paths, leaves, strict=True) if tree.matches(rule, path)]
            if named and all(_counts(leaf) for leaf in named):
                raise TreeError(f"no leaf of params under {rule!r} can train: gradients need floating tensors")

    def _held(self, path: str, leaf: Any) -> Any:
        return leaf.to(self.precision.held_dtype(path, leaf.dtype)) if isinstance(leaf, torch.Tensor) else leaf

    def _master(self, params: Any) -> Any:
        """The parameters as the optimizer sees them: of 16-bit ones that are held without a master, fp32 values."""
        if self.precision.params is None:
            return params
        return tree.map(lambda p: p.to(torch.float32) if p.dtype in LOW else p, params)

    def _rounded(self, new: Any, old: Any, draw: Any) -> Any:
        if draw is None or self.precision.params is None:
            return new  # only 16-bit leaves are rounded, and their state has a key
        seed = draw[0] ^ draw[1]
        return tree.map(lambda n, o: n if n.dtype is o.dtype else optim.stochastic_round(n, seed), new, old)

    def _clipped(self, grads: Any, metrics: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.clip_norm is not None or self.nonfinite != "ignore":
            norm = optim.global_norm(grads)  # before values are clipped: an infinite one must show
            metrics = {**metrics, "grad_norm": norm}
            if self.clip_norm is not None and not math.isinf(self.clip_norm):
                coefficient = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
                grads = tree.map(lambda g: (g * coefficient).to(g.dtype), grads)
        if self.clip_value is not None:
            limit = self.clip_value
            grads = tree.map(lambda g: g.clamp(-limit, limit), grads)
        return grads, metrics


def _joined(loss: Callable[..., Any], precision: Precision) -> Callable[..., Any]:
    """The loss of all parameters as one of the trainable ones."""

    @wraps(loss)
    def whole(train: Any, batch: Any, frozen: Any, **key: Any) -> Any:
        # they are parameters, so they are cast like them; `cast_batch` is for the other arguments
        frozen = tree.map_with_path(lambda path, x: x.to(precision.compute_dtype(path, x.dtype)), frozen)
        return loss(tree.merge(train, frozen), batch, **key)

    return whole


def _updated(loss: Callable[..., Any], frozen: Any, new: Any) -> Any:
    """The leaves that do not train, with what the loss makes of some. Raises CaptureError for another leaf."""
    if not isinstance(new, Mapping):
        raise CaptureError(
            f"metric {UPDATED!r} of {defined_at(loss)}: that name is kept for new values of frozen leaves, a dict by "
            "path. Give it another"
        )
    paths = tree.flatten(frozen)[0]
    for path in new:
        if path not in paths:
            raise CaptureError(f"metric {UPDATED!r} of {defined_at(loss)}: {path!r} is no frozen leaf of params")
    return tree.map_with_path(lambda path, x: new[path].to(x.dtype) if path in new else x, frozen) if new else frozen


def _check_names(loss: Callable[..., Any], metrics: Mapping[str, Any]) -> None:
    """Raises CaptureError for a loss's metric that bears the name of one of the step's."""
    taken = next((name for name in metrics if name in STEPS_OWN), None)
    if taken is not None:
        raise CaptureError(
            f"metric {taken!r} of {defined_at(loss)}: the step has a metric of that name ({', '.join(STEPS_OWN)} are "
            "its own). Give it another"
        )


def _pair(result: Any) -> tuple[Any, Any]:
    """What an optimizer's update returned. Raises TreeError unless it is a pair."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TreeError(
            f"the optimizer's update returned {type(result).__name__}: needed (updates, opt_state), as "
            "GradientTransformation(init, update) says"
        )
    return result


def _where(finite: torch.Tensor, new: dict[str, Any], old: Any) -> dict[str, Any]:
    return {
        name: tree.map(lambda n, o: n if n is o else torch.where(finite, n, o), new[name], old[name]) for name in new
    }


def _counts(leaf: Any) -> bool:
    """Whether a leaf holds integers or bools, which never train. (A leaf that is no tensor, or complex, is refused
    later.)"""
    return isinstance(leaf, torch.Tensor) and not leaf.dtype.is_floating_point and not leaf.dtype.is_complex


def _device(params: Any) -> torch.device:
    return next((x.device for x in tree.flatten(params)[1]), torch.device("cpu"))


def training_of(spec: Spec) -> Training:
    """The step that a spec's `loss` and `optimizer` stand for; of an optimizer with phases, that of the first."""
    spec = spec.in_phase()
    assert spec.loss is not None
    assert isinstance(spec.optimizer, optim.GradientTransformation)
    return Training(
        spec.loss,
        spec.optimizer,
        precision=spec.numerics.policy,
        trainable=spec.numerics.trainable_rules,
        clip_norm=spec.clip_norm,
        clip_value=spec.clip_value,
        nonfinite=spec.numerics.nonfinite_policy,
    )
