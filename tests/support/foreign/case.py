"""A foreign model as a case, and its outcome: equal to eager PyTorch, refused with a remedy, or a fault.

The loss, every gradient and every buffer after the step, from the interpreter and from the executor in spoiled memory,
one rank, beside autograd on a copy of the module. Nothing is drawn: models are built without dropout.
"""

import copy
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fzero
from fzero.interop import from_module
from lab.fuzz import runs

DEVICE = os.environ.get("FZERO_TEST_DEVICE", "cpu")
TOLERANCE = 1e-5
ROUNDING = 1e-3  # a larger gap is none
FLOOR = 1e-3  # of the largest gradient: what a smaller leaf is compared to (the bias of an attention key has none)
REMEDY = re.compile(r"\b(write|pass|return|give|say|keep|use|put|call|set|leave|register|compute|take)\b", re.I)

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """`make()` is a module in the mode it is run in, `batch()` a dict of tensors, `loss(module, batch)` a 0-d tensor.

    Buffers are state (`mutable=True`) unless `mutable` is False."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Callable[..., Any], Any], Tensor]
    mutable: bool = True


def eager(case: Case, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    module = copy.deepcopy(module)
    value = case.loss(module, batch)
    params = {name: x for name, x in module.named_parameters() if x.requires_grad}
    grads = torch.autograd.grad(value, list(params.values()), allow_unused=True)
    found = {"loss": value.detach()}
    for (name, x), grad in zip(params.items(), grads, strict=True):
        found[f"grads/{name}"] = torch.zeros_like(x) if grad is None else grad
    return {**found, **{f"buffers/{name}": x.detach() for name, x in module.named_buffers()}}


def prepared(case: Case, module: nn.Module, batch: Batch) -> runs.Prepared:
    """A step that returns loss, gradients and new buffers as metrics."""
    params, buffers, apply = from_module(module, mutable=case.mutable)
    frozen = {name: params[name] for name in apply.frozen}

    def step(state: Any, batch: Any) -> Any:
        def loss(train: Any, batch: Any, frozen: Any, buffers: Any) -> Any:
            new = dict(buffers)

            def model(*args: Any, **kwargs: Any) -> Any:
                if not case.mutable:
                    return apply({**train, **frozen}, new, *args, **kwargs)
                output, fresh = apply({**train, **frozen}, new, *args, **kwargs)
                new.update(fresh)
                return output

            return case.loss(model, batch), new

        call = fzero.value_and_grad(loss, has_aux=True, allow_unused=True)
        (value, new), grads = call(state["train"], batch, state["frozen"], state["buffers"])
        return state, {"loss": value, "grads": grads, "buffers": new}

    train = {name: value for name, value in params.items() if name not in frozen}
    state = {"train": train, "frozen": frozen, "buffers": buffers}
    fields = {"step": step, "allow_unused": True, "zero": 0, "device": DEVICE}
    return runs.Prepared({}, state, [batch], fields)


def gaps(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """By name the largest difference, relative to the largest element wanted; gradients as FLOOR says, and a running
    mean likewise of the running deviation, for one of centred values is rounding alone."""
    sizes = [float(x.abs().max()) for name, x in wanted.items() if name.startswith("grads/") and x.numel()]
    largest = max(sizes, default=0.0)

    def floor(name: str) -> float:
        if name.startswith("grads/"):
            return FLOOR * largest
        variance = wanted.get(name.replace("running_mean", "running_var")) if "running_mean" in name else None
        return FLOOR * float(variance.abs().max()) ** 0.5 if variance is not None and variance.numel() else 0.0

    return {name: _gap(found[name], x, floor(name)) for name, x in wanted.items()}


def _gap(found: Tensor, wanted: Tensor, floor: float) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if runs.same_bits(found, wanted) or not wanted.numel():
        return 0.0
    found, wanted = found.double(), wanted.double()
    difference = float((found - wanted).abs().max())
    scale = max(float(wanted.abs().max()), floor)
    return difference / scale if difference == difference and scale else float("inf")


def outcome(case: Case) -> dict[str, Any]:
    """`status` (equal, refused, wrong, error, or not eager), the number of parameters, and the gap or the message.

    A gap that may be rounding (batch statistics of two small images magnify it; on a device, where sums are made in any
    order, every gap may) is measured again in float64, to the same bound; `dtype` says so."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _outcome(case, torch.float32)
        if found["status"] == "wrong" and (found["gap"] < ROUNDING or DEVICE != "cpu"):
            again = _outcome(case, torch.float64)
            found = {**again, "dtype": "float64"} if again["status"] == "equal" else found
        return found


def _outcome(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    try:
        module = case.make().to(DEVICE, dtype)
        batch = {name: x.to(DEVICE, dtype if x.is_floating_point() else x.dtype) for name, x in case.batch().items()}
        size = sum(x.numel() for x in module.parameters())
        wanted = eager(case, module, batch)
        again = eager(case, module, batch)
    except Exception as error:
        return {"status": "not eager", "detail": _words(error)}
    return {"parameters": size, **_through_fzero(case, module, batch, wanted, again)}


def _through_fzero(
    case: Case, module: nn.Module, batch: Batch, wanted: dict[str, Tensor], again: dict[str, Tensor]
) -> dict[str, Any]:
    draws = any(not runs.same_bits(wanted[name], again[name]) for name in wanted)
    low = None
    try:
        made = prepared(case, module, batch)
        low = runs.lowered(made)
        both = [runs.bound(made, low)]
    except fzero.FzeroError as error:
        status = "refused" if low is None and REMEDY.search(str(error)) else "error"
        return {"status": status, "error": type(error).__name__, "detail": _words(error)}
    except Exception as error:
        return {"status": "error", "error": type(error).__name__, "detail": f"{_place(error)} {_words(error)}"}
    if draws:
        return {"status": "not eager", "detail": "eager differs from itself"}
    note = {}
    try:
        both.append(runs.interpreted(made, low))
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            return {"status": "error", "error": type(error).__name__, "detail": f"interpreter: {_words(error)}"}
        note = {"note": "by the executor alone: a kernel returns other strides than torch says, the interpreter stops"}
    far = {name: max(gap) for name, gap in _merged([gaps(found, wanted) for found in both]).items()}
    worst = max(far, key=lambda name: far[name])
    if not far[worst] <= TOLERANCE:
        return {"status": "wrong", "gap": far[worst], "detail": f"{worst} differs by {far[worst]:.1e}"}
    return {"status": "equal", "gap": far[worst], **note}


def _merged(several: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [each[name] for each in several] for name in several[0]}


def _words(error: Exception) -> str:
    return f"{error}".strip().replace("\n", " ")[:600] or type(error).__name__


def _place(error: Exception) -> str:
    trace_back = error.__traceback__
    while trace_back is not None and trace_back.tb_next is not None:
        trace_back = trace_back.tb_next
    return "" if trace_back is None else f"{trace_back.tb_frame.f_code.co_filename}:{trace_back.tb_lineno}:"
