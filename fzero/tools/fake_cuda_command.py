"""fake_cuda_command: `fzero fake-cuda`, which starts Python where CUDA answers a trace, without a device.

`fzero.lower` gives CUDA's program anyway (`fzero.ir.elsewhere`). There a loss may ask for its device as well, and
Inductor's kernels are counted. CUDA exists for fake tensors alone: they can be traced, and nothing can be computed.
What torch's C++ asks of a device is in one small library (`fzero._torch_compat.fake_cuda`), which must be loaded before
torch is. So it is a process of its own:

    fzero fake-cuda train.py                                            a script that calls fzero.lower
    fzero fake-cuda -m fzero explain train.py:problem --hardware h100   a module

The attention op is the one that torch takes on an H100 (cuDNN's, for 16 bits), of those that are switched on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys

from fzero import backend, private_folder
from fzero._torch_compat import fake_cuda_library
from fzero.cost import kept_costs
from fzero.errors import SpecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `fzero fake-cuda`."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Python's: SCRIPT ARGS..., or -m MODULE ARGS...")


def command(arguments: argparse.Namespace) -> int:
    """Runs Python on the arguments. Returns its status.

    Raises SpecError where it is not needed, OSError where the library cannot be made.
    """
    given = arguments.arguments[arguments.arguments[:1] == ["--"] :]
    if not given:
        raise SpecError("needed a script or a module: fzero fake-cuda train.py, or fzero fake-cuda -m MODULE ARGS")
    return subprocess.run([sys.executable, *given], env=environment()).returncode


def environment() -> dict[str, str]:
    """The environment of such a process: this one's, with the library to load first."""
    if backend.CUDA.calls.traceable():
        raise SpecError("fake tensors of CUDA can be traced here already: call fzero.lower, without `fzero fake-cuda`")
    if sys.platform != "linux":
        raise SpecError(f"it loads a library before torch, as Linux does, and this is {sys.platform}")
    folder = kept_costs.folder() / "fake_cuda"
    with contextlib.suppress(OSError), kept_costs.subfolder(folder, make=True):
        pass
    if why := private_folder.refused(folder):
        raise SpecError(f"{folder} would hold a library, and {why}. FZERO_CACHE names another folder")
    before = [os.environ["LD_PRELOAD"]] if os.environ.get("LD_PRELOAD") else []
    return {**os.environ, "LD_PRELOAD": os.pathsep.join([str(fake_cuda_library(folder)), *before])}
