"""tensor_cores: the seconds of a 16-bit matrix product on a device with tensor cores, by shape and alignment.

A library cuts the result into tiles of `rows` x `columns`. Each multiprocessor computes one tile at a time, so all of
them together need ceil(tiles / processors) *waves*, and the last one may be nearly empty. A tile takes 2 rows columns
(k + 128) operations at its share of the device's rate: its start and its end are worth 128 of k. Where there are few
tiles, k may be split: each tile is then computed in parts, which are added up through memory. The fastest way is taken,
as cuBLAS's heuristics try to. No product takes less than the bytes of its operands and its result.

The tensor cores ask for m, n and k in multiples of 16 bytes (cuBLAS's manual). A product without them runs at
`unaligned`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

ALIGNED_BYTES = 16
TILES = (  # rows, columns, the part of the rate that such a tile reaches
    (128, 256, 1.0), (256, 128, 1.0), (128, 192, 0.95), (192, 128, 0.95), (128, 128, 0.87), (64, 256, 0.80),
)  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8)
LEAST_K = 512  # of a part, where k is split
ENDS = 128  # of k, which the start and the end of a tile are worth


class Product(NamedTuple):
    """`batch` products of m x k with k x n, of elements of `itemsize` bytes."""

    batch: int
    m: int
    n: int
    k: int
    itemsize: int

    @property
    def aligned(self) -> bool:
        """Whether m, n and k are multiples of 16 bytes.

        >>> Product(1, 8192, 50257, 1280, 2).aligned, Product(1, 8192, 50304, 1280, 2).aligned
        (False, True)
        """
        return all(side * self.itemsize % ALIGNED_BYTES == 0 for side in (self.m, self.n, self.k))

    @property
    def flops(self) -> int:
        """Operations: 2 m n k for each."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def nbytes(self) -> int:
        """Bytes of operands and result."""
        return self.batch * self.itemsize * (self.m * self.k + self.k * self.n + self.m * self.n)

    def __str__(self) -> str:
        times = f"{self.batch} x " if self.batch > 1 else ""
        return f"{times}({self.m}, {self.k}) @ ({self.k}, {self.n})"


@dataclass(frozen=True)
class TensorCores:
    """The units of a device that multiply matrices in 16 bits.

    flops: operations a second with all of them busy. processors: how many work on tiles. unaligned: operations a second
    of a product whose m, n or k is no multiple of 16 bytes.
    """

    flops: float
    processors: int
    unaligned: float

    def seconds(self, product: Product, memory_bytes: float) -> float:
        """The seconds of a product on a device that moves `memory_bytes` a second.

        >>> h100 = TensorCores(flops=798e12, processors=132, unaligned=120e12)
        >>> up = Product(1, 8192, 5120, 1280, 2)
        >>> round(up.flops / h100.seconds(up, 3e12) / 1e12)  # 703 of 798: 640 tiles are 4.8 waves
        703
        """
        if not product.aligned:
            return product.flops / self.unaligned
        ways = (self._tiled(product, tile, parts, memory_bytes) for tile in TILES for parts in SPLITS)
        return max(min(ways), product.nbytes / memory_bytes)

    def _tiled(self, product: Product, tile: tuple[int, int, float], parts: int, memory_bytes: float) -> float:
        rows, columns, reached = tile
        if parts > 1 and product.k // parts < LEAST_K:
            return math.inf
        tiles = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns) * parts
        waves = math.ceil(tiles / self.processors)
        work = waves * self.processors * 2 * rows * columns * (product.k / parts + ENDS)
        added = 4 * parts * product.batch * product.m * product.n / memory_bytes if parts > 1 else 0.0  # fp32
        return work / (self.flops * reached) + added
