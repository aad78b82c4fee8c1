"""The only file that may import a private torch name; each with the version it was seen in."""

from __future__ import annotations

import functools
import io
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import _weights_only_unpickler  # 2.11.0, 2.13.0
from torch._C import _profiler as _cpp_profiler  # 2.11.0, 2.13.0
from torch._compile import _disable_dynamo as untraced_by_dynamo  # 2.11.0, 2.13.0
from torch._dispatch.python import enable_python_dispatcher as by_decompositions  # 2.11.0, 2.13.0
from torch._ops import OpOverload  # 2.11.0, 2.13.0
from torch._subclasses.fake_tensor import (  # 2.11.0, 2.13.0
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors  # 2.11.0, 2.13.0
from torch.fx import _lazy_graph_module  # 2.11.0, 2.13.0
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import (  # 2.11.0, 2.13.0
    disable_proxy_modes_tracing,
    get_proxy_mode,
)
from torch.overrides import _get_current_function_mode_stack  # 2.11.0, 2.13.0
from torch.utils._device import DeviceContext  # 2.11.0, 2.13.0
from torch.utils._python_dispatch import (  # 2.11.0, 2.13.0
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)
from torch.utils._python_dispatch import _disable_current_modes as unwatched  # 2.11.0, 2.13.0

__all__ = [
    "AMX",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "RngStateMode",
    "TorchDispatchMode",
    "allocations",
    "ambient_modes",
    "autocast_left",
    "below_autograd",
    "by_decompositions",
    "by_onednn",
    "compiled_functions_traced",
    "default_store",
    "disable_proxy_modes_tracing",
    "distributions_unchecked",
    "function_schema",
    "fused_adam_",
    "fused_adamw_",
    "gloo_timeout",
    "graph_module",
    "in_functorch",
    "inductor_cache_dir",
    "inductor_compile",
    "inductor_lacks",
    "inductor_rounds",
    "is_fake",
    "jiterator_refused",
    "kernel_of",
    "make_fx",
    "place_in_file",
    "product_precision",
    "quiet_fakes",
    "real_tensors",
    "saved_tensor_hooks",
    "scatters_keep_overlap",
    "store_holder",
    "tracing_graph",
    "untraced_by_dynamo",
    "unwatched",
    "version",
    "weights_only",
]

# aten's fused optimizer kernels, in place over lists of tensors: seen in 2.11.0 and 2.13.0
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor (shape and dtype without memory)."""
    return isinstance(value, FakeTensor)


def weights_only(data: bytes, place: Callable[[str], tuple[int, int]]) -> Any:
    """What the pickle of a file of `torch.save` holds, under the rules of `torch.load(weights_only=True)`; its tensors
    are on the meta device. `place` is the (start, bytes) of a storage in the file, by its key.

    Raises UnpicklingError, and ValueError for a storage of another length than its place. `torch.load` itself would
    compute the places, for an archive that torch alone has written (2.11.0, 2.13.0).
    """

    class Unpickler(_weights_only_unpickler.Unpickler):
        def persistent_load(self, told: Any) -> Any:
            _, kind, key, _, count = told
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            start, size = place(key)
            if type(count) is not int or not 0 <= size - count * dtype.itemsize < dtype.itemsize:
                raise ValueError(f"the storage {key} is to have {count} elements of {dtype}, and has {size:,} bytes")
            storage = torch.UntypedStorage(count * dtype.itemsize, device="meta")
            storage.place = start, size  # type: ignore[attr-defined]
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    return Unpickler(io.BytesIO(data), encoding="utf-8").load()


def place_in_file(value: torch.Tensor) -> tuple[int, int]:
    """(the byte at which the storage of a tensor of `weights_only` begins in its file, its bytes there). Raises
    ValueError for a tensor whose bytes lie in no file."""
    found: tuple[int, int] | None = getattr(value.untyped_storage(), "place", None)
    if found is None:
        raise ValueError(f"a tensor of shape {list(value.shape)} has no bytes in the file")
    return found


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Fake tensors do not log the errors of ops that are tried on them (their module's logger: 2.11.0, 2.13.0)."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def tracing_graph() -> torch.fx.Graph | None:
    """The graph that `make_fx` is writing at this moment, if any (the mode's `tracer`: 2.11.0, 2.13.0)."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


# torch.fx patches globals of its own while it traces, Inductor and Dynamo their configuration while they work: one
# thread at a time (2.11.0, 2.13.0)
_ONE_THREAD = threading.RLock()


def make_fx(fn: Callable[..., Any], **how: Any) -> Callable[..., torch.fx.GraphModule]:
    """torch's `make_fx`, in one thread at a time."""

    def traced(*inputs: Any) -> torch.fx.GraphModule:
        with _ONE_THREAD, _lazy_graph_module._use_lazy_graph_module(True):
            return proxy_tensor.make_fx(fn, **how)(*inputs)

    return traced


def graph_module(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A graph as something to call, whose Python is written at the first call: most graphs of a lowering are only
    rewritten."""
    return _lazy_graph_module._LazyGraphModule(torch.nn.Module(), graph)


@contextmanager
def compiled_functions_traced() -> Iterator[None]:
    """Lets `make_fx` trace through a `torch.compile`d function instead of refusing it (2.11.0, 2.13.0)."""
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
        yield
        return
    with _ONE_THREAD, torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        yield


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """`torch.distributions` does not look at the values of its arguments unless told to. Within `make_fx`, so in one
    thread at a time (2.11.0, 2.13.0)."""
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


@contextmanager
def jiterator_refused(error: Callable[[], Exception]) -> Iterator[None]:
    """`torch.cuda.jiterator` launches a kernel on the memory that a fake tensor has not. Within `make_fx`, so in one
    thread at a time (2.11.0)."""
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


def ambient_modes() -> list[Any]:
    """The modes around the caller that see torch functions or dispatched ops, but for the one that stands for a default
    device (2.11.0, 2.13.0)."""
    functions = [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    return [*functions, *_get_current_dispatch_mode_stack()]


def saved_tensor_hooks() -> bool:
    """Whether hooks on saved tensors are active around the caller (2.11.0, 2.13.0)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def autocast_left(kinds: Sequence[str]) -> Iterator[None]:
    """As outside of the autocasts that are on for these device types, which come back afterwards.

    An autocast within is the outermost then, as it would be there: at its end the weights that it has cast are
    forgotten, and only so may the next one cast them under another grad mode. `torch.autocast(enabled=False)` would
    not do that (2.11.0, 2.13.0).
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


def kernel_of(target: Any) -> Any:
    """What an `OpOverload` calls, one Python frame nearer to the kernel (2.11.0, 2.13.0)."""
    return getattr(target, "_op", target)


def below_autograd() -> Any:
    """A context in which ops go straight to their kernels: nothing is recorded for autograd (2.11.0, 2.13.0)."""
    return torch._C._AutoDispatchBelowAutograd()


# Allowed bfloat16 inside an fp32 product, oneDNN makes use of it with AMX (and on ARM) alone: elsewhere its fp32 kernel
# runs (3.10.2 in torch 2.11.0, 3.12.0 in 2.13.0)
AMX = torch.cpu._is_amx_tile_supported()
_KEEPS_FP32 = platform.machine() in ("x86_64", "AMD64") and not AMX


def product_precision() -> str:
    """What torch may round fp32 products on CPU to: "none" unless the user changed it (2.11.0, 2.13.0)."""
    return _BF16_ALLOWED.before or str(torch._C._get_fp32_precision_getter("mkldnn", "matmul"))


class _Bf16Allowed:
    """oneDNN's permission to use bfloat16 in fp32 products: given by the first thread that enters, and set back to what
    it was by the last that leaves (private setters seen in 2.11.0 and 2.13.0)."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, ""

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = str(torch._C._get_fp32_precision_getter("mkldnn", "matmul"))
                torch._C._set_fp32_precision_setter("mkldnn", "matmul", "bf16")
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                torch._C._set_fp32_precision_setter("mkldnn", "matmul", self.before)
                self.before = ""


_BF16_ALLOWED = _Bf16Allowed()


def by_onednn(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """aten's matrix product computed by oneDNN, in full fp32; on a processor where that would round, as it is.

    torch asks oneDNN where bfloat16 is allowed inside fp32 products on CPU: a setting of the process, which is changed
    for this call alone.
    """
    if not _KEEPS_FP32:
        return kernel

    def call(*args: Any, **kwargs: Any) -> Any:
        with _BF16_ALLOWED:
            return kernel(*args, **kwargs)

    return call


class RngStateMode(TorchDispatchMode):
    """A mode that has a state of its own in the place of torch's generator's, as `torch.utils.checkpoint` asks for it.

    While such a mode is on, `torch.get_rng_state` and `torch.set_rng_state` are those of the innermost one on the
    calling thread's stack of modes; on other threads they are torch's. (Checkpoint calls them as attributes of `torch`;
    autograd's threads take the stack over from the thread that calls backward: 2.11.0, 2.13.0.) The two functions are
    exchanged by the first mode that is entered in the process, and set back by the last that is left.
    """

    _lock, _inside = threading.Lock(), 0
    _torchs: tuple[Callable[[], Any], Callable[[Any], None]]

    def get_rng_state(self) -> Any:
        raise NotImplementedError

    def set_rng_state(self, state: Any) -> None:
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


def default_store() -> Any:
    """The key-value store that the default process group was made with (2.11.0, 2.13.0)."""
    return torch.distributed.distributed_c10d._get_default_store()


def gloo_timeout(group: Any) -> float:
    """The seconds that gloo waits in a process group; 1800 where it has no gloo (2.11.0, 2.13.0)."""
    try:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (RuntimeError, AttributeError):
        return 1800.0


def store_holder(store: Any) -> int | None:
    """The rank whose process answers for a store: 0 for a TCPStore, unless torchrun's agent does; None where there is
    none (`underlying_store`: 2.11.0, 2.13.0)."""
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, torch.distributed.TCPStore) and not agent else None


def function_schema(name: str, num_inputs: int, writes: Sequence[int]) -> torch.FunctionSchema:
    """The schema of a function of tensors that writes to some of them and returns others (2.11.0, 2.13.0)."""
    inputs = (f"Tensor{f'(a{i}!)' if i in writes else ''} x{i}" for i in range(num_inputs))
    return torch._C.parse_schema(f"fzero::{name}({', '.join(inputs)}) -> Tensor[]")


# Inductor, imported when it is first needed: that takes a second. Seen in 2.11.0 and 2.13.0


def inductor_cache_dir() -> str:
    """Where Inductor keeps what it compiled: TORCHINDUCTOR_CACHE_DIR, or this user's folder in the temporary one."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def inductor_lacks(device_type: str) -> str:
    """What Inductor needs for a device and does not find, and how to get it; "" where nothing is missing."""
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "no working Triton was found (pip install triton, CUDA capability 7.0 or newer)"
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        names = [name for name in config.cpp.cxx if name] if isinstance(config.cpp.cxx, tuple) else [config.cpp.cxx]
        return f"no C++ compiler was found, looked for {' and '.join(names)}: install g++, or set CXX"
    return ""


def inductor_rounds(device_type: str) -> bool:
    """Whether compiled code can round to 16 bits wherever its graph does: on the CPU not in 2.11, but in 2.13."""
    return device_type != "cpu" or tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def inductor_compile(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The graph compiled for inputs of these shapes, strides and dtypes, or loaded from Inductor's cache on disk.

    The caller gives the inputs in the same layout. No gradients. Raises what Inductor raises.
    """
    from torch._inductor import standalone_compile

    options = {
        "cpp.threads": torch.get_num_threads(),  # is in the code that is made, so it belongs into the cache's key
        "cpp.vec_isa_ok": True,  # trust the CPU's flags: trying each set of instructions out takes five seconds
        "compile_threads": 1,  # one kernel or two in a graph: a pool of processes costs more than it saves
        "emulate_precision_casts": True,  # rounds to bf16 where the graph does: with the next line stages stay equal
        "pattern_matcher": False,  # it drops a cast to bf16 and back
    }
    with _ONE_THREAD, torch.no_grad():
        return standalone_compile(
            gm, list(inputs), dynamic_shapes="from_example_inputs", options={"config_patches": options}
        )


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


def version(value: torch.Tensor) -> int:
    """How often a tensor has been written to; 0 for a new one (`Tensor._version`: 2.11.0, 2.13.0)."""
    return value._version


@functools.cache
def scatters_keep_overlap() -> bool:
    """Whether torch's shape rules give the result of `select_scatter` and kin an expanded operand's strides (2.11.0).
    Its kernels, and the rules of 2.13.0, give it memory of its own."""
    with unwatched():
        expanded, value = torch.empty(1, device="meta").expand(2), torch.empty((), device="meta")
        return torch.ops.aten.select_scatter(expanded, value, 0, 0).stride() == (0,)
