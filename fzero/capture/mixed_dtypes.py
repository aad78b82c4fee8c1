"""mixed_dtypes: operands whose dtypes an op takes on fake tensors and refuses when it runs, and the other way round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero import backend
from fzero.capture.cast_first import CAST
from fzero.capture.provenance import describe
from fzero.capture.remedies import ALIKE, MIXED
from fzero.ir.op_info import of


def why(op: Any, args: Sequence[Any]) -> str:
    """What is wrong with the operands' dtypes, after the op's name and place; "" if nothing is."""
    row = of(op)
    if row.one_dtype is not None:
        places = range(len(args)) if row.one_dtype == "all" else row.one_dtype
        own = [args[i] for i in places if i < len(args) and isinstance(args[i], Tensor)]
        if len({x.dtype for x in own}) > 1 and not _fills_mask(args):
            return f"is given {_shown(own)}: it needs one dtype. Cast one, as in x.to(w.dtype)"
    if row.index is not None:
        for given in _tensors(args[row.index[0]]):
            if given.dtype not in row.index[1]:
                return f"is given {describe(given)} as indices: it needs int64. Cast them, as in y.long()"
    if row.numbers and any(isinstance(x, bool) or getattr(x, "dtype", None) is torch.bool for x in args[:2]):
        own = [x for x in args if isinstance(x, Tensor)]
        return f"is given {_shown(own)}: torch subtracts no bool. Cast it, as in m.to(x.dtype), or write ~m for 1 - m"
    if row.norm_weight is not None and isinstance(args[0], Tensor):
        own, known = [x for x in args[:5] if isinstance(x, Tensor)], backend.of_traced(args[0].device)
        dtype, others = own[0].dtype, {x.dtype for x in own[1:]}
        if known.on_host and not _takes(dtype, others):
            return f"is given {_shown(own)}: {MIXED}"
        if known.norms_alike and row.norm_alike and not others <= {dtype}:
            return f"is given {_shown(own)}: {ALIKE.format(known.name)}"
    return ""


def with_bytes_cast(op: Any, args: tuple[Any, ...], run: Callable[..., Any]) -> tuple[Any, ...]:
    """The operands, where one of bytes is cast to the dtype as which the op's kernel reads it: masks of uint8 to bool,
    labels to int64. torch's rules for fake tensors refuse bytes. run: runs an op in the trace."""
    row = of(op).read_bytes
    if row is None or not any(x.dtype is torch.uint8 for x in _tensors(args[row[0]])):
        return args
    place, dtype = row

    def cast(x: Tensor | None) -> Tensor | None:
        return run(CAST, (x,), {"dtype": dtype}) if x is not None and x.dtype is torch.uint8 else x

    given = args[place]
    read = [cast(x) for x in given] if isinstance(given, (list, tuple)) else cast(given)
    return (*args[:place], read, *args[place + 1 :])


def _tensors(operand: Any) -> list[Tensor]:
    return [x for x in (operand if isinstance(operand, (list, tuple)) else [operand]) if isinstance(x, Tensor)]


def _fills_mask(args: Sequence[Any]) -> bool:
    """Whether `x[mask] = value` writes one number, which torch casts; not `x[mask, i] = value`, or a number added."""
    indices, value = (args[1], args[2]) if len(args) > 2 and isinstance(args[1], (list, tuple)) else ([], None)
    own = _tensors(indices)
    masks = len(own) == 1 and own[0].dtype in (torch.bool, torch.uint8)
    return masks and isinstance(value, Tensor) and value.numel() == 1 and not any(args[3:])


def _takes(dtype: torch.dtype, of_parameters: set[torch.dtype]) -> bool:
    """Whether a norm of the CPU takes values of a dtype beside these of its parameters and statistics (2.13.0)."""
    wide = dtype.itemsize == 2 and of_parameters == {torch.float32}
    return wide or of_parameters <= {dtype}


def _shown(operands: Sequence[Tensor]) -> str:
    return " and ".join(map(describe, operands))
