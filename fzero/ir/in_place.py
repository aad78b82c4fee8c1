"""in_place: what eager PyTorch refuses of an op that writes (`add_`, `out=`), and its rules for fake tensors let pass.

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
    """Checks that an op of aten that writes does so to each element once. Of one that computes each by itself, also
    that the result fits; of others torch does. fake: gives the result of an op on fake tensors.

    Raises RuntimeError in eager's words.
    """
    names = _written(op)
    if not names:
        return
    given = {**dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)), **kwargs}
    if any(map(_is_expanded, (x for name in names for x in _values(given.get(name))))):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    pure = _pure(op)
    if pure is None or _is_like(args, kwargs):
        return
    results = fake(pure, args, {name: value for name, value in kwargs.items() if name not in names})
    for own, result in zip(_values(given[names[0]]), _values(results), strict=True):
        _check_result(own, result, resized=names[0] in kwargs)


def count(op: OpOverload, args: Sequence[Any]) -> None:
    """Counts the writes of an op to a list of tensors, so that autograd refuses a backward that reads what was there
    before. In eager the op's kernel counts them, and no trace runs it."""
    if op.namespace == "aten" and (name := op.overloadpacket.__name__).startswith(FOREACH) and name.endswith("_"):
        torch.autograd.graph.increment_version(args[0])


def _values(given: Any) -> Sequence[Any]:
    return given if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _check_result(own: torch.Tensor, result: torch.Tensor, *, resized: bool) -> None:
    if result.shape != own.shape and not resized:
        raise RuntimeError(
            f"output with shape {list(own.shape)} doesn't match the broadcast shape {list(result.shape)}"
        )
    if not torch.can_cast(result.dtype, own.dtype):
        given, needed = (str(dtype).removeprefix("torch.") for dtype in (result.dtype, own.dtype))
        raise RuntimeError(f"result type {given} can't be cast to the desired output type {needed}")


def _is_expanded(own: torch.Tensor) -> bool:
    return own.numel() > 1 and any(n > 1 and step == 0 for n, step in zip(own.shape, own.stride(), strict=True))


def _is_like(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether operands can change neither the result's shape nor its dtype."""
    own, *others = *args, *kwargs.values()
    if not isinstance(own, torch.Tensor) or not own.is_floating_point():
        return False
    tensors = [x for x in others if isinstance(x, torch.Tensor)]
    same = all(x.shape == own.shape and x.dtype == own.dtype for x in tensors)
    return same and not any(isinstance(x, complex) for x in others)


@functools.cache
def _written(op: OpOverload) -> list[str]:
    """The arguments to which an op of aten writes values, but for draws."""
    if op.namespace != "aten" or {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}.intersection(op.tags):
        return []
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


@functools.cache
def _pure(op: OpOverload) -> OpOverload | None:
    """Of an elementwise op that writes to one argument that which writes nothing and else is the same; None of
    others."""
    name, types = op.overloadpacket.__name__, _types(op)
    is_out = op._schema.arguments[-1].is_out
    packet = (
        op.overloadpacket if is_out else getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    )
    if packet is None or packet in _OWN_RESULT or len(_written(op)) > 1:
        return None
    overloads: list[OpOverload] = [getattr(packet, each) for each in packet.overloads()]
    pure = [x for x in overloads if not x._schema.is_mutable and _types(x) == (types[:-1] if is_out else types)]
    elementwise = pure and (torch.Tag.pointwise in pure[0].tags or packet in _UNTAGGED or name.startswith(FOREACH))
    return pure[0] if elementwise else None


def _types(op: OpOverload) -> list[str]:
    return [str(argument.type) for argument in op._schema.arguments]
