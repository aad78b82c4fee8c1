"""trace: private names of torch for traces: fake tensors, `make_fx`, and the modes around a call."""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch._C import DisableTorchFunction as unreplaced  # 2.11.0, 2.13.0
from torch._compile import _disable_dynamo as untraced_by_dynamo  # 2.11.0, 2.13.0
from torch._dispatch.python import enable_python_dispatcher as by_decompositions  # 2.11.0, 2.13.0
from torch._higher_order_ops.scan import scan_op as torch_scan  # 2.11.0, 2.13.0
from torch._ops import OpOverload  # 2.11.0, 2.13.0
from torch._subclasses.fake_tensor import (  # 2.11.0, 2.13.0
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors  # 2.11.0, 2.13.0
from torch.fx import _lazy_graph_module, _symbolic_trace  # 2.11.0, 2.13.0
from torch.fx.experimental.proxy_tensor import (  # 2.11.0, 2.13.0
    disable_autocast_cache as autocast_uncached,
)
from torch.fx.experimental.proxy_tensor import (  # 2.11.0, 2.13.0
    disable_proxy_modes_tracing as unrecorded,
)
from torch.fx.experimental.proxy_tensor import (  # 2.11.0, 2.13.0
    get_proxy_mode,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack  # 2.11.0, 2.13.0
from torch.utils._device import DeviceContext  # 2.11.0, 2.13.0
from torch.utils._python_dispatch import (  # 2.11.0, 2.13.0
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _push_mode,
    _unset_infra_mode,
    autograd_would_have_decomposed,
)
from torch.utils._python_dispatch import _disable_current_modes as unwatched  # 2.11.0, 2.13.0

from fzero._torch_compat.fakes import is_fake

__all__ = [
    "ONE_THREAD",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "RecordingMode",
    "RngStateMode",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "ambient_modes",
    "autocast_left",
    "autocast_uncached",
    "backward_number",
    "by_decompositions",
    "checks_deferred",
    "compiled_functions_traced",
    "decomposes",
    "distributions_unchecked",
    "forward_number",
    "fx_tracing",
    "gradient_hooks",
    "graph_module",
    "in_functorch",
    "in_make_fx",
    "jiterator_refused",
    "real_tensors",
    "recording",
    "saved_tensor_hooks",
    "scatters_keep_overlap",
    "seen_in_backwards",
    "torch_scan",
    "unrecorded",
    "unreplaced",
    "untraced_by_dynamo",
    "unwatched",
]


def in_make_fx() -> bool:
    """Whether `make_fx` traces around the caller (2.11.0, 2.13.0)."""
    return get_proxy_mode() is not None and recording() is None


class RecordingMode(TorchDispatchMode):
    """A mode in the place of the one of `make_fx`: below all others but the fake tensors', and one at a time
    (`_TorchDispatchModeKey.PROXY`: 2.11.0, 2.13.0)."""

    def __init__(self) -> None:
        super().__init__()
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self._before: list[Any] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._before.append(_unset_infra_mode(self._mode_key))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if (before := self._before.pop()) is not None:
            _push_mode(before)


def recording() -> Any:
    """The RecordingMode that is on, or None (2.11.0, 2.13.0)."""
    mode = get_proxy_mode()
    return mode if isinstance(mode, RecordingMode) else None


# torch.fx patches globals of its own while it traces, Inductor and Dynamo their configuration while they work: one
# thread at a time (2.11.0, 2.13.0)
ONE_THREAD = threading.RLock()


def graph_module(graph: torch.fx.Graph, root: torch.nn.Module | None = None) -> torch.fx.GraphModule:
    """A graph as something to call, with the tensors of `root`. Its Python is written at the first call: most graphs of
    a lowering are only rewritten."""
    return _lazy_graph_module._LazyGraphModule(root or torch.nn.Module(), graph)


@functools.cache
def _composite(op: OpOverload) -> bool:
    """Whether an op has a form in other ops that autograd would see."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def decomposes(op: OpOverload, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether an op that was dispatched is one that autograd would have written in other ops; in inference mode there
    is no autograd to do so (`OpOverload.decompose`: 2.11.0, 2.13.0)."""
    if not _composite(op) or op in _SIZES:
        return False
    return autograd_would_have_decomposed(op, optree.tree_leaves([*args, *kwargs.values()]))  # type: ignore[arg-type]


_SIZES = {torch.ops.aten.size.default, torch.ops.aten.stride.default, torch.ops.aten.storage_offset.default}


@contextmanager
def fx_tracing() -> Iterator[None]:
    """What torch does otherwise while torch.fx traces: a `torch.compile`d function is called as it is
    (`_is_fx_tracing_flag`: 2.11.0, 2.13.0; `_is_fx_tracing_context`: 2.14.1)."""
    if _fx_marked is not None:
        with _fx_marked(True):
            yield
        return
    before, _symbolic_trace._is_fx_tracing_flag = _symbolic_trace._is_fx_tracing_flag, True
    try:
        yield
    finally:
        _symbolic_trace._is_fx_tracing_flag = before


_fx_marked = getattr(_symbolic_trace, "_is_fx_tracing_context", None)
if _fx_marked is None:
    _symbolic_trace._is_fx_tracing_flag  # noqa: B018  (an import fails, and not the first step, where it is not there)


@contextmanager
def compiled_functions_traced() -> Iterator[None]:
    """Lets `make_fx` trace through a `torch.compile`d function instead of refusing it (2.11.0, 2.13.0)."""
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
        yield
        return
    with ONE_THREAD, torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """`torch.distributions` does not look at the values of its arguments, unless they ask for it. Within `make_fx`, so
    in one thread at a time (2.11.0, 2.13.0)."""
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


# a fake tensor in a message (2.11.0, 2.13.0): FakeTensor(..., device='cuda:0', size=(2, 3), grad_fn=<AddBackward0>)
_FAKE_TEXT = re.compile(r"FakeTensor\(\.\.\.[^()]*?size=\(([^()]*)\)[^()]*\)")


@contextmanager
def checks_deferred() -> Iterator[None]:
    """`torch._check_tensor_all` of a fake tensor is an op, which raises when the program runs: `aten::_assert_async`.
    Within `make_fx`, so in one thread at a time (2.11.0, 2.13.0)."""
    before = torch._check_tensor_all_with

    def check(error_type: type[Exception], cond: Any, message: Callable[[], Any] | None = None) -> None:
        if not is_fake(cond) or cond.dtype != torch.bool:
            return before(error_type, cond, message)
        text = "a check of values failed" if message is None else str(message())
        torch._assert_async(cond.all(), _FAKE_TEXT.sub(r"a tensor of shape (\1)", text))

    torch._check_tensor_all_with = check
    try:
        yield
    finally:
        torch._check_tensor_all_with = before


@contextmanager
def jiterator_refused(error: Callable[[], Exception]) -> Iterator[None]:
    """`torch.cuda.jiterator` raises `error()`: it would launch a kernel on memory that a fake tensor does not have.
    Within `make_fx`, so in one thread at a time (2.11.0)."""
    name = "_cuda_jiterator_compile_and_launch_kernel"
    before = getattr(torch._C, name, None)

    def refuse(*args: Any) -> Any:
        raise error()

    if before is not None:
        setattr(torch._C, name, refuse)
    try:
        yield
    finally:
        if before is not None:
            setattr(torch._C, name, before)


@contextmanager
def seen_in_backwards(mode: TorchFunctionMode) -> Iterator[None]:
    """A mode sees what a backward calls in Python too, as the recomputation of `torch.utils.checkpoint`: torch leaves
    the mode for `torch.autograd.grad` and all that it does. All of it runs in the caller's thread, on CUDA too, where
    each device has one: what follows a trace follows one thread. Backwards of other threads are left alone. Within a
    trace, so in one thread at a time (`torch.autograd._engine_run_backward`: 2.11.0, 2.13.0)."""
    before, thread = torch.autograd._engine_run_backward, threading.get_ident()

    def run(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return before(*args, **kwargs)
        with mode, torch.autograd.set_multithreading_enabled(False):
            return before(*args, **kwargs)

    torch.autograd._engine_run_backward = run
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = before


def ambient_modes() -> list[Any]:
    """The modes around the caller that see torch functions or dispatched ops, without the mode of a default device
    (2.11.0, 2.13.0)."""
    functions = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    return [*functions, *_get_current_dispatch_mode_stack()]


def forward_number() -> int:
    """The number of the node of autograd that was made last; of an op that is dispatched now, its own node
    (2.11.0, 2.13.0)."""
    return int(torch.autograd._get_sequence_nr()) - 1


def backward_number() -> int | None:
    """The number of the node of autograd whose backward runs now; None outside of a backward (2.11.0, 2.13.0)."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def saved_tensor_hooks() -> bool:
    """Whether hooks on saved tensors are active around the caller (2.11.0, 2.13.0)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def gradient_hooks(x: torch.Tensor) -> bool:
    """Whether a tensor has hooks that run when autograd has its gradient (2.11.0, 2.13.0)."""
    return bool(x._backward_hooks or getattr(x, "_post_accumulate_grad_hooks", None))


def forward_hooks(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks that a module has on its forward, and those before it (2.11.0, 2.13.0)."""
    return module._forward_hooks, module._forward_pre_hooks


@contextmanager
def autocast_left(kinds: Sequence[str]) -> Iterator[None]:
    """Leaves the autocasts that are on for these device types; they come back afterwards.

    An autocast that is entered within is then the outermost one. At its end the casts of its weights are forgotten, and
    only so may the next autocast cast them under another grad mode. `torch.autocast(enabled=False)` would not do that
    (2.11.0, 2.13.0).
    """
    caches, depth = torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
        torch.set_autocast_cache_enabled(caches)
        for _ in range(depth):
            torch.autocast_increment_nesting()


def in_functorch() -> bool:
    """Whether a torch.func transform is active around the caller (2.11.0, 2.13.0)."""
    return torch._C._functorch.maybe_current_level() is not None


@functools.cache
def scatters_keep_overlap() -> bool:
    """Whether torch's shape rules give the result of `select_scatter` and kin the strides of an expanded operand
    (2.11.0). Its kernels, and the rules of 2.13.0, give it memory of its own."""
    with unwatched():
        expanded, value = torch.empty(1, device="meta").expand(2), torch.empty((), device="meta")
        return torch.ops.aten.select_scatter(expanded, value, 0, 0).stride() == (0,)


class RngStateMode(TorchDispatchMode):
    """A mode that has a state of its own in place of the state of torch's generator, as `torch.utils.checkpoint` needs
    it.

    While such a mode is on, `torch.get_rng_state` and `torch.set_rng_state` are those of the innermost one on the
    calling thread's stack of modes. On other threads they are torch's. (Checkpoint calls them as attributes of `torch`.
    Autograd's threads take the stack over from the thread that calls backward: 2.11.0, 2.13.0.) The first mode that is
    entered in the process exchanges the two functions, and the last that is left sets them back; only these two methods
    write `_inside` and `_torchs`.
    """

    _lock, _inside = threading.Lock(), 0
    _torchs: tuple[Callable[[], Any], Callable[[Any], None]]

    def get_rng_state(self) -> Any:
        """Returns the mode's state."""
        raise NotImplementedError

    def set_rng_state(self, state: Any) -> None:
        """Sets the mode's state."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        kind = RngStateMode
        with kind._lock:
            if not kind._inside:
                kind._torchs = torch.get_rng_state, torch.set_rng_state
                torch.get_rng_state = _get_rng_state
                torch.set_rng_state = _set_rng_state
            kind._inside += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        kind = RngStateMode
        super().__exit__(*error)
        with kind._lock:
            kind._inside -= 1
            if not kind._inside:
                torch.get_rng_state, torch.set_rng_state = kind._torchs  # type: ignore[assignment]


def _rng_state_mode() -> RngStateMode | None:
    modes = reversed(_get_current_dispatch_mode_stack())
    return next((mode for mode in modes if isinstance(mode, RngStateMode)), None)


def _get_rng_state() -> Any:
    mode = _rng_state_mode()
    return RngStateMode._torchs[0]() if mode is None else mode.get_rng_state()


def _set_rng_state(new_state: Any) -> None:
    mode = _rng_state_mode()
    return RngStateMode._torchs[1](new_state) if mode is None else mode.set_rng_state(new_state)
