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

from fzero._torch_compat import device_cells
from fzero._torch_compat.device_choices import choose_on_a_device
from fzero._torch_compat.fakes import fake_of_form, is_fake
from fzero.backend import CUDA, FAKE_CUDA

SOURCE = Path(__file__).with_name("fake_cuda.cpp")


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
    ops that torch takes on an H100 (`device_choices`): a torch without CUDA takes them apart, into products and loops.
    What has no rule of shapes gets one, or the processor's kernel."""
    getattr(ctypes.CDLL(None), FAKE_CUDA)()
    library = choose_on_a_device()
    device_cells.shapes()
    for name in REFUSING:
        library.impl(name, _no, "Meta")
    # what Python asks: torch.autocast (2.11.0, 2.13.0), and libraries that choose their own kernels
    vars(importlib.import_module("torch.cuda.amp.common"))["amp_definitely_not_available"] = _no
    asked = {"is_bf16_supported": lambda *_: True, "get_device_capability": lambda *_, **__: (9, 0)}
    vars(importlib.import_module("torch.cuda")).update(asked)
    fake_tensor.run_fallback_kernel = functools.partial(_on_the_host, fake_tensor.run_fallback_kernel)
    return library


def _no(*_: Any) -> bool:
    return False


REFUSING = [  # cuDNN's CTC loss wants int32 targets without padding (LossCTC.cpp: 2.13.0)
    f"_use_{maker}_ctc_loss{form}" for maker in ("cudnn", "miopen") for form in ("", ".Tensor")
]


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
