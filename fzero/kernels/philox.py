"""Philox: random bits as a pure function of (counter, key), so that a GPU needs no generator state.

Formula. One block maps four counter words and two key words to four random words in ten rounds of

    (c0, c1, c2, c3) <- (hi(M1*c2) ^ c1 ^ k0,  lo(M1*c2),  hi(M0*c0) ^ c3 ^ k1,  lo(M0*c0));   (k0, k1) += (W0, W1)

where `hi` and `lo` are the halves of the double-width product (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as
easy as 1, 2, 3", SC 2011). The word is 32 or 64 bits wide: Philox4x32-10 or Philox4x64-10. Here

- `derive` makes keys out of keys with Philox4x64-10. Its bits equal `philox_reference` on every backend, for a key must
  mean the same thing wherever it is used. Child j is words 0 and 1 of the block with counter (j + 1, data, 0, domain).
- `fill` makes uniform or normal numbers with Philox4x32-10, half as much work per number on a GPU as the 64-bit form.
  For a key (a, b) and a group of four words g, the counter is (lo g, hi g + stream * 2**31, lo b, hi b) and the key
  (lo a, hi a): all 128 bits of the key and all of g enter, so two keys never meet. `stream` is 0 for uniform and 1 for
  normal. Element e takes word e % 4 of group e // 4 (float64: two words each, group e // 2), so any slice of a stream
  can be made alone: `offset` is the element to start at.

    uniform  u = (word >> 8) * 2**-24                          float64: 53 bits of two words
    normal   r = sqrt(-2 ln u1), (r cos t, r sin t)            Box-Muller, u1 = (word + 1/2) * 2**-32, t = 2 pi u2

Cost: one pass over the output and nothing else; the keys are read on the device, so nothing synchronises. Threads hold
four neighbours, which go out as one store where `size` and `offset` are multiples of 16. 16-bit outputs are computed in
float32; a uniform is then rounded down, so that it stays below its bound.

Given up: these bulk numbers are not numpy's (whose normals are a ziggurat, which is slow on a GPU). In float32,
|normal| <= 6.77, which one draw in 7e10 would exceed.
"""

from __future__ import annotations

import numpy as np
import torch

from fzero.kernels._triton import jit, launch, tl
from fzero.kernels.philox_numpy import Words, philox_reference

# ---- reference -------------------------------------------------------------------------------------------------------


def fill_reference(keys: Words, size: int, *, normal: bool, double: bool = False, offset: int = 0) -> Words:
    """The numbers of `fill` for keys (n, 2) int64: (n, size) float64, before they are scaled and rounded to the output.

    >>> fill_reference(np.array([[0, 0]]), 8, normal=False).shape
    (1, 8)
    """
    per = 2 if double else 4
    group = np.arange(offset // per, -(-(offset + size) // per), dtype=np.uint64)
    rows = []
    for a, b in keys.astype(np.int64).view(np.uint64):
        halves = [
            group,
            (group >> np.uint64(32)) | np.uint64(normal << 31),
            b,
            b >> np.uint64(32),
            a,
            a >> np.uint64(32),
        ]
        words = np.stack([np.broadcast_to(half.astype(np.uint32), group.shape) for half in halves])
        rows.append(_numbers_reference(philox_reference(words[:4], words[4:]), normal, double))
    return np.stack(rows)[:, offset % per :][:, :size]


def _numbers_reference(words: Words, normal: bool, double: bool) -> Words:
    """Random words (4, g) to the numbers of one stream in order, in float64."""
    words = words.astype(np.uint64)
    if double:
        bits = (words[0::2] >> 5 << 26) + (words[1::2] >> 6)
        radius_bits, angle = bits[:1] * 2.0**-53 + 2.0**-54, bits[1:] * 2.0**-53
    else:
        bits = words >> 8
        radius_bits, angle = words[0::2] * 2.0**-32 + 2.0**-33, words[1::2] * 2.0**-32
    if not normal:
        return (bits * (2.0**-53 if double else 2.0**-24)).T.reshape(-1)
    radius, turn = np.sqrt(-2 * np.log(radius_bits)), 2 * np.pi * angle
    return np.stack([radius * np.cos(turn), radius * np.sin(turn)], axis=1).reshape(len(bits), -1).T.reshape(-1)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@jit
def _philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Four random words of a block: counter words c0 to c3, key words k0 and k1, all of one width."""
    for _ in tl.static_range(10):
        if c0.dtype == tl.uint32:
            high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
            high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
            next0, next1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
        else:
            high0, low0 = tl.umulhi(c0, 0xD2E7470EE14C6C93), c0 * 0xD2E7470EE14C6C93
            high1, low1 = tl.umulhi(c2, 0xCA5A826395121157), c2 * 0xCA5A826395121157
            next0, next1 = k0 + 0x9E3779B97F4A7C15, k1 + 0xBB67AE8584CAA73B
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = next0, next1
    return c0, c1, c2, c3


@jit
def _derive_kernel(out_ptr, keys_ptr, data_ptr, total, num, domain, HAS_DATA: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes BLOCK child keys."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < total
    row = index // num
    zero = tl.zeros((BLOCK,), tl.uint64)
    data = zero
    if HAS_DATA:
        data = tl.load(data_ptr + row, mask).to(tl.uint64)
    k0 = tl.load(keys_ptr + 2 * row, mask).to(tl.uint64)
    k1 = tl.load(keys_ptr + 2 * row + 1, mask).to(tl.uint64)
    word0, word1, _, _ = _philox((index % num + 1).to(tl.uint64), data, zero, zero + domain, k0, k1)
    tl.store(out_ptr + 2 * index, word0.to(tl.int64), mask)
    tl.store(out_ptr + 2 * index + 1, word1.to(tl.int64), mask)


@jit
def _box_muller(radius_bits, angle):  # type: ignore[no-untyped-def]
    # A fast logarithm may come out a hair above zero next to one, and the root of that would be NaN.
    radius = tl.sqrt(tl.maximum(-2.0 * tl.log(radius_bits), 0.0))
    turn = 6.283185307179586 * angle
    return radius * tl.cos(turn), radius * tl.sin(turn)


@jit
def _double_from(high, low):  # type: ignore[no-untyped-def]
    return (high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)  # 53 bits


@jit
def _round_down(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    y = x.to(dtype)
    if dtype.primitive_bitwidth == 16:
        bits = y.to(tl.int16, bitcast=True)
        below = tl.where(bits < 0, bits + 1, bits - 1)  # sign and magnitude: the next value below
        y = tl.where(y.to(tl.float32) > x, below, bits).to(tl.int16).to(dtype, bitcast=True)
    return y


@jit
def _fill_kernel(  # type: ignore[no-untyped-def]
    out_ptr, keys_ptr, size, offset, blocks_per_key, low, scale, top, NORMAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the numbers of BLOCK groups of one key."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    double: tl.constexpr = dtype == tl.float64
    per_group: tl.constexpr = 2 if double else 4
    row = tl.program_id(0).to(tl.int64) // blocks_per_key
    first = offset // per_group + tl.program_id(0).to(tl.int64) % blocks_per_key * BLOCK
    group = first + tl.arange(0, BLOCK)
    a = tl.load(keys_ptr + 2 * row)
    b = tl.load(keys_ptr + 2 * row + 1)
    high = (group >> 32).to(tl.uint32)
    if NORMAL:
        high = high | 0x80000000
    w0, w1, w2, w3 = _philox(
        group.to(tl.uint32), high, b.to(tl.uint32), (b >> 32).to(tl.uint32), a.to(tl.uint32), (a >> 32).to(tl.uint32)
    )
    if double:
        x = _double_from(w0, w1) * 1.1102230246251565e-16  # 2**-53
        y = _double_from(w2, w3) * 1.1102230246251565e-16
        if NORMAL:
            x, y = _box_muller(x + 5.551115123125783e-17, y)  # + 2**-54: never the logarithm of zero
        value = tl.interleave(x, y)
    else:
        if NORMAL:
            unit = 2.3283064365386963e-10  # 2**-32
            x0, y0 = _box_muller(w0.to(tl.float32) * unit + 1.1641532182693481e-10, w1.to(tl.float32) * unit)
            x1, y1 = _box_muller(w2.to(tl.float32) * unit + 1.1641532182693481e-10, w3.to(tl.float32) * unit)
        else:
            unit = 5.960464477539063e-08  # 2**-24
            x0, y0 = (w0 >> 8).to(tl.float32) * unit, (w1 >> 8).to(tl.float32) * unit
            x1, y1 = (w2 >> 8).to(tl.float32) * unit, (w3 >> 8).to(tl.float32) * unit
        value = tl.interleave(tl.interleave(x0, x1), tl.interleave(y0, y1))
    position = first * per_group + tl.arange(0, BLOCK * per_group) - offset
    if NORMAL:
        value = value.to(dtype)
    else:
        if not double:  # `fill` scales float64 itself, for a scalar argument of a kernel is float32
            value = _round_down(tl.minimum(value * scale + low, top), dtype)
    tl.store(out_ptr + row * size + position, value, (position >= 0) & (position < size))


# ---- launchers -------------------------------------------------------------------------------------------------------


def fill(
    out: torch.Tensor, keys: torch.Tensor, *, normal: bool, low: float = 0.0, high: float = 1.0, offset: int = 0
) -> None:
    """Writes row i of `out` with the numbers `offset, offset + 1, ...` of the stream of key i.

    `out` is (n, size), contiguous, of float32, float64, bfloat16 or float16; `keys` is (n, 2) int64, contiguous, on the
    same device. Normal numbers are standard; uniform ones lie in [low, high), two values of `out.dtype`.
    """
    size, double = out.shape[1], out.dtype == torch.float64
    if out.numel() == 0:
        return
    per_group, block = (
        (2 if double else 4),
        128 if normal else 256,
    )  # Box-Muller on 256 groups spills registers (Triton 3.6)
    groups = -(-(offset + size) // per_group) - offset // per_group
    blocks = -(-groups // block)
    top = np.nextafter(np.float32(1.0 if double else high), np.float32(-np.inf))
    affine = (0.0, 1.0, 1.0) if double else (low, high - low, float(top))
    args = (out, keys, size, offset, blocks, *affine)
    launch(_fill_kernel, len(keys) * blocks, out.device, *args, NORMAL=normal, BLOCK=block)
    if double and not normal and (low, high) != (0.0, 1.0):
        out.mul_(high - low).add_(low).clamp_(max=float(np.nextafter(high, -np.inf)))


def derive(out: torch.Tensor, keys: torch.Tensor, data: torch.Tensor | None, *, domain: int) -> None:
    """Writes the child keys: `out[i, j] = philox4x64(counter=(j + 1, data[i], 0, domain), key=keys[i])[:2]`.

    `out` is (n, num, 2), `keys` (n, 2) and `data` (n,) or None for zeros: int64, contiguous, on one device.
    """
    total, num = out.numel() // 2, out.shape[1]
    if total == 0:
        return
    block = 128
    args = (out, keys, keys if data is None else data, total, num, domain)
    launch(_derive_kernel, -(-total // block), out.device, *args, HAS_DATA=data is not None, BLOCK=block)
