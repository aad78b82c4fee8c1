"""process: private names of torch for files, process groups and the profiler."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _weights_only_unpickler  # 2.11.0, 2.13.0
from torch._C import _profiler as _cpp_profiler  # 2.11.0, 2.13.0


def weights_only(data: bytes, place: Callable[[str], tuple[int, int]]) -> Any:
    """The object in the pickle of a file of `torch.save`, under the rules of `torch.load(weights_only=True)`. Its
    tensors are on the meta device. `place` returns the (start, bytes) of a storage in the file, by its key.

    Raises UnpicklingError, and ValueError for a storage of another length than its place. `torch.load` itself would
    compute the places, but only for an archive that torch alone has written (2.11.0, 2.13.0).
    """

    class Unpickler(_weights_only_unpickler.Unpickler):
        def persistent_load(self, reference: Any) -> Any:
            _, kind, key, _, count = reference
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            start, size = place(key)
            if type(count) is not int or not 0 <= size - count * dtype.itemsize < dtype.itemsize:
                raise ValueError(f"the storage {key} is to have {count} elements of {dtype}, and has {size:,} bytes")
            storage = torch.UntypedStorage(count * dtype.itemsize, device="meta")
            storage.place = start, size  # type: ignore[attr-defined]
            return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    return Unpickler(io.BytesIO(data), encoding="utf-8").load()


def place_in_file(value: torch.Tensor) -> tuple[int, int]:
    """(the byte in the file at which the storage of a tensor of `weights_only` begins, its number of bytes).

    Raises ValueError for a tensor whose bytes lie in no file.
    """
    place: tuple[int, int] | None = getattr(value.untyped_storage(), "place", None)
    if place is None:
        raise ValueError(f"a tensor of shape {list(value.shape)} has no bytes in the file")
    return place


def version(value: torch.Tensor) -> int:
    """How often a tensor has been written to; 0 for a new one (`Tensor._version`: 2.11.0, 2.13.0)."""
    return value._version


def default_store() -> Any:
    """The key-value store of the default process group (2.11.0, 2.13.0)."""
    return torch.distributed.distributed_c10d._get_default_store()


def gloo_timeout(group: Any) -> float:
    """The seconds that gloo waits in a process group; 1800 if the group has no gloo (2.11.0, 2.13.0)."""
    try:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (RuntimeError, AttributeError):
        return 1800.0


def store_holder(store: Any) -> int | None:
    """The rank whose process holds a store: 0 for a TCPStore, unless torchrun's agent holds it. None if no rank does
    (`underlying_store`: 2.11.0, 2.13.0)."""
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, torch.distributed.TCPStore) and not agent else None


@contextmanager
def allocations() -> Iterator[list[tuple[int, int]]]:
    """(`time.time_ns()`, bytes) of every allocation of a CPU tensor in this thread; releases have negative bytes.

    The list is filled when the context ends. It does not have releases of memory that was allocated before. This is
    `torch.profiler` with `profile_memory=True`, without ops. So an allocation costs some tens of nanoseconds and an op
    nothing, instead of microseconds (2.11.0, 2.13.0). Raises RuntimeError if another profiler is at work.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("a profiler is at work in this thread: its events and these cannot be had at one time")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes two lines about itself to stderr
    rows: list[tuple[int, int]] = []
    state, options = _cpp_profiler.ProfilerState.KINETO, _cpp_profiler._ExperimentalConfig()
    config = _cpp_profiler.ProfilerConfig(state, False, True, False, False, False, options, "")
    activities = {torch.profiler.ProfilerActivity.CPU}
    torch.autograd._prepare_profiler(config, activities)
    torch.autograd._enable_profiler(config, activities, {_cpp_profiler.RecordScope.USER_SCOPE})  # type: ignore[call-arg]
    try:
        yield rows
    finally:
        events: list[Any] = torch.autograd._disable_profiler().events()
        ours = [e for e in events if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU]
        rows += [(e.start_ns(), e.nbytes()) for e in sorted(ours, key=lambda e: e.start_ns())]
