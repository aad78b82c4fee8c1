"""in_place: what eager PyTorch refuses of an in-place op, and its rules for fake tensors let pass.

A write of more elements than there are (`m &= mask` of a 0-d `m`), of a dtype that the tensor cannot hold (`counts *=
0.5` of integers), or to an expanded tensor. A trace would compute all three, and with numbers that eager has not.

Eager lets a few ops fill an expanded tensor (`fill_`, `masked_fill_`, `index_put_`). torch's functionalization adds up
what is written to one element, so these are refused too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero._torch_compat import OpOverload

aten = torch.ops.aten
FOREACH = "_foreach_"
_UNTAGGED = {aten.floor_divide}
_OWN_RESULT = {aten.conj_physical}  # which gives real numbers' very tensor


def check(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], fake: Callable[..., Any]) -> None:
    """Checks that an in-place op of aten writes each element once. Of one that computes each by itself, also that the
    result fits; of others torch does. fake: gives the result of an op on fake tensors.

    Raises RuntimeError in eager's words.
    """
    if not _is_in_place(op):
        return
    written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    if any(map(_is_expanded, written)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    pure = _pure(op)
    if pure is None or _is_like(args, kwargs):
        return
    results = fake(pure, args, kwargs)
    for own, result in zip(written, results if written is args[0] else [results], strict=True):
        _check_result(own, result)


def _check_result(own: torch.Tensor, result: torch.Tensor) -> None:
    if result.shape != own.shape:
        raise RuntimeError(
            f"output with shape {list(own.shape)} doesn't match the broadcast shape {list(result.shape)}"
        )
    if not torch.can_cast(result.dtype, own.dtype):
        given, needed = (str(dtype).removeprefix("torch.") for dtype in (result.dtype, own.dtype))
        raise RuntimeError(f"result type {given} can't be cast to the desired output type {needed}")


def _is_expanded(own: torch.Tensor) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(own.shape, own.stride(), strict=True))


def _is_like(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether operands can change neither the result's shape nor its dtype."""
    own, *others = *args, *kwargs.values()
    if not isinstance(own, torch.Tensor) or not own.is_floating_point():
        return False
    tensors = [x for x in others if isinstance(x, torch.Tensor)]
    same = all(x.shape == own.shape and x.dtype == own.dtype for x in tensors)
    return same and not any(isinstance(x, complex) for x in others)


@functools.cache
def _is_in_place(op: OpOverload) -> bool:
    """Whether an op of aten writes values to its first operand, but for draws."""
    first = op._schema.arguments[0].alias_info if op._schema.arguments else None
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}
    return op.namespace == "aten" and first is not None and first.is_write and not tags.intersection(op.tags)


@functools.cache
def _pure(op: OpOverload) -> OpOverload | None:
    """Of an elementwise in-place op that which writes nothing and else is the same; None of every other op."""
    name, own = op.overloadpacket.__name__, op._overloadname
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    if packet is None or packet in _OWN_RESULT:
        return None
    names = f"Tensor_{own}", own, "default"  # pow_.Scalar is pow.Tensor_Scalar, floor_divide_.Tensor floor_divide
    same = [each for each in names if each in packet.overloads()]
    pure: OpOverload | None = getattr(packet, same[0]) if same else None
    elementwise = pure is not None and (torch.Tag.pointwise in pure.tags or packet in _UNTAGGED)
    return pure if elementwise or name.startswith(FOREACH) else None
