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

other = 0  # the process of rank 1, where rank 0 has started it
_SOURCE = Path(__file__).parents[3] / "fzero" / "_torch_compat" / "fake_cuda.cpp"  # not imported: fzero imports torch


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
    told = _SOURCE.read_text() + str(root) + (root / "version.py").read_text()
    key = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
    place = Path(__file__).parents[3] / "runs" / "standin" / f"{key}.so"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            made = Path(folder) / "standin.so"
            options = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
            command = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-std=c++20", str(_SOURCE), "-o", str(made)]
            subprocess.run([*command, *options], check=True)
            made.replace(place)
    return place
