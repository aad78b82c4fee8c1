"""compute: private names of torch for kernels: aten's own, oneDNN's fp32 products, and Inductor."""

from __future__ import annotations

import contextlib
import copyreg
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from fzero._torch_compat.inductor_choices import rows_in_registers
from fzero._torch_compat.trace import ONE_THREAD

# aten's fused optimizer kernels, in place over lists of tensors: seen in 2.11.0 and 2.13.0
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_

# modules with running statistics: batch norms of any number of dims, and these with instance norms (2.11.0, 2.13.0)
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
NormBase = torch.nn.modules.batchnorm._NormBase


def kernel_of(target: Any) -> Any:
    """The callable of an `OpOverload`, one Python frame nearer to the kernel; of a custom op of fzero's the function
    itself, which torch's wrapper calls 10 us later (2.11.0, 2.13.0)."""
    own = OPDEFS.get(target._schema.name) if getattr(target, "namespace", "") == "fzero" else None
    return getattr(target, "_op", target) if own is None else own._init_fn


def below_autograd() -> Any:
    """A context in which ops go straight to their kernels: nothing is recorded for autograd, and no write is counted:
    of a custom op that is done in Python, for a tenth of a millisecond (2.11.0, 2.13.0)."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def function_schema(name: str, num_inputs: int, writes: Sequence[int]) -> torch.FunctionSchema:
    """The schema of a function of tensors that writes to some of them and returns others (2.11.0, 2.13.0)."""
    inputs = (f"Tensor{f'(a{i}!)' if i in writes else ''} x{i}" for i in range(num_inputs))
    return torch._C.parse_schema(f"fzero::{name}({', '.join(inputs)}) -> Tensor[]")


# If bfloat16 is allowed inside an fp32 product, oneDNN uses it only with AMX (and on ARM). Elsewhere its fp32 kernel
# runs (3.10.2 in torch 2.11.0, 3.12.0 in 2.13.0).
AMX = torch.cpu._is_amx_tile_supported()
_KEEPS_FP32 = platform.machine() in ("x86_64", "AMD64") and not AMX


def product_precision() -> str:
    """The dtype to which torch may round fp32 products on CPU: "none" unless the user changed it (2.11.0, 2.13.0)."""
    return _BF16_ALLOWED.before or str(torch._C._get_fp32_precision_getter("mkldnn", "matmul"))


class _Bf16Allowed:
    """oneDNN's permission to use bfloat16 in fp32 products. The first thread that enters gives it, and the last that
    leaves sets the old value back (private setters seen in 2.11.0 and 2.13.0).

    inside: the threads within. before: the old value; "" if no thread is within. Only the methods here write both,
    under the lock.
    """

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
    """aten's matrix product computed by oneDNN, in full fp32. On a processor where oneDNN would round, the kernel
    itself.

    torch uses oneDNN if bfloat16 is allowed inside fp32 products on CPU. This is a setting of the process; it is
    changed for this call alone.
    """
    if not _KEEPS_FP32:
        return kernel

    def call(*args: Any, **kwargs: Any) -> Any:
        with _BF16_ALLOWED:
            return kernel(*args, **kwargs)

    return call


def onednn_has_bf16() -> bool:
    """Whether oneDNN computes layers in bf16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# Inductor, imported when it is first needed: that takes a second. Seen in 2.11.0 and 2.13.0


def inductor_cache_dir() -> str:
    """The folder in which Inductor keeps compiled code: TORCHINDUCTOR_CACHE_DIR, or this user's folder in the temporary
    one."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def inductor_lacks(device_type: str) -> str:
    """The reason why Inductor cannot compile for a device, and the remedy; "" if nothing is missing."""
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
    """Whether compiled code can round to 16 bits at every place where its graph does. On the CPU it cannot in 2.11, and
    can in 2.13."""
    return device_type != "cpu" or tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


CODE = {  # options that decide what code Inductor writes, on every device
    "compile_threads": 1,  # one kernel or two in a graph: a pool of processes costs more than it saves
    "emulate_precision_casts": True,  # rounds to bf16 where the graph does: with the next line stages stay equal
    "pattern_matcher": False,  # it drops a cast to bf16 and back
    "deterministic": True,  # else each process times on its device how to sum a row, and ranks differ in bits
}


def inductor_compile(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The graph compiled for inputs of these shapes, strides and dtypes, or loaded from Inductor's cache on disk.

    The caller gives the inputs in the same layout. No gradients. Raises what Inductor raises.
    """
    from torch._inductor import standalone_compile

    options = {
        **CODE,
        "cpp.threads": torch.get_num_threads(),  # it is part of the compiled code, so it belongs into the cache's key
        "cpp.vec_isa_ok": True,  # trust the CPU's flags: trying each set of instructions out takes five seconds
    }
    with ONE_THREAD, torch.no_grad(), _one_key_in_all_processes(), rows_in_registers():
        return standalone_compile(
            gm, list(inputs), dynamic_shapes="from_example_inputs", options={"config_patches": options}
        )


@contextlib.contextmanager
def _one_key_in_all_processes() -> Iterator[None]:
    """Pickle names a memory format by the first module that holds `torch`: a user's own, where that came before torch.

    Inductor keys its cache by such a pickle, so what one process had compiled was compiled again in the next.
    """
    table = copyreg.dispatch_table
    before = table.get(torch.memory_format)
    copyreg.pickle(torch.memory_format, lambda one: (_memory_format, (str(one).removeprefix("torch."),)))
    try:
        yield
    finally:
        del table[torch.memory_format]
        if before is not None:
            table[torch.memory_format] = before


def _memory_format(name: str) -> torch.memory_format:
    found: torch.memory_format = getattr(torch, name)
    return found


def kernels_here() -> tuple[str, ...]:
    """What decides which of ATen's kernels run in this process, as text: the instructions that it uses, and the
    libraries that are switched on."""
    of = torch.backends
    on = {"mkldnn": of.mkldnn, "cudnn": of.cudnn}
    libraries = [f"{name} {library.enabled} {library.deterministic}" for name, library in on.items()]
    return of.cpu.get_cpu_capability(), *libraries, f"nnpack {torch._C._get_nnpack_enabled()}"  # 2.11.0, 2.13.0


def convolution_kernel(source: torch.Tensor, weight: torch.Tensor, *numbers: Any) -> str:
    """The name of ATen's kernel of a convolution, as of "Slow2d"; `numbers` as in aten.convolution after the bias."""
    return torch._C._select_conv_backend(source, weight, None, *numbers).name  # 2.11.0, 2.13.0
