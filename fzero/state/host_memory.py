"""host_memory: memory of the host that moves copy to and from: whole pages, and page-locked for a CUDA device.

A CUDA device copies to and from page-locked memory by itself, beside what it computes; other memory it copies while the
host waits. torch's own page-locked memory is rounded up to a power of two. Here the pages of the size that is asked for
are made first and locked then.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

from fzero import backend
from fzero.disk import aligned
from fzero.errors import OffloadError


class _Locked(mmap.mmap):
    """Pages that are unlocked before they are given back."""

    locked = 0  # the address, once CUDA knows it
    device = 0

    def lock(self) -> None:
        """Page-locks all of it. Raises OffloadError if the system does not allow it."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        code = torch.cuda.cudart().cudaHostRegister(address, len(self), 0)
        if int(code) != 0:
            with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the next launch to find: this one
                torch.ones(1, device="cuda")
            raise OffloadError(
                "the host's memory",
                f"{len(self):,} bytes cannot be page-locked for CUDA (cudaHostRegister: error {int(code)}). Needed: "
                "free memory of that size that this process may lock (ulimit -l; docker: --ulimit memlock=-1). "
                "Offload less, use more ranks, or put leaves on 'nvme'",
            )
        self.locked, self.device = address, torch.cuda.current_device()

    def __del__(self) -> None:
        if self.locked:
            with contextlib.suppress(Exception):  # after a step that failed copies may be in flight
                torch.cuda.synchronize(self.device)
            with contextlib.suppress(Exception):  # at the end of the process CUDA may be gone
                torch.cuda.cudart().cudaHostUnregister(self.locked)


def host_memory(device: torch.device, nbytes: int) -> torch.Tensor:
    """Returns new zeroed memory of the host (uint8, 1-D, `nbytes` long, from the start of a page), page-locked if
    `device` is a CUDA device: whole pages, and from 2 MiB on 2 MiB more, to begin at a huge page. It is freed with
    the last tensor on it. Raises OffloadError if it cannot be locked.

    >>> host_memory(torch.device("cpu"), 5000).shape
    torch.Size([5000])
    """
    if not backend.of(device).locks_pages:
        return aligned(nbytes)
    with torch.cuda.device(device):
        return aligned(nbytes, _Locked)
