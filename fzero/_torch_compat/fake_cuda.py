"""fake_cuda: fake tensors of CUDA where there is no device: the library that a process loads before torch, and what
torch's C++ would choose there.

`fake_cuda.cpp` stands for the guard of a device, and for the hooks that say that there is one
(`DeviceGuardImplInterface`, `CUDAHooksInterface`: 2.11.0 for CUDA, 2.13.0 for the CPU). torch asks for the hooks once,
so they must be there first: `LD_PRELOAD=<library>`. In such a process `torch.accelerator.current_accelerator()` is
cuda, and `torch.cuda.is_available()` is still false.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor  # 2.11.0, 2.13.0
from torch.utils import _pytree as pytree  # 2.11.0, 2.13.0

from fzero._torch_compat.fakes import fake_of_form, is_fake
from fzero.backend import CUDA, FAKE_CUDA

WHOLE = ("_fused_rms_norm", "silu_backward", "mish_backward")  # a device has a kernel (native_functions.yaml: 2.13.0)
SOURCE = Path(__file__).with_name("fake_cuda.cpp")
aten = torch.ops.aten


def fake_cuda_library(folder: Path) -> Path:
    """The library for this torch, compiled into `folder` the first time (five seconds). Raises OSError without a C++
    compiler, or where the compiler fails."""
    root = Path(torch.__file__).parent
    told = f"{SOURCE.read_text()} {root} {torch.__version__}"
    place = folder / f"{hashlib.blake2b(told.encode(), digest_size=8).hexdigest()}.so"
    if place.exists():
        return place
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise FileNotFoundError(f"there is no C++ compiler {compiler!r}: install g++, or set CXX")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "made.so"
        options = [f"-I{root / 'include'}", f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [compiler, "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(made), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{compiler} cannot compile {SOURCE} for torch {torch.__version__}: {done.stderr[-500:]}")
        made.replace(place)
    return place


@functools.cache
def prepare_fake_cuda() -> torch.library.Library:
    """Gives this process, which was started with the library, the guard of a torch without a device, and on CUDA the
    ops that torch takes on an H100: a torch without CUDA takes attention (sdp_utils.cpp: 2.11.0, 2.13.0) and the ops
    of `WHOLE` apart, into products and loops. What has no rule of shapes gets one, or the processor's kernel."""
    getattr(ctypes.CDLL(None), FAKE_CUDA)()
    library = torch.library.Library("aten", "IMPL")
    for key in ("CUDA", "AutogradCUDA"):
        library.impl("scaled_dot_product_attention", _attention, key)
    for name in WHOLE:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _never_run, "CUDA")
    for name, rule in SHAPES.items():
        library.impl(name, rule, "Meta")
    # what Python asks: torch.autocast (2.11.0, 2.13.0), and libraries that choose their own kernels
    vars(importlib.import_module("torch.cuda.amp.common"))["amp_definitely_not_available"] = _no
    asked = {"is_bf16_supported": lambda *_: True, "get_device_capability": lambda *_, **__: (9, 0)}
    vars(importlib.import_module("torch.cuda")).update(asked)
    fake_tensor.run_fallback_kernel = functools.partial(_on_the_host, fake_tensor.run_fallback_kernel)
    return library


def _no(*_: Any) -> bool:
    return False


def _never_run(*_: Any) -> Any:
    raise NotImplementedError("there is no device here")


def _gru_cell(_: Any, __: Any, hidden: torch.Tensor, *___: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(hidden), hidden.new_empty((hidden.shape[0], 5 * hidden.shape[1]))


def _gru_cell_back(grad: torch.Tensor, _: Any, biased: bool) -> tuple[torch.Tensor | None, ...]:
    rows, width = grad.shape
    gates, bias = (grad.new_empty(shape) for shape in ((rows, 3 * width), (3 * width,)))
    given = (bias, torch.empty_like(bias)) if biased else (None, None)
    return gates, torch.empty_like(gates), torch.empty_like(grad), *given


SHAPES: dict[str, Callable[..., Any]] = {  # of ops that the processor has no kernel of (RNN.cu, LossCTC.cpp: 2.13.0)
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_back,
    # cuDNN's CTC loss wants int32 targets without padding
    **dict.fromkeys((f"_use_{maker}_ctc_loss{form}" for maker in ("cudnn", "miopen") for form in ("", ".Tensor")), _no),
}


def _on_the_host(fallback: Callable[..., Any], mode: Any, op: Any, flat: list[Any], spec: Any, error: Any) -> Any:
    """An op without a rule of shapes: torch runs its kernel, on zeros, and here it is the processor's."""
    named = [x.fake_device if is_fake(x) else x for x in flat]
    devices = {x for x in named if isinstance(x, torch.device) and x.type == CUDA.name}
    if not devices:
        return fallback(mode, op, flat, spec, error)
    host = torch.device("cpu")

    def moved(x: Any, to: torch.device) -> Any:
        if isinstance(x, torch.device):
            return to
        if not is_fake(x):
            return x
        return fake_of_form(x, False, x.shape, x.stride(), x.storage_offset(), x.dtype, to)

    there = [moved(x, host) for x in flat]
    written = {id(new): old for new, old in zip(there, flat, strict=True)}
    results = fallback(mode, op, there, spec, error)
    return pytree.tree_map(lambda x: written[id(x)] if id(x) in written else moved(x, next(iter(devices))), results)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention` by the kernel that torch takes."""
    kernel = _kernel(query, key, value, attn_mask, is_causal)
    if kernel == "math":
        found: Any = aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
        return found[0]
    if kernel == "flash":
        flash = aten._scaled_dot_product_flash_attention.default
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    if kernel == "cudnn":
        found = aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, attn_mask, True, dropout_p, is_causal, False, scale=scale
        )
        return found[0]
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    found = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )
    return found[0]


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> str:  # fmt: skip
    """Of those that are switched on: cuDNN's for 16 bits (torch >= 2.11 on sm_90), but for a mask with a gradient; the
    flash kernel for 16 bits without a mask; the memory-efficient one. Plain products where none takes it: other than
    four dims, 64 bits, widths that 16 bytes do not divide."""
    on, widths = torch.backends.cuda, (query.shape[-1], value.shape[-1])
    if query.dim() != 4 or query.dtype is torch.float64 or any(w * query.itemsize % 16 for w in widths):
        return "math"
    narrow, square = query.dtype in (torch.bfloat16, torch.float16), query.shape[-2] == key.shape[-2]
    refused = mask is not None and (mask.requires_grad or mask.dim() not in (2, 4))
    if narrow and on.cudnn_sdp_enabled() and max(widths) <= 128 and key.shape[-2] > 1 and not refused:
        return "cudnn"
    if narrow and on.flash_sdp_enabled() and mask is None and widths[0] == widths[1] <= 256 and square >= causal:
        return "flash"
    return "efficient" if on.mem_efficient_sdp_enabled() else "math"
