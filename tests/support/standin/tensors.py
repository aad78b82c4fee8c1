"""tensors: tensors on CUDA whose bytes lie in host memory, and what runs for the ops on them.

A `Cuda` wraps a tensor on the CPU. For torch it is one on CUDA: it has that dispatch key, so each op comes here
(`run`), which says which memory it reads and writes on which stream (`device.issue`) and has the CPU's kernel do it.
`Redirect` catches ops without such an operand (`torch.empty(3, device="cuda")`) and what the host does with pinned
memory, `Methods` what never becomes an op (`data_ptr`, `numpy`). Every thread has both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.capture import ambient
from standin import device
from standin.order import HOST, VIOLATIONS, Memory

aten = torch.ops.aten
Uses = list[tuple[Memory, int, int, bool]]
PINNED: list[tuple[torch.Tensor, Memory]] = []  # kept, so that no other memory has their address
LOCKED: dict[int, tuple[int, Memory]] = {}  # by the address of pages that were locked, where they end


class Cuda(torch.Tensor):
    """A tensor on CUDA. `inner` holds its values, `memory` is the allocation that it is a view of."""

    inner: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: torch.Tensor, memory: Memory) -> Cuda:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device("cuda", memory.home.device),
        )
        made.inner, made.memory = inner, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOSTLY:
            return _HOSTLY[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Cuda({tuple(self.shape)}, {self.dtype}, {self.device})"


def _no_numpy(x: Cuda, *_: Any, **__: Any) -> Any:
    raise TypeError(f"can't convert {x.device} device type tensor to numpy")


_HOSTLY: dict[Any, Callable[..., Any]] = {
    torch.Tensor.data_ptr: lambda x: x.inner.data_ptr(),
    torch.Tensor.untyped_storage: lambda x: x.inner.untyped_storage(),
    torch.Tensor.is_pinned: lambda x: False,
    torch.Tensor.tolist: lambda x: x.cpu().tolist(),
    torch.Tensor.numpy: _no_numpy,
    torch.Tensor.__array__: _no_numpy,
    torch.Tensor.record_stream: lambda x, stream: None,
}


def extent(x: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor lies in."""
    if x.numel() == 0:
        return 0, 0
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.storage_offset() * x.element_size(), (last + 1) * x.element_size()


def uses(x: Any, writes: bool) -> Uses:
    if isinstance(x, Cuda):
        return [(x.memory, *extent(x.inner), writes)]
    memory = pinned(x)
    return [(memory, *extent(x), writes)] if memory is not None else []


def lock(address: int, nbytes: int, flags: int) -> int:
    """`cudaHostRegister`. Returns CUDA's number of an error."""
    if any(low < address + nbytes and address < high for low, (high, _) in LOCKED.items()):
        return 712  # cudaErrorHostMemoryAlreadyRegistered
    LOCKED[address] = (address + nbytes, Memory(nbytes, HOST))
    return 0


def unlock(address: int) -> int:
    """`cudaHostUnregister`. Nothing may be using the pages."""
    _, memory = LOCKED.pop(address)
    for use in memory.ledger:
        if use.agent is not HOST and HOST.clock.get(use.agent, 0) < use.time:
            VIOLATIONS.append(f"memory was unlocked before its last use is over: {use}")
    return 0


def pinned(x: torch.Tensor) -> Memory | None:
    if not (PINNED or LOCKED) or type(x) is not torch.Tensor or x.device.type != "cpu" or x.layout is not torch.strided:
        return None
    where = x.untyped_storage().data_ptr()
    for low, (high, memory) in LOCKED.items():
        if low <= where < high:
            return memory
    return next((memory for held, memory in PINNED if where and held.untyped_storage().data_ptr() == where), None)


def pin(x: torch.Tensor) -> torch.Tensor:
    PINNED.append((x, Memory(x.untyped_storage().nbytes(), HOST)))
    return x


def on_device(inner: torch.Tensor, stream: device.Agent) -> Cuda:
    memory = Memory(inner.untyped_storage().nbytes(), stream)
    memory.kept = device.CAPTURE is not None
    return Cuda(inner, memory)


def is_tracing() -> bool:
    """Whether tensors made now are fake. (Modes of torch's own come after those of others.)"""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, Cuda) else x


# --- ops --------------------------------------------------------------------------------------------------------------


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an op does, with operands on CUDA or a device named cuda among its arguments."""
    flat, form = pytree.tree_flatten((args, kwargs))
    mine = [x for x in flat if isinstance(x, Cuda)]
    named = [x for x in flat if isinstance(x, torch.device) and x.type == "cuda"]
    if is_tracing() or any(isinstance(x, FakeTensor) for x in flat):
        return func(*args, **kwargs)
    if not (mine or named):
        return _host(func, args, kwargs, flat)
    if body := _python_body(func):
        with modes():
            return body(*args, **kwargs)
    indices = {x.device.index for x in mine}
    if len(indices) > 1 and func not in (aten.copy_.default, aten._to_copy.default):
        raise RuntimeError(f"{func}: expected all tensors on one device, found {sorted(indices)}")
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)
    if func is aten._to_copy.default and _moves(args[0], kwargs):
        return _moved(args[0], **kwargs)
    if func is aten._local_scalar_dense.default or _depends_on_data(func):
        _wait_for(func, mine)
    strangers = [x for x in flat if type(x) is torch.Tensor and x.device.type == "cpu" and x.dim()]
    if mine and strangers and func not in (aten.index.Tensor, aten.index_put_.default):
        raise RuntimeError(f"{func}: expected all tensors on one device, found cuda and cpu")
    index = mine[0].device.index if mine else named[0].index
    index = device.current_device() if index is None else index
    leaves = [torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x for x in flat]
    plain_args, plain_kwargs = pytree.tree_unflatten(list(map(_inner, leaves)), form)
    to_host = isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type == "cpu"
    return _issued(func, flat, plain_args, plain_kwargs, device.current_stream(index), (args, kwargs), to_host)


def _host(func: Any, args: Any, kwargs: dict[str, Any], flat: list[Any]) -> Any:
    """An op on the CPU. Pinned memory in it is used by the host, now."""
    if kwargs.get("pin_memory"):
        return pin(func(*args, **{**kwargs, "pin_memory": False}))
    held = [x for x in flat if isinstance(x, torch.Tensor) and pinned(x) is not None]
    if held:
        written = _written(func, args, kwargs)
        if not _is_view(func):
            device.use(HOST, str(func), *(use for x in held for use in uses(x, any(x is w for w in written))))
    return func(*args, **kwargs)


def _python_body(func: Any) -> Any:
    """The Python function of an op of fzero: the ops in it come here one by one."""
    found = OPDEFS.get(func._schema.name)
    if found is None or not func._schema.name.startswith("fzero::"):
        return None
    return found._init_fn


def _depends_on_data(func: Any) -> bool:
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _wait_for(func: Any, mine: list[Cuda]) -> None:
    """The host reads what an op computes, so it waits for the stream."""
    stream = device.current_stream(mine[0].device.index)
    device.refuse_in_capture(f"{func} (the host waits for it)")
    device.use(stream, str(func), *(use for x in mine for use in uses(x, False)))
    device.host_waits(str(func), stream)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and value is not None:
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


def _is_view(func: Any) -> bool:
    infos = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    return bool(infos) and not any(info.is_write for info in infos)


def _reads_nothing(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    return name.startswith("new_") or name.endswith("_like")


def _issued(
    func: Any, flat: list[Any], args: Any, kwargs: Any, stream: device.Agent, given: tuple[Any, Any], to_host: bool
) -> Any:
    written = _written(func, *given)
    mine = [x for x in flat if isinstance(x, Cuda)]
    reads = [] if _reads_nothing(func) else [x for x in mine if not any(x is w for w in written)]
    found = [use for x in reads for use in uses(x, False)] + [use for x in written for use in uses(x, True)]
    what, view = str(func), _is_view(func)
    if device.CAPTURE is not None and not view:
        return _captured(func, args, kwargs, stream, mine, written, found)
    if not view:
        device.use(stream, what, *found)
    out, fresh = _wrapped(func(*args, **kwargs), mine, stream, to_host)
    if view and fresh:  # a reshape that has to copy
        device.use(stream, what, *found)
    for x in fresh:
        device.use(stream, what, *uses(x, True))
    return out


def _wrapped(result: Any, mine: list[Cuda], stream: device.Agent, to_host: bool = False) -> tuple[Any, list[Cuda]]:
    """What an op returns, and the tensors in it that lie in memory of their own."""
    fresh: list[Cuda] = []

    def one(out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or to_host:
            return out
        where = out.untyped_storage().data_ptr()
        for x in mine:
            if out is x.inner:
                return x
        for x in mine:
            if where and x.inner.untyped_storage().data_ptr() == where:
                return Cuda(out, x.memory)
        fresh.append(on_device(out, stream))
        return fresh[-1]

    return pytree.tree_map(one, result), fresh


def _captured(
    func: Any, args: Any, kwargs: Any, stream: device.Agent, mine: list[Cuda], written: list[Any], found: Uses
) -> Any:
    """An op in a capture: it runs to know the shapes of what it makes, and leaves what it writes as it was."""
    args, kwargs = pytree.tree_map(  # a number on the host becomes an argument of the kernel
        lambda x: x.clone() if type(x) is torch.Tensor and not any(x is m.inner for m in mine) else x, (args, kwargs)
    )
    before = [x.inner.clone() for x in written]
    out, fresh = _wrapped(func(*args, **kwargs), mine, stream)
    for x, old in zip(written, before, strict=True):
        x.inner.copy_(old)
    places = [i for i, x in enumerate(pytree.tree_leaves(out)) if any(x is f for f in fresh)]

    def again() -> None:
        values = pytree.tree_leaves(func(*args, **kwargs))
        for i, x in zip(places, fresh, strict=True):
            x.inner.copy_(values[i])

    for x in fresh:
        found = [*found, *uses(x, True)]
    device.issue(stream, str(func), found, again)
    return out


# --- between host and device ------------------------------------------------------------------------------------------


def _moves(x: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    to = kwargs.get("device")
    return to is not None and (
        to.type != x.device.type or (to.type == "cuda" and to.index not in (None, x.device.index))
    )


def _moved(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`x.to(device)`."""
    to, lazy = torch.device(kwargs.pop("device")), kwargs.pop("non_blocking", False)
    shape = aten._to_copy.default(_inner(x), **{k: v for k, v in kwargs.items() if k != "pin_memory"})
    made = torch.empty_like(shape)
    if to.type == "cuda":
        index = device.current_device() if to.index is None else to.index
        into: torch.Tensor = on_device(made, device.current_stream(index))
    else:
        into = pin(made) if lazy else made
    return _copy(into, x, lazy)


def _copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`into.copy_(source)`. Pageable memory is copied while the host waits, whatever it asks for."""
    index = (into if isinstance(into, Cuda) else source).device.index
    stream = device.current_stream(index)
    host = [x for x in (into, source) if not isinstance(x, Cuda) and (x.dim() or x is into)]
    waits = any(not non_blocking or pinned(x) is None for x in host)
    what = f"aten.copy_ ({source.device} to {into.device})"
    if waits:
        device.refuse_in_capture(f"{what}, for which the host waits,")
    plain_into, plain_source = _inner(into), _inner(source)
    if not isinstance(source, Cuda) and device.CAPTURE is not None and pinned(source) is None:
        plain_source = plain_source.clone()
    found = [*uses(source, False), *uses(into, True)]
    device.issue(stream, what, found, lambda: plain_into.copy_(plain_source))
    if waits:
        device.host_waits(what, stream)
    return into


# --- every thread -----------------------------------------------------------------------------------------------------


class Redirect(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Methods(TorchFunctionMode):
    """What the host does with pinned memory without an op, and `torch.tensor`, which tells no mode of its copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to = (kwargs or {}).get("device")
        if func is torch.tensor and to is not None and torch.device(to).type == "cuda":
            return func(*args, **{**kwargs, "device": "cpu"}).to(to)
        if func in _OF_HOST and type(args[0]) is torch.Tensor and pinned(args[0]) is not None:
            if func is torch.Tensor.is_pinned:
                return True
            device.use(HOST, f"Tensor.{func.__name__}", *uses(args[0], False))
        return func(*args, **(kwargs or {}))


_OF_HOST = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.is_pinned)


@contextmanager
def modes() -> Iterator[None]:
    with Methods(), Redirect():
        yield


def install() -> None:
    """In this thread, and in those that it starts."""
    Methods().__enter__()
    Redirect().__enter__()
    known = ambient.ambient_modes
    ambient.ambient_modes = lambda: [m for m in known() if not isinstance(m, (Methods, Redirect))]  # part of the device
    plain = threading.Thread.run

    def with_modes(self: threading.Thread) -> None:
        with modes():
            plain(self)

    threading.Thread.run = with_modes  # type: ignore[method-assign]
