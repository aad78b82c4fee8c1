"""backend: what a kind of device is like: one record for each, and the only place that compares kinds of devices.

Everything else asks the record of a tensor's device (`of`) or of a program's transport (`of_transport`) for a fact. A
new kind of device is a record in `BACKENDS`, and, if its kernels run behind the host, lanes in `fzero/runtime/`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

FAKE_CUDA = "fzero_fake_cuda"  # the function of the library that `fzero fake-cuda` loads before torch


class Calls(Protocol):
    """What is asked of a device while a program runs."""

    def available(self) -> bool:
        """Whether this torch sees such a device."""

    def traceable(self) -> bool:
        """Whether fake tensors of such a device can be traced here, with their backward."""

    def current(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which kernels are launched on the device."""

    def synchronize(self, device: torch.device) -> None:
        """Returns when the device has done all that it was given."""

    def finish(self, device: torch.device) -> None:
        """Returns when the device has done what it was given on the stream of this thread."""

    def watch(self, device: torch.device) -> int:
        """Begins to measure the peak. Returns the bytes that are allocated now."""

    def peak(self, device: torch.device) -> int | None:
        """The most bytes that were allocated since `watch`; None where the allocator does not count."""

    def describe(self, device: torch.device) -> str:
        """The device in words."""


class HostCalls:
    """The processor: what it is given is done when the call returns."""

    def available(self) -> bool:
        """True."""
        return True

    def traceable(self) -> bool:
        """True."""
        return True

    def current(self, device: torch.device) -> AbstractContextManager[object]:
        """An empty context."""
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        """Returns at once."""

    def finish(self, device: torch.device) -> None:
        """Returns at once."""

    def watch(self, device: torch.device) -> int:
        """0: nothing counts."""
        return 0

    def peak(self, device: torch.device) -> int | None:
        """None."""
        return None

    def describe(self, device: torch.device) -> str:
        """The device and its threads."""
        return f"{device.type}, {torch.get_num_threads()} threads"


class CudaCalls:
    """CUDA devices."""

    def available(self) -> bool:
        """See `Calls`."""
        return torch.cuda.is_available()

    def traceable(self) -> bool:
        """See `Calls`. Without a device in a process that `fzero fake-cuda` started, whatever torch was built for."""
        return torch.cuda.is_available() or (sys.platform == "linux" and hasattr(ctypes.CDLL(None), FAKE_CUDA))

    def current(self, device: torch.device) -> AbstractContextManager[object]:
        """See `Calls`."""
        return torch.cuda.device(device)

    def synchronize(self, device: torch.device) -> None:
        """See `Calls`."""
        torch.cuda.synchronize(device)

    def finish(self, device: torch.device) -> None:
        """See `Calls`."""
        torch.cuda.current_stream(device).synchronize()

    def watch(self, device: torch.device) -> int:
        """See `Calls`."""
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)

    def peak(self, device: torch.device) -> int | None:
        """See `Calls`."""
        return torch.cuda.max_memory_allocated(device)

    def describe(self, device: torch.device) -> str:
        """The device's name."""
        return torch.cuda.get_device_name(device)


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of device.

    name: the type of its `torch.device`. calls: what is asked of it while a program runs.
    on_host: its tensors lie in the host's memory, and its kernels are torch's for the processor.
    on_streams: its kernels run behind the host, and moves beside them: lanes overlap with what it computes.
    records_graphs: a step's launches can be recorded, and replayed as one.
    locks_pages: it copies to and from page-locked memory by itself.
    has_kernels: fzero's own Triton kernels run on it, for random numbers too.
    group: torch.distributed's backend. transports: the names of what it moves bytes with between ranks, in programs.
    disk_by_host: what goes to or from the disk passes through the host's memory.
    looks_after: steps between two looks of the host at a value of the device, for which it waits.
    fetch_ahead: how many runs before its use a fetch from the host starts.
    product_sides: of 16-bit products, sides that are no multiple of it are padded (`fzero.codegen.pad`).
    chunk: elements that elementwise work takes at a time; None: as many as stay in the processor's cache.
    compiles: what `Spec(compile=None)` means on it.
    norms_alike: its kernels of some norms read a weight in the dtype of the values (`OpInfo.norm_alike`).
    """

    name: str
    calls: Calls
    on_host: bool = False
    on_streams: bool = False
    records_graphs: bool = False
    locks_pages: bool = False
    has_kernels: bool = False
    group: str = "gloo"
    transports: tuple[str, ...] = ()
    disk_by_host: bool = False
    looks_after: int = 1
    fetch_ahead: int = 1
    product_sides: int = 1
    chunk: int | None = None
    compiles: str = "none"
    norms_alike: bool = False


CPU = Backend("cpu", HostCalls(), on_host=True, transports=("p2p", "shared"))
# fetch_ahead: a device computes while both of its lanes move. GPT-2 large with all on the host is simulated at 0.42 s a
# step for 1, 0.36 for 3 and for 8 (450 TFLOP/s, 45 GB/s each way). chunk: each is a few launches.
CUDA = Backend(
    "cuda", CudaCalls(), on_streams=True, records_graphs=True, locks_pages=True, has_kernels=True, group="nccl",
    transports=("nccl",), disk_by_host=True, looks_after=16, fetch_ahead=3, product_sides=8,
    chunk=1 << 22, compiles="auto", norms_alike=True,
)  # fmt: skip
BACKENDS = {backend.name: backend for backend in (CPU, CUDA)}
_traced_for: ContextVar[torch.device | None] = ContextVar("traced_for", default=None)
UNKNOWN = Backend("unknown", HostCalls(), chunk=1 << 22)  # of any other device, as "meta": nothing is known of it


def has_memory(device: torch.device | str) -> bool:
    """Whether tensors of a device hold values.

    >>> has_memory("cpu"), has_memory("meta")
    (True, False)
    """
    return torch.device(device).type != "meta"


def of(device: torch.device | str) -> Backend:
    """The record of a device.

    >>> of(torch.device("cuda", 1)).group, of("cpu").on_host, of("meta").on_host
    ('nccl', True, False)
    """
    return BACKENDS.get(torch.device(device).type, UNKNOWN)


@contextmanager
def traced_for(device: torch.device | None) -> Iterator[None]:
    """A context in which what is traced on the processor is for this device; None: for the one that it was."""
    before = _traced_for.set(device or _traced_for.get())
    try:
        yield
    finally:
        _traced_for.reset(before)


def traced_device() -> torch.device | None:
    """The device that is traced for, on the processor; None: what is traced is for itself."""
    return _traced_for.get()


def of_traced(device: torch.device) -> Backend:
    """The record of a device in a trace: of the one that it is traced for.

    >>> with traced_for(torch.device("cuda")):
    ...     of_traced(torch.device("cpu")).name
    'cuda'
    """
    return of(_traced_for.get() or device)


def of_transport(name: str) -> Backend:
    """The record of the device whose ranks move bytes with this transport; the CPU's for a name that is none's."""
    return next((backend for backend in BACKENDS.values() if name in backend.transports), CPU)
