"""The only file that may import a private torch name; each with the version it was seen in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _profiler as _cpp_profiler  # 2.11.0, 2.13.0
from torch._compile import _disable_dynamo as untraced_by_dynamo  # 2.11.0, 2.13.0
from torch._subclasses.fake_tensor import (  # 2.11.0, 2.13.0
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors  # 2.11.0, 2.13.0
from torch.fx.experimental.proxy_tensor import (  # 2.11.0, 2.13.0
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
)
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11.0, 2.13.0

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "allocations",
    "below_autograd",
    "compiled_functions_traced",
    "disable_proxy_modes_tracing",
    "fused_adam_",
    "fused_adamw_",
    "in_functorch",
    "is_fake",
    "kernel_of",
    "make_fx",
    "real_tensors",
    "tracing_graph",
    "untraced_by_dynamo",
]

# aten's fused optimizer kernels, in place over lists of tensors: seen in 2.11.0 and 2.13.0
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor (shape and dtype without memory)."""
    return isinstance(value, FakeTensor)


def tracing_graph() -> torch.fx.Graph | None:
    """The graph that `make_fx` is writing at this moment, if any (the mode's `tracer`: 2.11.0, 2.13.0)."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


@contextmanager
def compiled_functions_traced() -> Iterator[None]:
    """Lets `make_fx` trace through a `torch.compile`d function instead of refusing it (2.11.0, 2.13.0)."""
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
        yield
        return
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


def in_functorch() -> bool:
    """Whether a torch.func transform is active around the caller (2.11.0, 2.13.0)."""
    return torch._C._functorch.maybe_current_level() is not None


def kernel_of(target: Any) -> Any:
    """What an `OpOverload` calls, one Python frame nearer to the kernel (2.11.0, 2.13.0)."""
    return getattr(target, "_op", target)


def below_autograd() -> Any:
    """A context in which ops go straight to their kernels: nothing is recorded for autograd (2.11.0, 2.13.0)."""
    return torch._C._AutoDispatchBelowAutograd()


@contextmanager
def allocations() -> Iterator[list[tuple[int, int]]]:
    """(`time.time_ns()`, bytes) of every allocation of a CPU tensor in this thread, releases with negative bytes.

    The list is filled when the context ends; a release of what was there before is not in it. This is
    `torch.profiler` with `profile_memory=True`, but deaf to ops: an allocation costs some tens of nanoseconds and an op
    nothing, instead of microseconds (2.11.0, 2.13.0). Raises RuntimeError where a profiler is at work already.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("a profiler is at work in this thread: its events and these cannot be had at one time")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes two lines about itself to stderr
    found: list[tuple[int, int]] = []
    state, options = _cpp_profiler.ProfilerState.KINETO, _cpp_profiler._ExperimentalConfig()
    config = _cpp_profiler.ProfilerConfig(state, False, True, False, False, False, options, "")
    activities = {torch.profiler.ProfilerActivity.CPU}
    torch.autograd._prepare_profiler(config, activities)
    torch.autograd._enable_profiler(config, activities, {_cpp_profiler.RecordScope.USER_SCOPE})  # type: ignore[call-arg]
    try:
        yield found
    finally:
        events: list[Any] = torch.autograd._disable_profiler().events()
        ours = [e for e in events if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU]
        found += [(e.start_ns(), e.nbytes()) for e in sorted(ours, key=lambda e: e.start_ns())]
