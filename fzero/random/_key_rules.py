"""The rules for keys, shapes, dtypes and bounds, and their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def describe(value: object) -> str:
    """Returns a value in words, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def is_key(value: object) -> bool:
    """Whether a value has a key's form: an int64 tensor of shape (2,)."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and tuple(value.shape) == (2,)


def key_of(function: str, key: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless `key` is a key."""
    if is_key(key):
        return
    hint = "Write fzero.random.key(0)"
    if isinstance(key, torch.Tensor) and key.dtype == torch.int64 and key.dim() == 2 and key.shape[1] == 2:
        hint = f"For one key write keys[0]; for all of them torch.vmap(lambda key: fzero.random.{function}(key))(keys)"
    elif isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        hint = f"Write fzero.random.key({key})"
    message = f"fzero.random.{function}: key must be an int64 tensor of shape (2,), given {describe(key)}. {hint}"
    raise (ValueError if isinstance(key, torch.Tensor) and key.dtype == torch.int64 else TypeError)(message)


def float_dtype(function: str, dtype: torch.dtype) -> None:
    """Raises TypeError unless numbers of this dtype can be made."""
    if dtype in DTYPES:
        return
    raise TypeError(
        f"fzero.random.{function}: dtype must be one of {', '.join(map(str, DTYPES))}, given {dtype}. For another, "
        f"convert: fzero.random.{function}(key, shape).to(dtype)"
    )


def as_shape(function: str, shape: int | Sequence[int]) -> list[int]:
    """Returns a shape as a list. Raises TypeError or ValueError for a wrong one."""
    sizes = [shape] if isinstance(shape, (int, torch.SymInt)) else shape
    if not isinstance(sizes, Sequence) or not all(isinstance(size, (int, torch.SymInt)) for size in sizes):
        raise TypeError(f"fzero.random.{function}: shape must be an int or a sequence of ints, given {describe(shape)}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"fzero.random.{function}: shape must not be negative, given {tuple(sizes)}")
    return list(sizes)


def bounds(dtype: torch.dtype, low: float, high: float) -> tuple[float, float]:
    """Returns the bounds rounded to `dtype`, or raises ValueError.

    The shape rule calls it too, so it is plain Python: no tensor is made.
    """
    rounded_low, rounded_high = rounded(low, dtype), rounded(high, dtype)
    if not rounded_low < rounded_high:
        raise ValueError(
            f"fzero.random.uniform: needs low < high within {dtype}, given low={low} and high={high}, which round to "
            f"{rounded_low} and {rounded_high}. Widen the bounds or ask for torch.float64"
        )
    if not rounded_high - rounded_low <= torch.finfo(dtype).max:
        raise ValueError(
            f"fzero.random.uniform: high - low must be finite in {dtype}, given low={low} and high={high}. "
            "Narrow the bounds or ask for torch.float64"
        )
    return rounded_low, rounded_high


def rounded(value: float, dtype: torch.dtype) -> float:
    """Returns a number rounded to the nearest of `dtype`, computed in plain Python."""
    if dtype == torch.float64 or value == 0 or not math.isfinite(value):
        return value
    info = torch.finfo(dtype)
    step = max(math.ldexp(info.eps, math.frexp(value)[1] - 1), info.smallest_normal * info.eps)
    return round(value / step) * step


def probability(function: str, p: float) -> float:
    """Returns `p` as a float. Raises TypeError or ValueError unless it is a Python number in [0, 1]."""
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise TypeError(
            f"fzero.random.{function}: p must be a Python number in [0, 1], given {describe(p)}. For a tensor "
            "of probabilities write fzero.random.bernoulli(key, p, shape)"
        )
    if not 0 <= p <= 1:
        raise ValueError(f"fzero.random.{function}: p must be in [0, 1], given {p}")
    return float(p)


def same_device(function: str, name: str, value: torch.Tensor, key: torch.Tensor) -> None:
    """Raises ValueError unless a tensor is on the key's device."""
    if value.device != key.device:
        raise ValueError(
            f"fzero.random.{function}: {name} is on {value.device}, the key on {key.device}. "
            f"Write key.to({name}.device)"
        )


def integer_range(low: int, high: int) -> None:
    """Raises TypeError or ValueError unless `low` and `high` bound a range that `randint` can draw from."""
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise TypeError(f"fzero.random.randint: {name} must be a Python int, given {describe(bound)}")
    if not (low < high <= low + (1 << 62) and low >= -(1 << 63) and high <= 1 << 63):
        raise ValueError(
            "fzero.random.randint: needs -2**63 <= low < high <= 2**63 and at most 2**62 numbers between, "
            f"given low={low} and high={high}"
        )
