"""Randomness as a function of a key: the same key gives the same numbers, and nothing else is remembered.

A **key** is an int64 tensor of shape (2,): 128 bits, the key of a Philox4x64-10 generator, whose block turns a counter
of four 64-bit words into four random words (see kernels/philox.py). `key(seed)` is the seed itself, low word first.
What is drawn from a key is told apart by the counter, so no two of these ever read the same block:

    split(key)[i]       words 0 and 1 of block (i + 1, 0,    0, SPLIT)     so split(key, 4)[:2] equals split(key, 2)
    fold_in(key, data)  words 0 and 1 of block (1,     data, 0, FOLD)
    uniform(key, ...)   blocks                 (1...,  0,    0, UNIFORM)
    normal(key, ...)    blocks                 (1...,  0,    0, NORMAL)

Drawing twice from one key in one way gives the same numbers twice: split it, or fold in what tells the uses apart (the
step, the layer, the rank).

Every function of a key is an op of torch (`fzero::uniform` and kin) with a shape rule and a vmap rule. It is pure, and
not tagged as random: it traces to one node, a compiler may recompute, share or drop it, and vmap over keys gives each
key the numbers it would have alone. It has no derivative.

Which numbers are equal where:

- Keys (`key`, `split`, `fold_in`): the same bits on every backend and version. They are integers, defined above.
- Numbers on CPU: `numpy.random.Generator` over `numpy.random.Philox`, written straight into the result. The same bits
  on every run; on every platform and numpy version as far as numpy promises it, which for the distributions is weaker
  than for the words (its ziggurat calls the platform's `exp` and `log`, and a release may change an algorithm).
- Numbers on CUDA: Philox4x32-10 in one Triton kernel, normals by Box-Muller. A **different** stream from the CPU's: the
  same key gives other numbers there. The same bits on every run on one kind of device.
- bfloat16 and float16 are the float32 numbers of the same key, rounded: normals to nearest; uniforms down, so that they
  stay below `high`, and a mask `uniform(key, shape, dtype) < p` keeps the share it keeps in float32.

Memory: the result and, for 16-bit types on CPU, under 2 MiB of scratch. Time on one core: 7 ns for a uniform float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .kernels import philox

# The last word of the counter. These values are part of what a key means: never change one, only add.
_SPLIT, _FOLD, _UNIFORM, _NORMAL = 1, 2, 3, 4

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CHUNK = 1 << 16  # numbers made at once on CPU, few enough for the second-level cache; changes no number


def key(seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The key of a seed, an int64 tensor of shape (2,) on `device`. Different seeds are different keys.

    `seed` is a Python int in [0, 2**128); anything else raises TypeError or ValueError.

    >>> key(0)
    tensor([0, 0])
    >>> torch.equal(normal(key(7), 3), normal(key(7), 3))
    True
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(
            f"fzero.random.key: seed must be a Python int, given {_describe(seed)}. Write fzero.random.key(int(seed)); "
            "to make a key from a traced value use fzero.random.fold_in(fzero.random.key(0), value)"
        )
    if not 0 <= seed < 1 << 128:
        raise ValueError(
            f"fzero.random.key: seed must be in [0, 2**128), given {seed}. Write fzero.random.key(seed % 2**64)"
        )
    words = [word - (1 << 64) if word >> 63 else word for word in (seed & ((1 << 64) - 1), seed >> 64)]
    return torch.tensor(words, dtype=torch.int64, device=device)


def split(key: torch.Tensor, num: int = 2) -> torch.Tensor:
    """`num` independent keys as an int64 tensor of shape (num, 2), on the key's device.

    Child i does not depend on `num`. Raises TypeError or ValueError for a wrong key, or `num` below 1.

    >>> first, second = split(key(0))
    >>> torch.equal(split(key(0), 5)[0], first), torch.equal(first, second)
    (True, False)
    """
    _check_key("split", key)
    if isinstance(num, bool) or not isinstance(num, (int, torch.SymInt)):
        raise TypeError(f"fzero.random.split: num must be an int, given {_describe(num)}. Write split(key, 2)")
    if num < 1:
        raise ValueError(f"fzero.random.split: num must be at least 1, given {num}. Write split(key, 2)")
    result: torch.Tensor = _split(key, num)
    return result


def fold_in(key: torch.Tensor, data: int | torch.Tensor) -> torch.Tensor:
    """The key for use number `data`, an int64 tensor of shape (2,): `fold_in(key, step)`, `fold_in(key, layer)`.

    `data` is a Python int in [-2**63, 2**63) or a 0-d integer tensor on the key's device, which may be traced or mapped
    over; equal values give equal keys. Raises TypeError for a float or bool, ValueError for another shape or device.

    >>> step = torch.tensor(3)
    >>> torch.equal(fold_in(key(0), step), fold_in(key(0), 3)), torch.equal(fold_in(key(0), 0), key(0))
    (True, False)
    """
    _check_key("fold_in", key)
    if isinstance(data, torch.Tensor):
        if data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
            raise TypeError(
                f"fzero.random.fold_in: data must hold integers, given {_describe(data)}. Write data.long()"
            )
        if data.dim() != 0:
            raise ValueError(
                f"fzero.random.fold_in: data must be 0-d, given {_describe(data)}. For one key per element write "
                "torch.vmap(lambda d: fzero.random.fold_in(key, d))(data)"
            )
        if data.device != key.device:
            raise ValueError(
                f"fzero.random.fold_in: data is on {data.device}, the key on {key.device}. Write data.to(key.device)"
            )
        folded: torch.Tensor = _fold_in_tensor(key, data)
        return folded
    if isinstance(data, bool) or not isinstance(data, (int, torch.SymInt)):
        raise TypeError(
            "fzero.random.fold_in: data must be a Python int or a 0-d integer tensor, "
            f"given {_describe(data)}. Write fold_in(key, int(data))"
        )
    if not -(1 << 63) <= data < 1 << 63:
        raise ValueError(
            f"fzero.random.fold_in: data must be in [-2**63, 2**63), given {data}. Fold in its parts one after another"
        )
    result: torch.Tensor = _fold_in(key, data)
    return result


def uniform(
    key: torch.Tensor,
    shape: int | Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    low: float = 0.0,
    high: float = 1.0,
) -> torch.Tensor:
    """Numbers spread evenly over [low, high), of this shape and dtype, on the key's device.

    `dtype` is float32 (24 random bits), float64 (53), bfloat16 or float16. The bounds are rounded to it first; `high`
    itself never comes. Raises TypeError for another dtype or a bound that is a tensor, ValueError when the rounded
    bounds are equal, swapped or not finite, and TypeError or ValueError for a wrong key or shape.

    >>> x = uniform(key(0), (2, 3), low=-1, high=1)
    >>> x.shape, bool((x >= -1).all() and (x < 1).all())
    (torch.Size([2, 3]), True)
    """
    _check_key("uniform", key)
    _check_dtype("uniform", dtype)
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, torch.Tensor):
            raise TypeError(
                f"fzero.random.uniform: {name} must be a Python number, given {_describe(bound)}. "
                "Write low + (high - low) * fzero.random.uniform(key, shape)"
            )
    result: torch.Tensor = _uniform(key, _as_shape("uniform", shape), dtype, float(low), float(high))
    return result


def normal(key: torch.Tensor, shape: int | Sequence[int] = (), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers of this shape and dtype (float32, float64, bfloat16 or float16), on the key's device.

    Raises TypeError for another dtype, and TypeError or ValueError for a wrong key or shape.

    >>> weights = 0.02 * normal(key(0), (4, 3), torch.bfloat16)
    >>> weights.shape, weights.dtype
    (torch.Size([4, 3]), torch.bfloat16)
    >>> torch.vmap(lambda k: normal(k, 5))(split(key(0), 3)).shape       # for each key what it gives alone
    torch.Size([3, 5])
    """
    _check_key("normal", key)
    _check_dtype("normal", dtype)
    result: torch.Tensor = _normal(key, _as_shape("normal", shape), dtype)
    return result


# ---- checks ----------------------------------------------------------------------------------------------------------


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def _check_key(function: str, key: torch.Tensor) -> None:
    if isinstance(key, torch.Tensor) and key.dtype == torch.int64 and tuple(key.shape) == (2,):
        return
    hint = "Write fzero.random.key(0)"
    if isinstance(key, torch.Tensor) and key.dtype == torch.int64 and key.dim() == 2 and key.shape[1] == 2:
        hint = f"For one key write keys[0]; for all of them torch.vmap(lambda key: fzero.random.{function}(key))(keys)"
    elif isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        hint = f"Write fzero.random.key({key})"
    message = f"fzero.random.{function}: key must be an int64 tensor of shape (2,), given {_describe(key)}. {hint}"
    raise (ValueError if isinstance(key, torch.Tensor) and key.dtype == torch.int64 else TypeError)(message)


def _check_dtype(function: str, dtype: torch.dtype) -> None:
    if dtype in _DTYPES:
        return
    raise TypeError(
        f"fzero.random.{function}: dtype must be one of {', '.join(map(str, _DTYPES))}, given {dtype}. For another, "
        f"convert: fzero.random.{function}(key, shape).to(dtype)"
    )


def _as_shape(function: str, shape: int | Sequence[int]) -> list[int]:
    sizes = [shape] if isinstance(shape, (int, torch.SymInt)) else shape
    if not isinstance(sizes, Sequence) or not all(isinstance(size, (int, torch.SymInt)) for size in sizes):
        raise TypeError(
            f"fzero.random.{function}: shape must be an int or a sequence of ints, given {_describe(shape)}"
        )
    if any(size < 0 for size in sizes):
        raise ValueError(f"fzero.random.{function}: shape must not be negative, given {tuple(sizes)}")
    return list(sizes)


def _bounds(dtype: torch.dtype, low: float, high: float) -> tuple[float, float]:
    """The bounds rounded to `dtype`, or an error. The shape rule calls it too, so plain Python: no tensor is made."""
    rounded_low, rounded_high = _rounded(low, dtype), _rounded(high, dtype)
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


def _rounded(value: float, dtype: torch.dtype) -> float:
    if dtype == torch.float64 or value == 0 or not math.isfinite(value):
        return value
    info = torch.finfo(dtype)
    step = max(math.ldexp(info.eps, math.frexp(value)[1] - 1), info.smallest_normal * info.eps)
    return round(value / step) * step


# ---- ops -------------------------------------------------------------------------------------------------------------
# Below the public functions a key may carry leading batch dimensions, (*B, 2), and a result leads with the same ones:
# the vmap rules then only move the mapped dimension to the front, and nesting needs nothing more.


def _op(name: str, schema: str) -> Callable[[Callable[..., torch.Tensor]], Any]:
    return torch.library.custom_op(f"fzero::{name}", mutates_args=(), device_types=("cpu", "cuda"), schema=schema)


@_op("random_split", "(Tensor key, SymInt num) -> Tensor")
def _split(key: torch.Tensor, num: int) -> torch.Tensor:
    return _derived(key, num, None, _SPLIT)


@_op("random_fold_in", "(Tensor key, SymInt data) -> Tensor")
def _fold_in(key: torch.Tensor, data: int) -> torch.Tensor:
    return _derived(key, 1, key.new_full(key.shape[:-1], data), _FOLD).squeeze(-2)


@_op("random_fold_in_tensor", "(Tensor key, Tensor data) -> Tensor")
def _fold_in_tensor(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    batch = torch.broadcast_shapes(key.shape[:-1], data.shape)
    data = data.to(torch.int64).expand(batch)
    return _derived(key.expand(*batch, 2), 1, data, _FOLD).squeeze(-2)


@_op("uniform", "(Tensor key, SymInt[] shape, ScalarType dtype, float low, float high) -> Tensor")
def _uniform(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    return _filled(key, shape, dtype, _UNIFORM, *_bounds(dtype, low, high))


@_op("normal", "(Tensor key, SymInt[] shape, ScalarType dtype) -> Tensor")
def _normal(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return _filled(key, shape, dtype, _NORMAL)


@_split.register_fake
def _(key: torch.Tensor, num: int) -> torch.Tensor:
    return key.new_empty((*key.shape[:-1], num, 2))


@_fold_in.register_fake
def _(key: torch.Tensor, data: int) -> torch.Tensor:
    return key.new_empty(key.shape)


@_fold_in_tensor.register_fake
def _(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return key.new_empty((*torch.broadcast_shapes(key.shape[:-1], data.shape), 2))


@_uniform.register_fake
def _(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    _bounds(dtype, low, high)
    return key.new_empty((*key.shape[:-1], *shape), dtype=dtype)


@_normal.register_fake
def _(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return key.new_empty((*key.shape[:-1], *shape), dtype=dtype)


def _map_over_keys(op: Any, info: Any, in_dims: Sequence[Any], key: torch.Tensor, *rest: Any) -> tuple[Any, int]:
    return op(key.movedim(in_dims[0], 0), *rest), 0


for _each in (_split, _fold_in, _uniform, _normal):
    _each.register_vmap(functools.partial(_map_over_keys, _each))


@_fold_in_tensor.register_vmap
def _(info: Any, in_dims: Sequence[int | None], key: torch.Tensor, data: torch.Tensor) -> tuple[torch.Tensor, int]:
    # Every rule adds one dimension in front of both, so under nested vmaps they still line up to be broadcast.
    key, data = (
        value.unsqueeze(0) if dim is None else value.movedim(dim, 0)
        for value, dim in zip((key, data), in_dims, strict=True)
    )
    return _fold_in_tensor(key, data), 0


# ---- what the ops run ------------------------------------------------------------------------------------------------


def _derived(key: torch.Tensor, num: int, data: torch.Tensor | None, domain: int) -> torch.Tensor:
    """Keys (*B, 2) and data (*B) to children (*B, num, 2)."""
    keys = key.reshape(-1, 2).contiguous()
    out = keys.new_empty((len(keys), num, 2))
    data = None if data is None else data.reshape(-1).contiguous()
    if key.is_cuda:
        philox.derive(out, keys, data, domain=domain)
    else:
        counter = np.zeros((4, len(keys), num), np.uint64)
        counter[0] = np.arange(1, num + 1)
        counter[1] = 0 if data is None else data.numpy().view(np.uint64)[:, None]
        counter[3] = domain
        words = philox.philox_reference(counter.reshape(4, -1), np.repeat(_words(keys).T, num, axis=1))
        out.view(-1, 2).numpy()[:] = words[:2].view(np.int64).T
    return out.view((*key.shape[:-1], num, 2))


def _words(keys: torch.Tensor) -> npt.NDArray[np.uint64]:
    return keys.numpy().view(np.uint64)


def _filled(
    key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, domain: int, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    """Keys (*B, 2) to numbers (*B, *shape)."""
    keys = key.reshape(-1, 2).contiguous()
    rows = keys.new_empty((len(keys), math.prod(shape)), dtype=dtype)
    if key.is_cuda:
        philox.fill(rows, keys, normal=domain == _NORMAL, low=low, high=high)
    else:
        for row, words in zip(rows, _words(keys), strict=True):
            _fill_row(row, words, domain, low, high)
    return rows.view((*key.shape[:-1], *shape))


def _fill_row(row: torch.Tensor, words: npt.NDArray[np.uint64], domain: int, low: float, high: float) -> None:
    counter = np.array([0, 0, 0, domain], np.uint64)  # numpy adds one before it makes the first block
    generator = np.random.Generator(np.random.Philox(key=words, counter=counter))
    draw: Any = generator.standard_normal if domain == _NORMAL else generator.random
    narrow = row.dtype in (torch.bfloat16, torch.float16)
    scratch = torch.empty(min(_CHUNK, len(row)), dtype=torch.float32, device="cpu") if narrow else row[:0]
    for piece in row.split(_CHUNK):
        numbers = scratch[: len(piece)] if narrow else piece
        array = numbers.numpy()
        draw(out=array, dtype=array.dtype)
        if (low, high) != (0.0, 1.0):
            array *= high - low
            array += low
            np.minimum(array, np.nextafter(array.dtype.type(high), array.dtype.type(-np.inf)), out=array)
        if narrow:
            piece.copy_(numbers)
            if domain == _UNIFORM:
                _step_below(piece, numbers)


def _step_below(rounded: torch.Tensor, exact: torch.Tensor) -> None:
    """Steps each 16-bit number that rounding put above its exact value to the next one below, in place."""
    bits = rounded.view(torch.int16)
    bits += (rounded.float() > exact) * torch.where(bits < 0, 1, -1)  # sign and magnitude
