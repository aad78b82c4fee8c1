"""The block codecs of `fzero.kernels.codecs` on CUDA: encode, decode, and the sum of several ranks' messages, one pass
each.

The reference is that file. Messages and decoded elements are bitwise equal to the CPU's. Of a block with an element
that is not finite only the scale is: its codes may differ, and none of its decoded elements is finite.

- The code of an integer is the low byte of x + 1.5 * 2**23 in fp32, whose last place is 1. An fp8 code is rounded
  likewise, by a power of two whose last place is the step of the format at x. So no GPU needs fp8 instructions.
- The squares of a sign block are added in the reference's tree: each sum is over a dim of two elements, so it is one
  addition, whose order no compiler can change.
- A block's message is a multiple of four bytes long and starts at one, so codes of 8 and 4 bits are stored and loaded
  four bytes at a time.

Byte floor, an element of fp32: encode reads 4 (2 of 16 bits) and writes the message: 1.0625 in int8, e4m3 and e5m2,
0.5625 in int4, 0.1875 in sign. decode reads that and writes 4; decode_sum reads that of each rank and writes 4.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fzero.kernels._triton import FLOATS, check, exact, jit, largest, tl, wide
from fzero.kernels.codecs import BLOCK, SCALE_BYTES, BlockCodec, message_bytes

ROWS = 32  # blocks of a program
DECODE_WARPS = 8  # of 4, those for sm_100 would spill around the division
BYTES = (torch.uint8,)


# ---- device functions ------------------------------------------------------------------------------------------------


@jit
def _blocks_of(ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers (ROWS,) of this program's blocks, in int64."""
    return tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)


@jit
def _root_mean_square(x, count, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each row of x (ROWS, 64), of which `count` elements are meant and the others are 0."""
    total = tl.reshape(x * x, (ROWS, 2, 2, 2, 2, 2, 2))
    for _ in tl.static_range(6):
        total = tl.sum(total, 1)
    return tl.sqrt_rn(tl.div_rn(total, count.to(tl.float32)))


@jit
def _to_float8(x, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 to the bits of e4m3 (MANTISSA 3) or e5m2 (2), halves to even, for what rounds to a finite number.

    Between two powers of two the numbers of a format are a step apart: `large` is the power whose last place in fp32 is
    that step. Under the smallest normal number, whose exponent is LEAST in fp32, the step stays the same.
    """
    LEAST: tl.constexpr = 129 - (1 << (6 - MANTISSA))
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    power = tl.maximum(size & 0x7F800000, LEAST << 23)
    large = power + ((23 - MANTISSA) << 23)
    rounded = size.to(tl.float32, bitcast=True) + large.to(tl.float32, bitcast=True)
    steps = rounded.to(tl.int32, bitcast=True) - large
    return (steps + (power >> (23 - MANTISSA)) - (LEAST << MANTISSA)) | ((bits >> 24) & 0x80)


@jit
def _from_float8(code, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 of the bits (int32) of e4m3 or e5m2: as fp16, whose exponent e5m2 has and e4m3 lies 8 under."""
    if MANTISSA == 2:
        return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@jit
def _codes_of(x, BITS: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bytes of codes (ROWS, 8 * BITS), int32, of scaled elements (ROWS, 64); of signs those of the elements."""
    if BITS == 1:
        bits = tl.reshape(tl.where(x >= 0, 1, 0), (ROWS, 8, 8))
        return tl.sum(bits << tl.arange(0, 8)[None, None, :], 2)
    elif MANTISSA > 0:
        return _to_float8(x, MANTISSA)
    else:
        code = (x + 12582912.0).to(tl.int32, bitcast=True)
        if BITS == 8:
            return code
        else:
            low, high = tl.split(tl.reshape(code, (ROWS, 32, 2)))
            return (low & 15) | ((high & 15) << 4)


@jit
def _elements_of(message, inside, BITS: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements (ROWS, 64), fp32, of the blocks whose messages start at `message` (ROWS,), where `inside`."""
    BYTES: tl.constexpr = 8 * BITS
    places = tl.multiple_of(message[:, None] + tl.arange(0, BYTES)[None, :], (4, 4))
    code = tl.load(places, inside[:, None], 0).to(tl.int32)
    scale = tl.load((message + BYTES).to(tl.pointer_type(tl.float32)), inside, 0.0)[:, None]
    if BITS == 1:
        bits = tl.reshape((code[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, (ROWS, 64))
        return tl.where(bits == 1, scale, -scale)
    elif MANTISSA > 0:
        return _from_float8(code, MANTISSA) * scale
    elif BITS == 8:
        return code.to(tl.int8).to(tl.float32) * scale
    else:
        pairs = tl.reshape(tl.join(code & 15, code >> 4), (ROWS, 64))
        return ((pairs ^ 8) - 8).to(tl.float32) * scale


# ---- kernels ---------------------------------------------------------------------------------------------------------


@jit
def _encode_kernel(  # type: ignore[no-untyped-def]
    message, x, size, num_blocks,
    BITS: tl.constexpr, LEVELS: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the messages of ROWS blocks."""
    BYTES: tl.constexpr = 8 * BITS
    block = _blocks_of(ROWS)
    index = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    value = wide(tl.load(x + index, index < size, 0.0))
    if BITS == 1:
        count = tl.minimum(size - block * 64, 64)
        scale = _root_mean_square(value, tl.maximum(count, 1), ROWS)
    else:
        most = largest(value)
        levels = tl.full((ROWS,), LEVELS, tl.float32)
        scale = tl.div_rn(most, levels)
        inverse = tl.div_rn(levels, most)
        value = value * tl.where(inverse == float("inf"), 0.0, inverse)[:, None]
    code = _codes_of(value, BITS, MANTISSA, ROWS)
    start, inside = message + block * (BYTES + 4), block < num_blocks
    places = tl.multiple_of(start[:, None] + tl.arange(0, BYTES)[None, :], (4, 4))
    tl.store(places, code.to(tl.uint8), inside[:, None])
    tl.store((start + BYTES).to(tl.pointer_type(tl.float32)), scale, inside)


@jit
def _decode_kernel(  # type: ignore[no-untyped-def]
    out, messages, stride, ranks, divisor, num_blocks, BITS: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr
):
    """Writes the elements of ROWS blocks: of the sum of the messages of `ranks`, `stride` bytes apart, by `divisor`."""
    block = _blocks_of(ROWS)
    message, inside = messages + block * (8 * BITS + 4), block < num_blocks
    total = _elements_of(message, inside, BITS, MANTISSA, ROWS)
    for _ in range(1, ranks):
        message += stride
        total += _elements_of(message, inside, BITS, MANTISSA, ROWS)
    if divisor != 1:
        total = tl.div_rn(total, tl.zeros_like(total) + divisor)
    index = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + index, total, inside[:, None])


# ---- launchers -------------------------------------------------------------------------------------------------------


def encode(codec: BlockCodec, x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The message (uint8, 1-D) of `x` (float32, bfloat16 or float16; contiguous, any shape, taken flat).

    out: where it goes, 1-D of `message_bytes(x.numel(), codec)`. Raises ValueError and TypeError.
    """
    size = message_bytes(x.numel(), codec)
    out = torch.empty(size, dtype=torch.uint8, device=x.device) if out is None else out
    check("encode", "x", x, x, FLOATS, x.numel())
    check("encode", "out", out, x, BYTES, size)
    _check_start("encode", "out", out, 0)
    if num_blocks := size // codec.block_bytes:
        args = (out, x, x.numel(), num_blocks)
        exact(_encode_kernel, -(-num_blocks // ROWS), x.device, *args, LEVELS=codec.levels, **_constants(codec))
    return out


def decode(codec: BlockCodec, message: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The elements (float32, 1-D) of a message (uint8, 1-D) of whole blocks, into `out` if given."""
    return decode_sum(codec, message.view(1, -1), 1, out=out)


def decode_sum(codec: BlockCodec, messages: Tensor, divisor: int, *, out: Tensor | None = None) -> Tensor:
    """The sum (float32, 1-D) of the elements of one message a rank, divided by `divisor`.

    messages: uint8 of (ranks, bytes), whole blocks. Rows may be apart, as in a view of a larger buffer; they are added
    in order. out: where the sum goes, 1-D of 64 elements for each block. Raises ValueError and TypeError.
    """
    ranks, num_bytes = messages.shape
    num_blocks = num_bytes // codec.block_bytes
    out = torch.empty(num_blocks * BLOCK, dtype=torch.float32, device=messages.device) if out is None else out
    if ranks == 0 or num_bytes % codec.block_bytes:
        raise ValueError(
            f"decode: messages are {ranks} of {num_bytes} bytes, but there must be at least one, of whole blocks: of "
            f"{codec.name} a block is {codec.block_bytes} bytes"
        )
    check("decode", "messages", messages[:1], messages, BYTES, num_bytes)
    check("decode", "out", out, messages, (torch.float32,), num_blocks * BLOCK)
    stride = messages.stride(0) if ranks > 1 else 0
    _check_start("decode", "messages", messages, stride)
    if num_blocks:
        args = (out, messages, stride, ranks, divisor, num_blocks)
        programs = -(-num_blocks // ROWS)
        exact(_decode_kernel, programs, out.device, *args, **_constants(codec), num_warps=DECODE_WARPS)
    return out


def _constants(codec: BlockCodec) -> dict[str, int]:
    """What a kernel is compiled for. MANTISSA: the bits of a fp8 code behind the point, 0 of other codes."""
    mantissa = -round(math.log2(torch.finfo(codec.dtype).eps)) if codec.dtype.is_floating_point else 0
    return {"BITS": codec.bits, "MANTISSA": mantissa, "ROWS": ROWS}


def _check_start(where: str, name: str, messages: Tensor, stride: int) -> None:
    """Raises ValueError for messages whose scales a GPU could not address."""
    if messages.data_ptr() % SCALE_BYTES or stride % SCALE_BYTES:
        raise ValueError(
            f"{where}: {name} starts at byte {messages.data_ptr()} and its rows are {stride} bytes apart, but both "
            f"must be multiples of {SCALE_BYTES}, for the scales are float32"
        )
