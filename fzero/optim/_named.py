"""The arguments of the optimizers and schedules by the names that torch, optax, transformers and DeepSpeed give them.

Python's error for an argument that is not there names neither the one that is meant nor the others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from fzero.tree import suggest

P = ParamSpec("P")
R = TypeVar("R")

_HERE = {  # what others say: what it may be called here
    "lr": ("learning_rate", "max_lr", "peak"),
    "learning_rate": ("peak", "max_lr", "value"),
    "step_size": ("learning_rate", "steps"),
    "max_lr": ("peak",),
    "init_value": ("peak", "value", "low"),
    "peak_value": ("peak", "max_lr"),
    "value": ("peak",),
    "base_lr": ("low",),
    "b1": ("betas",),
    "b2": ("betas",),
    "beta": ("betas", "momentum"),
    "beta1": ("betas",),
    "beta2": ("betas",),
    "decay": ("alpha", "momentum"),
    "rho": ("alpha",),
    "d": ("threshold",),
    "initial_accumulator_value": ("initial",),
    "wd": ("weight_decay",),
    "mu_dtype": ("moments",),
    "weight_decay_mask": ("mask",),
    "ns_steps": ("steps",),
    "ns_coefficients": ("coefficients",),
    "adjust_lr_fn": ("adjust",),
    "freeze_step": ("warmup_steps", "after"),
    "T_max": ("steps",),
    "decay_steps": ("total_steps", "steps"),
    "transition_steps": ("steps", "total_steps"),
    "num_steps": ("steps", "total_steps"),
    "num_training_steps": ("total_steps", "steps"),
    "total_steps": ("steps",),
    "total_iters": ("steps",),
    "num_warmup_steps": ("warmup_steps", "steps"),
    "warmup_steps": ("steps",),
    "eta_min": ("end",),
    "min_lr": ("end", "low"),
    "end_value": ("end",),
    "end_factor": ("end",),
    "gamma": ("rate",),
    "decay_rate": ("rate",),
    "clip_value": ("limit",),
}
_NO_NEED = dict.fromkeys(("fused", "foreach", "capturable"), "Leave it out: a step is one program in any case.")
_ELSEWHERE = _NO_NEED | {
    "params": "Parameters are given to fzero.init.",
    "max_grad_norm": "It is Spec(clip_norm=...).",
    "clip_norm": "It is Spec(clip_norm=...).",
    "differentiable": "Leave it out: the step of fzero.optim.sgd has derivatives, the others have none.",
    "maximize": "Return the negative loss.",
    "amsgrad": "There is no AMSGrad: leave it out for Adam without it.",
    "dampening": "There is none: leave it out for a momentum without it.",
    "decoupled_weight_decay": "The decay of fzero.optim.adamw is decoupled.",
    "last_epoch": "Leave it out: the count of steps is a leaf of the optimizer's state.",
}


def named(make: Callable[P, R]) -> Callable[P, R]:
    """`make`, with a TypeError that says what an argument is called here.

    >>> from fzero import optim
    >>> optim.adamw(lr=3e-4)
    Traceback (most recent call last):
    TypeError: adamw has no argument 'lr': here it is learning_rate=
    >>> optim.adamw(3e-4, fused=True)
    Traceback (most recent call last):
    TypeError: adamw has no argument 'fused'. Leave it out: a step is one program in any case.
    """
    known = inspect.signature(make).parameters

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                told = remedy(name, known) or f".{suggest(name, known)} It has {', '.join(known)}"
                raise TypeError(f"{make.__name__} has no argument {name!r}{told}")
        return make(*args, **kwargs)

    return made


def remedy(name: str, known: Collection[str]) -> str:
    """How an error about an argument that is not among these goes on, where it is known from elsewhere; "" if not."""
    if mine := [here for here in _HERE.get(name, ()) if here in known]:
        return f": here it is {mine[0]}=" + ("(first, second)" if mine[0] == "betas" else "")
    return f". {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
