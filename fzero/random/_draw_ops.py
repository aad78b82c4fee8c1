"""The ops behind `fzero.random`: a name, a shape rule and a vmap rule for torch, and the computation.

Below the public functions a key may carry leading batch dimensions, (*B, 2); a result has the same leading dimensions.
So a vmap rule only moves the mapped dimension to the front, and nesting needs nothing more.

Memory: the result and, for 16-bit types and bits on CPU, under 2 MiB of scratch.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fzero import backend
from fzero.kernels.philox_numpy import philox_reference
from fzero.random import _key_rules

# The last word of the counter. These values are part of a key's meaning: never change one, only add.
_SPLIT, _FOLD, _UNIFORM, _NORMAL, _BITS = 1, 2, 3, 4, 5

SHORT = 256  # numbers: below, a stretch by itself costs more than all numbers around it
FEW = 16  # keys: above, children of all of them at once take less time than a generator for each
_CHUNK = 1 << 16  # numbers made at once on CPU, few enough for the second-level cache; changes no number


def _op(name: str, schema: str) -> Callable[[Callable[..., torch.Tensor]], Any]:
    return torch.library.custom_op(
        f"fzero::{name}", mutates_args=(), device_types=tuple(backend.BACKENDS), schema=schema
    )


@_op("random_split", "(Tensor key, SymInt num) -> Tensor")
def split(key: torch.Tensor, num: int) -> torch.Tensor:
    """Keys (*B, num, 2) made of keys (*B, 2)."""
    return _derived(key, num, None, _SPLIT)


@_op("random_fold_in", "(Tensor key, SymInt data) -> Tensor")
def fold_in(key: torch.Tensor, data: int) -> torch.Tensor:
    """Keys (*B, 2) made of keys (*B, 2) and one number."""
    return _derived(key, 1, key.new_full(key.shape[:-1], data), _FOLD).squeeze(-2)


@_op("random_fold_in_tensor", "(Tensor key, Tensor data) -> Tensor")
def fold_in_tensor(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Keys made of keys (*B, 2) and an integer tensor whose shape broadcasts with B."""
    batch = torch.broadcast_shapes(key.shape[:-1], data.shape)
    data = data.to(torch.int64).expand(batch)
    return _derived(key.expand(*batch, 2), 1, data, _FOLD).squeeze(-2)


@_op("uniform", "(Tensor key, SymInt[] shape, ScalarType dtype, float low, float high) -> Tensor")
def uniform(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    """Numbers (*B, *shape) over [low, high) of `dtype`."""
    return _filled(key, shape, dtype, _UNIFORM, *_key_rules.bounds(dtype, low, high))


@_op(
    "uniform_part",
    "(Tensor key, SymInt[] shape, ScalarType dtype, float low, float high, Tensor rank, int n, int dim) -> Tensor",
)
def uniform_part(
    key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, low: float, high: float, rank: torch.Tensor, n: int,
    dim: int,
) -> torch.Tensor:  # fmt: skip
    """Of `uniform` for one key (2,), part `rank` (0-d) of n parts of a dim: the same numbers, drawn alone.

    On CPU only the part is drawn, unless it lies in stretches of under SHORT numbers; else all, and the part is kept.
    """
    whole = math.prod(shape[dim:])
    run, count = whole // n, math.prod(shape[:dim])
    part = [*shape[:dim], shape[dim] // n, *shape[dim + 1 :]]
    if backend.of(key.device).has_kernels or run < SHORT:
        drawn = uniform(key, shape, dtype, low, high).unflatten(dim, (n, shape[dim] // n))
        return drawn.index_select(dim, rank.reshape(1)).reshape(part)
    rows, place = key.new_empty((count, run), dtype=dtype), int(rank)
    words, bounds = _words(key.reshape(1, 2).contiguous())[0], _key_rules.bounds(dtype, low, high)
    for i, row in enumerate(rows):
        _fill_row(row, words, _UNIFORM, *bounds, first=i * whole + place * run)
    return rows.view(part)


@_op("normal", "(Tensor key, SymInt[] shape, ScalarType dtype) -> Tensor")
def normal(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers (*B, *shape) of `dtype`."""
    return _filled(key, shape, dtype, _NORMAL)


@_op("random_bits", "(Tensor key, SymInt[] shape) -> Tensor")
def bits(key: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Random 64-bit integers (*B, *shape), int64."""
    return _raw(key, shape)


@split.register_fake
def _(key: torch.Tensor, num: int) -> torch.Tensor:
    return key.new_empty((*key.shape[:-1], num, 2))


@fold_in.register_fake
def _(key: torch.Tensor, data: int) -> torch.Tensor:
    return key.new_empty(key.shape)


@fold_in_tensor.register_fake
def _(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return key.new_empty((*torch.broadcast_shapes(key.shape[:-1], data.shape), 2))


@uniform.register_fake
def _(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    _key_rules.bounds(dtype, low, high)
    return key.new_empty((*key.shape[:-1], *shape), dtype=dtype)


@uniform_part.register_fake
def _(
    key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, low: float, high: float, rank: torch.Tensor, n: int,
    dim: int,
) -> torch.Tensor:  # fmt: skip
    return key.new_empty((*shape[:dim], shape[dim] // n, *shape[dim + 1 :]), dtype=dtype)


@normal.register_fake
def _(key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return key.new_empty((*key.shape[:-1], *shape), dtype=dtype)


@bits.register_fake
def _(key: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return key.new_empty((*key.shape[:-1], *shape))


def _map_over_keys(op: Any, info: Any, in_dims: Sequence[Any], key: torch.Tensor, *rest: Any) -> tuple[Any, int]:
    return op(key.movedim(in_dims[0], 0), *rest), 0


for _each in (split, fold_in, uniform, normal, bits):
    _each.register_vmap(functools.partial(_map_over_keys, _each))


@fold_in_tensor.register_vmap
def _(info: Any, in_dims: Sequence[int | None], key: torch.Tensor, data: torch.Tensor) -> tuple[torch.Tensor, int]:
    # Every rule adds one dimension in front of both, so under nested vmaps they still line up to be broadcast.
    key, data = (
        value.unsqueeze(0) if dim is None else value.movedim(dim, 0)
        for value, dim in zip((key, data), in_dims, strict=True)
    )
    return fold_in_tensor(key, data), 0


# ---- computation -----------------------------------------------------------------------------------------------------


def _derived(key: torch.Tensor, num: int, data: torch.Tensor | None, domain: int) -> torch.Tensor:
    """Keys (*B, 2) and data (*B) to children (*B, num, 2)."""
    keys = key.reshape(-1, 2).contiguous()
    out = keys.new_empty((len(keys), num, 2))
    data = None if data is None else data.reshape(-1).contiguous()
    if backend.of(key.device).has_kernels:
        _kernels().derive(out, keys, data, domain=domain)
    elif len(keys) <= FEW:
        seconds = [0] * len(keys) if data is None else data.tolist()
        for row, words, second in zip(out, _words(keys), seconds, strict=True):
            _fill_blocks(row, words, domain, second)
    else:
        counter = np.zeros((4, len(keys), num), np.uint64)
        counter[0] = np.arange(1, num + 1)
        counter[1] = 0 if data is None else data.numpy().view(np.uint64)[:, None]
        counter[3] = domain
        words = philox_reference(counter.reshape(4, -1), np.repeat(_words(keys).T, num, axis=1))
        out.view(-1, 2).numpy()[:] = words[:2].view(np.int64).T
    return out.view((*key.shape[:-1], num, 2))


def _raw(key: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Keys (*B, 2) to int64 bits (*B, *shape): words 0 and 1 of the blocks (1..., 0, 0, BITS), one after the other."""
    keys = key.reshape(-1, 2).contiguous()
    size = math.prod(shape)
    rows = keys.new_empty((len(keys), -(-size // 2), 2))
    if backend.of(key.device).has_kernels:
        _kernels().derive(rows, keys, None, domain=_BITS)
    else:
        for row, words in zip(rows, _words(keys), strict=True):
            _fill_blocks(row, words, _BITS)
    return rows.view(len(keys), -1)[:, :size].reshape((*key.shape[:-1], *shape)).contiguous()


def _fill_blocks(row: torch.Tensor, words: npt.NDArray[np.uint64], domain: int, second: int = 0) -> None:
    """Writes words 0 and 1 of the blocks (1..., second, 0, domain) of one key into the rows of (n, 2) CPU memory."""
    counter = np.array([0, second % (1 << 64), 0, domain], np.uint64)  # numpy adds one before it makes the first block
    generator = np.random.Philox(key=words, counter=counter)
    for piece in row.split(_CHUNK // 4):
        piece.numpy()[:] = generator.random_raw(4 * len(piece)).reshape(-1, 4)[:, :2].view(np.int64)


def _kernels() -> Any:
    """`fzero.kernels.philox`, which needs Triton: imported at its first use."""
    return importlib.import_module("fzero.kernels.philox")


def _words(keys: torch.Tensor) -> npt.NDArray[np.uint64]:
    return keys.numpy().view(np.uint64)


def _filled(
    key: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, domain: int, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    """Keys (*B, 2) to numbers (*B, *shape)."""
    keys = key.reshape(-1, 2).contiguous()
    rows = keys.new_empty((len(keys), math.prod(shape)), dtype=dtype)
    if backend.of(key.device).has_kernels:
        _kernels().fill(rows, keys, normal=domain == _NORMAL, low=low, high=high)
    else:
        for row, words in zip(rows, _words(keys), strict=True):
            _fill_row(row, words, domain, low, high)
    return rows.view((*key.shape[:-1], *shape))


def _fill_row(
    row: torch.Tensor, words: npt.NDArray[np.uint64], domain: int, low: float, high: float, first: int = 0
) -> None:
    """Writes the numbers of one key into a row of CPU memory, chunk by chunk; uniform ones from number `first` on."""
    of_block = 4 if row.dtype is torch.float64 else 8  # uniform numbers made of one block
    counter = np.array([first // of_block, 0, 0, domain], np.uint64)  # numpy adds one before it makes the first block
    generator = np.random.Generator(np.random.Philox(key=words, counter=counter))
    draw: Any = generator.standard_normal if domain == _NORMAL else generator.random
    draw(first % of_block, dtype=np.float64 if row.dtype is torch.float64 else np.float32)
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
