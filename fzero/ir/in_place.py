"""in_place: what eager PyTorch refuses of an in-place op, and its rules for fake tensors let pass.

A write of more elements than there are (`m &= mask` of a 0-d `m`), of a dtype that the tensor cannot hold (`counts *=
0.5` of integers), or to an expanded tensor. A trace would compute all three, and with numbers that eager has not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero._torch_compat import OpOverload

aten = torch.ops.aten
_FILLS = {
    aten.fill_.Scalar, aten.masked_fill_.Scalar, aten.threshold_.default, aten.zero_.default,
    aten.conj_physical_.default,
}  # fmt: skip
_UNTAGGED = {aten.floor_divide}


def check(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], fake: Callable[..., Any]) -> None:
    """Checks an in-place op of aten that computes each element by itself; others are left to torch. fake: gives the
    result of an op on fake tensors.

    Raises RuntimeError in eager's words.
    """
    pure = _pure(op)
    if pure is None:
        return
    own = args[0]
    others = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, (torch.Tensor, float, complex))]
    if op not in _FILLS and any(n > 1 and step == 0 for n, step in zip(own.shape, own.stride(), strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    if all(_is_like(x, own) for x in others):
        return
    result = fake(pure, args, kwargs)
    if result.shape != own.shape:
        raise RuntimeError(
            f"output with shape {list(own.shape)} doesn't match the broadcast shape {list(result.shape)}"
        )
    if not torch.can_cast(result.dtype, own.dtype):
        given, needed = (str(dtype).removeprefix("torch.") for dtype in (result.dtype, own.dtype))
        raise RuntimeError(f"result type {given} can't be cast to the desired output type {needed}")


def _is_like(x: Any, own: torch.Tensor) -> bool:
    """Whether an operand can change neither the result's shape nor its dtype."""
    if isinstance(x, torch.Tensor):
        return x.shape == own.shape and x.dtype == own.dtype
    return own.is_floating_point() and isinstance(x, float)


@functools.cache
def _pure(op: OpOverload) -> OpOverload | None:
    """Of an elementwise in-place op that which writes nothing and else is the same; None of every other op, and of
    draws."""
    name, own = op.overloadpacket.__name__, op._overloadname
    packet = getattr(aten, name.removesuffix("_"), None) if op.namespace == "aten" and name.endswith("_") else None
    if packet is None or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    names = own, f"Tensor_{own}", "default"  # pow_.Tensor is pow.Tensor_Tensor, floor_divide_.Tensor floor_divide
    same = [each for each in names if each in packet.overloads()]
    pure: OpOverload | None = getattr(packet, same[0]) if same else None
    return pure if pure is not None and (torch.Tag.pointwise in pure.tags or packet in _UNTAGGED) else None
