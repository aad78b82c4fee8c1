"""ambient: torch's settings around a call, and their effect on a step. None of them changes its results silently.

| around a call of fzero                                              | effect                                      |
|---------------------------------------------------------------------|---------------------------------------------|
| autocast of any device                                              | nothing, and a warning says so              |
| inference mode, no_grad                                             | nothing                                     |
| default dtype and device, deterministic algorithms, attention's     | the user's functions see them, and a new    |
| backends, the dtype that an autocast without one takes              | value traces a new program                  |
| modes of torch functions or dispatch, hooks on saved tensors        | refused where a program is traced, which    |
|                                                                     | would keep what they change                 |
| anomaly detection (of a step), torch.func transforms, tracers,      | refused                                     |
| a trace of fzero itself                                             |                                             |

A setting that the user's own functions enter has its usual effect inside them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from fzero import backend
from fzero._torch_compat import ambient_modes, autocast_left, in_functorch, in_make_fx, saved_tensor_hooks
from fzero.capture import context
from fzero.errors import CaptureError

log = logging.getLogger("fzero")

_AUTOCAST = tuple(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla") if torch.amp.is_autocast_available(kind)
)
_default_device: ContextVar[torch.device | None] = ContextVar("fzero_default_device", default=None)


@contextmanager
def steady() -> Iterator[None]:
    """For calls of fzero, as context or decorator: leaves inference mode, autocast and the default device.

    The user's functions get the default device back by `of_caller`.
    """
    with torch.inference_mode(False), _without_autocast(), _on_cpu():
        yield


def of_caller() -> AbstractContextManager[object]:
    """A context for functions of the user within `steady`: the caller's default device."""
    return _default_device.get() or nullcontext()


def settings(device: torch.device) -> tuple[str, ...]:
    """The settings on which a program that is traced now depends, as texts. `device` is the state's."""
    attention = torch.backends.cuda
    backends = {
        "flash": attention.flash_sdp_enabled(),
        "efficient": attention.mem_efficient_sdp_enabled(),
        "math": attention.math_sdp_enabled(),
        "cudnn": attention.cudnn_sdp_enabled(),
    }
    return (
        f"default dtype {torch.get_default_dtype()}",
        f"default device {_default_device.get() or 'cpu'}",
        f"deterministic algorithms {'on' if torch.are_deterministic_algorithms_enabled() else 'off'}",
        f"attention by {', '.join(name for name, on in backends.items() if on) or 'nothing'}",
        f"autocast's own dtype {torch.get_autocast_dtype(device.type)}",
    )


def check(name: str, *, backward: bool = False) -> None:
    """Raises CaptureError inside a torch.func transform or a tracer; with `backward` also under anomaly detection.

    `name` is the function of fzero that was called.
    """
    if in_functorch():
        raise CaptureError(
            f"fzero.{name} was called inside a torch.func transform (vmap, grad, jvp, functionalize): it writes a "
            "state and talks to other ranks. Call it outside; transforms belong into the loss or the step"
        )
    if in_make_fx():
        raise CaptureError(
            f"fzero.{name} was called while make_fx or torch.export traces: it traces the step itself. Call it outside"
        )
    if backward and torch.is_anomaly_enabled():
        raise CaptureError(
            f"torch.autograd's anomaly detection is on, and fzero.{name} runs a backward that was traced before, where "
            f"it would find nothing. Switch it off around fzero.{name} (torch.autograd.set_detect_anomaly(False)); "
            "Spec(nonfinite='raise') ends at a gradient that is not finite"
        )


def check_outside(call: str) -> None:
    """Raises CaptureError where a step is traced: in a loss, a step or what these call. `call` is what is called.

    It comes before ranks agree on that call: they agree on the step that is traced, and on its error.
    """
    if context.active() is not None:
        raise CaptureError(
            f"{call} is called inside a loss or a step, which is traced once: it would run then, and not at each step. "
            "Call it outside, and pass what it returns in the batch. The parameters are the loss's first argument; "
            "inside a custom step an evaluation is fzero.forward(fn)(params, batch)"
        )


def check_trace() -> None:
    """Raises CaptureError for modes and hooks around the call, whose effects would stay in a traced program."""
    modes = ambient_modes()
    if modes:
        raise CaptureError(
            f"{type(modes[-1]).__name__} is active around a call that traces a program, which would keep what the mode "
            "changes. Leave it before the call, or enter it inside the loss or the step"
        )
    if saved_tensor_hooks():
        raise CaptureError(
            "hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu) are active around a call "
            "that traces a program, which would keep what they change. Leave them before the call, or enter them "
            "inside the loss; for less memory see Spec(remat=...)"
        )


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Leaves every autocast and forgets its casts; the loss may enter its own."""
    on = tuple(kind for kind in _AUTOCAST if torch.is_autocast_enabled(kind))
    if not on:
        yield
        return
    _say(tuple(f"{kind}, {torch.get_autocast_dtype(kind)}" for kind in on))
    with autocast_left(on):
        yield


@functools.cache
def _say(on: tuple[str, ...]) -> None:
    log.warning(
        "fzero: torch.autocast (%s) is on around a call of fzero, where it has no effect: what is computed in which "
        "dtype says Spec(precision='autocast') or fzero.Precision(compute=...). One that the loss enters works. "
        "This is said once",
        "; ".join(on),
    )


@contextmanager
def _on_cpu() -> Iterator[None]:
    """The CPU as default device; the caller's is kept for `of_caller`."""
    device = torch.get_default_device()
    if backend.of(device).on_host:
        yield
        return
    token = _default_device.set(device)
    try:
        with torch.device("cpu"):
            yield
    finally:
        _default_device.reset(token)
