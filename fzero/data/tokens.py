"""data: batches as a function of a position, so that a run that stops loses no sample and repeats none.

A sample is `sequence` tokens and the one after them. The sample at position p depends on (seed, p) alone. So the whole
state of a stream is one integer, the number of samples handed out so far, for any batch size and world:

    order="shuffled"   position p is sample permute(p mod n) of epoch p div n: the file cut into n windows, each once an
                       epoch. The permutation is a function: a Feistel network over the next power of two, applied again
                       while it lands outside of n (fewer than two times on average). So no list of n is made or kept.
    order="random"     a window at any place, by a hash of the position: drawn with repeats.
    order="sequential" the windows as they lie, again and again.

Tokens are memory-mapped: a batch reads its own pages. Arithmetic is integers modulo 2**64, so the order is the same on
every machine and with every version of numpy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fzero.errors import DataError
from fzero.ir.mesh import Mesh

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
ORDERS = ("shuffled", "random", "sequential")
ROUNDS = 8
_MASK = (1 << 64) - 1

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, init=False)
class Tokens:
    """Sequences from one long 1-D array of tokens: `x`, and `y` one token further.

    path: a .npy file, a file of raw little-endian integers (then `dtype` says which: uint8, uint16, uint32, int32 or
    int64), or an array or tensor in memory. sequence: tokens per sample. Raises DataError for a file that is not that,
    or is too short for one sample.

    >>> tokens = Tokens(np.arange(100, dtype=np.uint16), sequence=8, seed=1)
    >>> tokens.samples
    12
    >>> batch = tokens.batch(0, size=4)
    >>> batch["x"].shape, batch["x"].dtype, torch.equal(batch["y"], batch["x"] + 1)
    (torch.Size([4, 8]), torch.int64, True)

    Rank 1 of 2 takes the second half, and two small batches are one large one:

    >>> torch.equal(tokens.batch(0, size=4, rank=1, world_size=2)["x"], batch["x"][2:])
    True
    >>> torch.equal(torch.cat([tokens.batch(p, size=2)["x"] for p in (0, 2)]), batch["x"])
    True
    """

    array: Any = field(repr=False)
    sequence: int
    order: str
    seed: int
    source: str

    def __init__(
        self,
        path: str | os.PathLike[str] | np.ndarray[Any, Any] | torch.Tensor,
        *,
        sequence: int,
        order: str = "shuffled",
        seed: int = 0,
        dtype: str | None = None,
    ) -> None:
        """Opens the tokens, and checks the arguments. Raises DataError."""
        if order not in ORDERS:
            raise DataError(f"Tokens(order={order!r}): needed one of {', '.join(ORDERS)}")
        if type(seed) is not int or not 0 <= seed < 1 << 64:
            raise DataError(f"Tokens(seed={seed!r}): needed an int in [0, 2**64). Write seed % 2**64")
        _positive("Tokens", sequence=sequence)
        array, source = _opened(path, dtype)
        if len(array) <= sequence:
            raise DataError(
                f"{source} holds {len(array)} tokens, and one sample of sequence={sequence} needs {sequence + 1}: give "
                "more tokens or a shorter sequence"
            )
        values = {"array": array, "sequence": sequence, "order": order, "seed": seed, "source": source}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def samples(self) -> int:
        """Samples per epoch: windows that share no target. A remainder that is too short for one is dropped."""
        return (len(self.array) - 1) // self.sequence

    def starts(self, position: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where in the array the samples at `position` .. `position + size` begin: int64 of shape (size,)."""
        if type(position) is not int or position < 0 or position + size >= 1 << 63:
            raise DataError(f"position={position!r}: needed the number of samples so far, an int of at least 0")
        positions = np.arange(position, position + size, dtype=np.uint64)
        if self.order == "random":
            drawn = _mix(positions + _number(_mixed(self.seed)))
            return (drawn % _number(len(self.array) - self.sequence)).astype(np.int64)
        return samples_at(position, size, self.samples, self.order, self.seed) * self.sequence

    def batch(self, position: int, *, size: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Returns `x` and `y`, int64 of shape (size / world_size, sequence): the rank's part of `size` samples at
        `position`.

        Raises DataError if `size` is not a multiple of `world_size`.
        """
        part = _part(size, rank, world_size)
        starts = self.starts(position + rank * part, part)
        spans = self.array[starts[:, None] + np.arange(self.sequence + 1)].astype(np.int64)
        whole = torch.from_numpy(spans)
        return {"x": whole[:, :-1].contiguous(), "y": whole[:, 1:].contiguous()}

    def batches(
        self,
        size: int,
        *,
        position: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Mapping[str, int] | None = None,
    ) -> Batches:
        """Endless batches of `size` samples over all ranks, starting at `position`; each rank gets its shard.

        rank, world_size: by default those of the process group, or of torchrun before there is one. mesh: as in
        `Spec(mesh=...)`; ranks that differ only in `pp` or `tp` get the same shard.

        >>> tokens = Tokens(np.arange(100), sequence=8)
        >>> first = tokens.batches(6)
        >>> _ = next(first), next(first)
        >>> first.position
        12
        >>> again = tokens.batches(4, position=first.position)  # another batch size: nothing is lost or repeated
        >>> torch.equal(next(again)["x"], tokens.batch(12, size=4)["x"])
        True
        >>> [tokens.batches(6, rank=rank, world_size=4, mesh={"pp": 2, "dp": 2}).rank for rank in range(4)]
        [0, 1, 0, 1]
        """
        rank, world_size = place(rank, world_size, mesh)
        _part(size, rank, world_size)
        if type(position) is not int or position < 0:
            raise DataError(f"position={position!r}: needed the number of samples so far, an int of at least 0")
        return Batches(self, size, position, rank, world_size)


@dataclass
class Batches(Iterator[Batch]):
    """An endless iterator. `position`, the number of samples returned so far over all ranks, is its only state."""

    tokens: Tokens
    size: int
    position: int
    rank: int
    world_size: int

    def __next__(self) -> Batch:
        batch = self.tokens.batch(self.position, size=self.size, rank=self.rank, world_size=self.world_size)
        self.position += self.size
        return batch


def samples_at(position: int, size: int, samples: int, order: str, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The samples at `position` .. `position + size` of endless epochs of `samples` each: int64 of shape (size,).

    order: "shuffled", each epoch in an order of its own, or "sequential".
    """
    positions = np.arange(position, position + size, dtype=np.uint64)
    epochs, index = np.divmod(positions, _number(samples))
    if order == "shuffled":
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            index[in_epoch] = permute(index[in_epoch], samples, _mixed(seed ^ _mixed(int(epoch))))
    return index.astype(np.int64)


def place(rank: int | None, world_size: int | None, mesh: Mapping[str, int] | None) -> tuple[int, int]:
    """(rank, ranks) that rows are divided by: those of the process group or torchrun, or those given; with a mesh its
    data ranks."""
    here = _here()
    rank, world_size = here[0] if rank is None else rank, here[1] if world_size is None else world_size
    if mesh is None:
        return rank, world_size
    grid = Mesh.of(mesh, world_size)
    return grid.data_rank(rank), grid.data_ranks


def permute(index: np.ndarray[Any, np.dtype[np.uint64]], n: int, key: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Where a permutation of range(n) takes each index.

    index: uint64, below n. n: the length. key: of the permutation.

    >>> sorted(permute(np.arange(10, dtype=np.uint64), 10, key=3).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    bits = (n - 1).bit_length()
    low = bits // 2
    widths = (_number((1 << (bits - low)) - 1), _number((1 << low) - 1))
    keys = [_number(_mixed(key + i)) for i in range(ROUNDS)]
    images = index.copy()
    outside = np.ones(len(images), dtype=bool)
    while outside.any():
        left, right = images[outside] >> _number(low), images[outside] & widths[1]
        for i in range(0, ROUNDS, 2):
            left ^= _mix(right + keys[i]) & widths[0]
            right ^= _mix(left + keys[i + 1]) & widths[1]
        images[outside] = left << _number(low) | right
        outside = images >= _number(n)
    return images


def _mix(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), after its step."""
    x = x + _number(0x9E3779B97F4A7C15)
    x = (x ^ x >> _number(30)) * _number(0xBF58476D1CE4E5B9)
    x = (x ^ x >> _number(27)) * _number(0x94D049BB133111EB)
    return x ^ x >> _number(31)


def _mixed(x: int) -> int:
    return int(_mix(np.array([x & _MASK], dtype=np.uint64))[0])


def _number(x: int) -> np.uint64:
    return np.uint64(x)


def _opened(source: Any, dtype: str | None) -> tuple[Any, str]:
    """The array, memory-mapped if it is a file, and its name in messages."""
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu().numpy()
    if isinstance(source, np.ndarray):
        if dtype is not None and source.dtype != dtype:
            raise DataError(f"Tokens(dtype={dtype!r}): the array holds {source.dtype}: leave dtype out, or convert it")
        return _checked(source, "the array"), "the array"
    if not isinstance(source, str | os.PathLike):
        raise DataError(f"Tokens: {type(source).__name__}: needed a file's path, an array or a tensor: torch.tensor(x)")
    path = Path(source)
    if dtype is not None and dtype not in DTYPES:
        raise DataError(f"Tokens(dtype={dtype!r}): needed one of {', '.join(DTYPES)}")
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if dtype is not None and array.dtype != dtype:
                raise DataError(f"{path} holds {array.dtype}, as its header says, not {dtype}: leave dtype out")
            return _checked(array, str(path)), str(path)
        if dtype is None:
            raise DataError(f"{path} does not say what its tokens are: give Tokens(dtype='uint16'), or a .npy file")
        size, item_bytes = path.stat().st_size, np.dtype(dtype).itemsize
        if size % item_bytes or not size:
            raise DataError(f"{path} has {size} bytes, no whole number of {dtype} ({item_bytes} bytes each) above 0")
        return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r"), str(path)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as tokens: {error}") from error


def _checked(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    if array.ndim != 1 or array.dtype.name not in DTYPES:
        raise DataError(
            f"{name} is {array.dtype} of shape {list(array.shape)}: needed one dimension of {', '.join(DTYPES)}"
        )
    return array


def _part(size: int, rank: int, world_size: int) -> int:
    """Samples of a batch of `size` that one rank takes."""
    _positive("a batch", size=size, world_size=world_size)
    if type(rank) is not int or not 0 <= rank < world_size:
        raise DataError(f"rank={rank!r}: needed an int in [0, {world_size})")
    if size % world_size:
        raise DataError(f"a batch of size={size} cannot be cut for {world_size} ranks: needed a multiple of them")
    return size // world_size


def _positive(label: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            raise DataError(f"{label}: {name}={number!r}: needed a positive int")


def _here() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1
