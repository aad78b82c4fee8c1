"""Stochastic rounding: float32 to bfloat16, up or down at random, so that the error is 0 on average.

Formula. bfloat16 is the upper half of float32: 16 random bits are added to the lower half, which is then cut off. The
bits are murmur3's 32-bit finaliser of the element's own bits, keyed by the seed before each multiplication:

    h <- bits ^ key1;  h <- (h ^ h >> 16) * 0x85ebca6b;  h <- h ^ key2;  h <- (h ^ h >> 13) * 0xc2b2ae35;  h >> 16

with the two halves of splitmix64's finaliser of the seed as keys: the definition of the op `fzero::stochastic_round`,
bit for bit, in the interpreter and on every GPU. Exact numbers, zeros and infinities stay; a NaN becomes 0x7FC0. A
finite number above bfloat16's largest becomes the largest.

Byte floor: 4 read and 2 written an element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.kernels._triton import check, exact, jit, tl

BLOCK = 1024


# ---- reference -------------------------------------------------------------------------------------------------------


def stochastic_round_reference(x: Tensor, seed: int) -> Tensor:
    """The same in int64 arithmetic of plain torch, of any shape.

    >>> stochastic_round_reference(torch.tensor([0.5, -1.0]), 3)
    tensor([ 0.5000, -1.0000], dtype=torch.bfloat16)
    """
    z = seed % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 31) * 0xBF58476D1CE4E5B9 % 2**64
    bits = x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    h = bits ^ z >> 32
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = h ^ z % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    size = bits & 0x7FFFFFFF
    up = torch.where(size >= 0x7F7F0000, 0, h >> 16)
    upper = torch.where(size > 0x7F800000, 0x7FC0, bits + up >> 16)
    return upper.to(torch.int16).view(torch.bfloat16)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@jit
def seed_keys(seed):  # type: ignore[no-untyped-def]
    """Two uint32 keys of an int64 seed."""
    z = seed.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 31)) * 0xBF58476D1CE4E5B9
    return (z >> 32).to(tl.uint32), z.to(tl.uint32)


@jit
def stochastic(x, key1, key2):  # type: ignore[no-untyped-def]
    """fp32 to bf16, rounded by two uint32 keys."""
    bits = x.to(tl.uint32, bitcast=True)
    h = bits ^ key1
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = h ^ key2
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    size = bits & 0x7FFFFFFF
    up = tl.where(size >= 0x7F7F0000, 0, h >> 16)
    whole = tl.where(size > 0x7F800000, 0x7FC00000, bits + up)
    return (whole >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def _round_kernel(out, x, seed, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    key1, key2 = seed_keys(tl.load(seed))
    tl.store(out + index, stochastic(tl.load(x + index, inside, 0.0), key1, key2), inside)


# ---- launchers -------------------------------------------------------------------------------------------------------


def stochastic_round(x: Tensor, seed: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x` (float32, contiguous, any shape) in bfloat16, by a 0-d int64 `seed`; into `out` if given."""
    out = torch.empty_like(x, dtype=torch.bfloat16) if out is None else out
    check("stochastic_round", "x", x, x, (torch.float32,), x.numel())
    check("stochastic_round", "seed", seed, seed, (torch.int64,), 1)
    check("stochastic_round", "out", out, x, (torch.bfloat16,), x.numel())
    if x.numel():
        exact(_round_kernel, -(-x.numel() // BLOCK), x.device, out, x, seed.to(x.device), x.numel(), BLOCK=BLOCK)
    return out
