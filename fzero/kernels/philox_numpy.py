"""philox_numpy: one Philox block in numpy: the reference of `philox`, and the derivation of keys on CPU. See there."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]

# The constants of the paper, by word width: multipliers (M0, M1) and key increments (W0, W1).
CONSTANTS = {
    np.dtype(np.uint32): ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
    np.dtype(np.uint64): ((0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)),
}


def philox_reference(counter: Words, key: Words) -> Words:
    """One Philox block per column: counter (4, n) and key (2, n) to random words (4, n), in numpy.

    All three are uint32 (Philox4x32-10) or all uint64 (Philox4x64-10); the dtype decides. On CPU this is the reference,
    and derives children of many keys. So it keeps the two multiplications of a round in one array: about 150
    microseconds for one block, 700 for 10,000. Of one key numpy's own generator takes 9 (`fzero.random._draw_ops`).

    >>> [hex(word) for word in philox_reference(np.zeros((4, 1), np.uint32), np.zeros((2, 1), np.uint32))[:, 0]]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    multipliers, increments = (np.array(pair, counter.dtype)[:, None] for pair in CONSTANTS[counter.dtype])
    even, odd = counter[0::2], counter[1::2]
    for _ in range(10):
        high, low = _wide_product(even, multipliers)
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key = key + increments
    return np.stack([even[0], odd[0], even[1], odd[1]])


def _wide_product(a: Words, b: Words) -> tuple[Words, Words]:
    """The high and the low word of a * b."""
    if a.dtype == np.uint32:
        wide = a.astype(np.uint64) * b
        return (wide >> 32).astype(np.uint32), wide.astype(np.uint32)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    upper = a_high * b_low + (a_low * b_low >> half)  # each sum below fits: (2**32 - 1)**2 + 2 * (2**32 - 1) < 2**64
    middle = a_low * b_high + (upper & mask)
    return a_high * b_high + (upper >> half) + (middle >> half), a * b
