"""kernels: launches of Triton kernels with tensors on CUDA, in Triton's interpreter.

The interpreter says which addresses each load and store takes: those are the launch's uses of memory, and one that is
in none of its operands is an error.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from standin import device, tensors
from standin.tensors import Cuda

LAUNCHED: set[str] = set()
_touched: list[tuple[int, int, bool]] = []


def _range(pointers: Any, mask: Any, writes: bool) -> None:
    where = pointers.data.reshape(-1)
    if mask is not None:
        where = where[np.broadcast_to(mask.data, pointers.data.shape).reshape(-1).astype(bool)]
    if where.size:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        _touched.append((int(where.min()), int(where.max()) + size, writes))


def install() -> None:
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    patch, done = interpreter._patch_lang, set[Any]()

    def patched(fn: Any) -> Any:
        """Triton's language made the interpreter's, once and for all: it takes a millisecond for each call."""
        if fn not in done:
            done.add(fn)
            patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patched
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        _range(ptrs, mask, False)
        return load(self, ptrs, mask, *rest, **options)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        _range(ptrs, mask, True)
        return store(self, ptrs, value, mask, *rest, **options)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Cuda)]
        strangers = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and not isinstance(x, Cuda)]
        name = self.fn.__name__
        if not given:
            call(self, *args, **kwargs)
            return
        assert not strangers, f"{name}: a kernel was given a tensor in host memory"
        index = {x.device.index for x in given}
        assert index == {device.current_device()}, f"{name}: launched on cuda:{device.current_device()}, not {index}"
        LAUNCHED.add(name)
        plain = [tensors._inner(x) for x in args]
        named = {key: tensors._inner(x) for key, x in kwargs.items()}

        def run() -> None:
            call(self, *plain, **named)

        saved = [x.inner.clone() for x in given]  # where a graph is captured, to run nothing
        _touched.clear()
        run()
        found = _uses(name, given)
        capturing = device.CAPTURE is not None
        if capturing:
            for x, old in zip(given, saved, strict=True):
                x.inner.copy_(old)
        device.issue(device.current_stream(index.pop()), name, found, run if capturing else lambda: None)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    executor.__call__ = launch


def _uses(name: str, given: list[Cuda]) -> tensors.Uses:
    """The launch's uses of memory, one of each kind for an operand."""
    found: dict[tuple[int, bool], tuple[int, int]] = {}
    for low, high, writes in _touched:
        for i, x in enumerate(given):
            start = x.inner.untyped_storage().data_ptr()
            first, last = tensors.extent(x.inner)
            if start + first <= low and high <= start + last:
                old = found.get((i, writes), (low - start, high - start))
                found[i, writes] = min(old[0], low - start), max(old[1], high - start)
                break
        else:
            raise AssertionError(f"{name}: {'writes' if writes else 'reads'} beyond its operands")
    return [(given[i].memory, low, high, writes) for (i, writes), (low, high) in found.items()]
