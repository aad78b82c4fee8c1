"""standin: a CUDA device for tests, on the processor.

`install()` gives this process two devices named cuda:0 and cuda:1. What stands in is what lies below Python: the C
functions and classes that `torch.cuda` calls (`device`), the kernels that a tensor on CUDA leads to (`tensors`: its
bytes lie in host memory), the library under a process group "nccl" (`nccl`) and Triton's launches (`kernels`, in its
interpreter). All the Python above is torch's own, so a wrong name or argument fails as it would on a device.

Everything runs at once, in the order in which it is issued. What a device would be free to do in another order is
judged instead (`order`): each use of memory is compared with those before it, and one that no event, wait or
synchronisation puts after them is a `RaceError`. A CUDA graph's capture records and runs nothing, refuses what CUDA
refuses, and `replay` runs what was recorded.

It says nothing of speed, of NCCL itself, of cuBLAS's or Triton's numbers, nor of what torch's C++ does for CUDA alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# What torch's C++ asks of CUDA while it runs what is above a kernel: a guard of the current device, and whether there
# is a device at all (autograd runs backward in a thread for each). A torch without CUDA answers neither.
_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 2; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
struct Standin : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Standin);
"""


def install() -> None:
    """Puts the stand-in under torch, for the rest of this process. Before torch is imported."""
    assert "torch" not in sys.modules, "torch has asked already whether there is a device"
    assert os.environ.get("TRITON_INTERPRET") == "1"
    _load()
    from standin import device, kernels, nccl, tensors

    device.install()
    tensors.install()
    kernels.install()
    nccl.install()


def _load() -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(root / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_compiled(root)), mode=ctypes.RTLD_GLOBAL)


def _compiled(root: Path) -> Path:
    """The library, compiled once for this torch (ten seconds) and kept in `runs/`, a folder of this checkout alone."""
    told = _SOURCE + str(root) + (root / "version.py").read_text()
    key = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
    place = Path(__file__).parents[3] / "runs" / "standin" / f"{key}.so"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            source, made = Path(folder) / "standin.cpp", Path(folder) / "standin.so"
            source.write_text(_SOURCE)
            options = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
            command = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-std=c++20", str(source), "-o", str(made)]
            subprocess.run([*command, *options], check=True)
            made.replace(place)
    return place
