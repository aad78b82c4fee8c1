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
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from fzero.backend import FAKE_CUDA

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
    of `WHOLE` apart, into products and loops."""
    getattr(ctypes.CDLL(None), FAKE_CUDA)()
    library = torch.library.Library("aten", "IMPL")
    for key in ("CUDA", "AutogradCUDA"):
        library.impl("scaled_dot_product_attention", _attention, key)
    for name in WHOLE:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, _never_run, "CUDA")
    return library


def _never_run(*_: Any) -> Any:
    raise NotImplementedError("there is no device here")


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """cuDNN's attention for 16 bits without a mask (torch >= 2.11 on sm_90), else the memory-efficient one; plain
    products where that one has no kernel: other than four dims, 64 bits, widths that 16 bytes do not divide."""
    widths = query.shape[-1], value.shape[-1]
    if query.dim() != 4 or query.dtype is torch.float64 or any(w * query.itemsize % 16 for w in widths):
        plain: Any = aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
        return plain[0]
    narrow = query.dtype in (torch.bfloat16, torch.float16) and all(w % 8 == 0 and w <= 128 for w in widths)
    if narrow and attn_mask is None and not enable_gqa:
        found: Any = aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, None, True, dropout_p, is_causal, False, scale=scale
        )
        return found[0]
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    found = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )
    return found[0]
