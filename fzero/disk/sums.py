"""sums: a checksum of each unit of a file, kept in memory.

The sum of a unit's 512 integers of 64 bits, each times an odd weight of its place, modulo 2**64. A change within eight
bytes always changes it. Zeros, what a write never reached, and what lies at another place do too, but for a chance of
about 2**-63. It is no hash: whoever means to deceive it can.

Cost: 8 bytes of memory for 4,096 of the file; 16 GB/s on one core here, where numpy's plain sum has 20 and crc32 3.6.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

UNIT = 4096  # bytes: every range of a file begins at a multiple of this
_draw = random.Random(0)
_WEIGHTS = np.array([_draw.getrandbits(64) | 1 for _ in range(UNIT // 8)], np.uint64).view(np.int64)


class Sums:
    """The sums of a file's units. A fresh file is zeros, and so are its sums.

    `keep` and `grow` alone write `values`. Threads may call the others at one time, on ranges that are apart.
    """

    def __init__(self, nbytes: int) -> None:
        self.values = np.zeros(nbytes // UNIT, np.int64)

    def grow(self, nbytes: int) -> None:
        """Adds the sums of zeros up to byte `nbytes`. No other method may run."""
        self.values = np.concatenate([self.values, np.zeros(nbytes // UNIT - len(self.values), np.int64)])

    def keep(self, offset: int, sums: NDArray[np.int64]) -> None:
        """Stores the sums of the units from byte `offset` on."""
        self.values[offset // UNIT : offset // UNIT + len(sums)] = sums

    def wrong(self, offset: int, data: NDArray[np.uint8]) -> list[int]:
        """Returns the bytes of the file at which units begin whose sums are not those of `data`, which was read from
        byte `offset` on."""
        sums = sums_of(data)
        first = offset // UNIT
        return [offset + UNIT * int(n) for n in np.flatnonzero(sums != self.values[first : first + len(sums)])]


def sums_of(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Returns the sum of each unit of `data`, whose length is a multiple of UNIT.

    >>> one, other = sums_of(np.ones(8192, np.uint8)).tolist()
    >>> one == other, sums_of(np.zeros(4096, np.uint8)).tolist()
    (True, [0])
    """
    return np.einsum("uw,w->u", data.view(np.int64).reshape(-1, UNIT // 8), _WEIGHTS)
