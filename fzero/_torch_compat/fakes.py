"""fakes: private names of torch for fake tensors: how they are made, kept and silenced."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._library import simple_registry  # 2.11.0, 2.13.0
from torch._ops import OpOverload  # 2.11.0, 2.13.0
from torch._subclasses.fake_impls import fast_detach  # 2.11.0, 2.13.0
from torch._subclasses.fake_tensor import (  # 2.11.0, 2.13.0
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)


def forget_fakes(most: int) -> None:
    """Drops what torch keeps of every op on fake tensors of every shape, for as long as the process lives, if that is
    more than so many results (`FakeTensorMode.cache`: 2.11.0, 2.13.0)."""
    if len(FakeTensorMode.cache) > most:
        FakeTensorMode.cache_clear()


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor (shape and dtype without memory)."""
    return isinstance(value, FakeTensor)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Fake tensors log the errors of ops that are tried on them at debug level (their module's logger: 2.11.0,
    2.13.0)."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def asked(record: logging.LogRecord) -> bool:
        return logger.isEnabledFor(logging.DEBUG)

    logger.addFilter(asked)
    try:
        yield
    finally:
        logger.removeFilter(asked)


def fake_detached(value: FakeTensor) -> FakeTensor:
    """A fake tensor of the same form, which no gradient follows, past all modes (2.11.0, 2.13.0)."""
    return fast_detach(value.fake_mode, value)


def fake_of_form(
    like: FakeTensor, shares: bool, shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:  # fmt: skip
    """A fake tensor of this form and of `like`'s mode; a view of `like`, from whose own offset it counts, if it shares
    its memory. Past all modes (`in_kernel_invocation_manager`: 2.11.0, 2.13.0)."""
    with in_kernel_invocation_manager(like.fake_mode):
        if shares:
            made = torch.ops.aten.as_strided.default(like, shape, stride, like.storage_offset() + offset)
        else:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(like.fake_mode, made, device)


def fake_empty(mode: FakeTensorMode, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> FakeTensor:
    """`torch.empty(shape, dtype=dtype, device=device)` in a mode, in a fifth of its time. Past all modes
    (`in_kernel_invocation_manager`: 2.11.0, 2.13.0)."""
    with in_kernel_invocation_manager(mode):
        made = torch.empty(shape, dtype=dtype, device="meta")
    return FakeTensor(mode, made, device)


def fake_like(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """The fake tensor of a tensor of the device "meta", past all modes: to be called outside of them."""
    return FakeTensor(mode, meta, device)


def move_fake(value: FakeTensor, device: torch.device) -> None:
    """Has a fake tensor lie on another device, in place, with all who hold it (`fake_device`: 2.11.0, 2.13.0)."""
    value.fake_device = device


@contextmanager
def lying_on(device: torch.device, values: Sequence[FakeTensor]) -> Iterator[None]:
    """A context in which rules of shapes find fake tensors on a device: some say other dtypes there."""
    before = [value.fake_device for value in values]
    try:
        for value in values:
            value.fake_device = device
        yield
    finally:
        for value, own in zip(values, before, strict=True):
            value.fake_device = own


def fake_by_kernel(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], like: FakeTensor) -> Any:
    """An op's results by its kernel for meta tensors, of one device and `like`'s mode; None where one is not wanted.
    Past decompositions and symbolic sizes, which take fifty times as long (`in_kernel_invocation_manager`: 2.11.0,
    2.13.0)."""
    mode, device = like.fake_mode, like.fake_device
    with in_kernel_invocation_manager(mode):
        results = op(*args, **kwargs)
    if isinstance(results, torch.Tensor):
        return FakeTensor(mode, results, device)
    return type(results)(None if x is None else FakeTensor(mode, x, device) for x in results)


@functools.cache
def fake_rule(op: OpOverload) -> Callable[..., Any]:
    """What gives an op's results on fake tensors, in their mode. For an op of fzero's own that is the rule which it was
    registered with: the way there through torch takes ten times as long (the registry's entries: 2.11.0, 2.13.0)."""
    entry = simple_registry.singleton._data.get(op._schema.name) if op.namespace == "fzero" else None
    rule = getattr(getattr(entry, "fake_impl", None), "kernel", None)
    return op if rule is None else rule
