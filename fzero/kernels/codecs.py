"""Block codecs of what travels between ranks: a tensor as one message of bytes, and back. In aten, for every device.

Rows of n elements (the last dim; what is before it is kept) are cut into blocks of 64. A block's message is its codes,
then its fp32 scale; messages of blocks lie behind one another, so a stretch of blocks is a stretch of bytes. The last
block of a row may be short: it is coded with zeros behind it, which do not count in its scale. So a caller that codes
leaf by leaf never mixes two leaves in a block.

| codec | code of x | scale of a block | bytes an element |
|---|---|---|---|
| int8, int4 | round(x * (L / max)), halves to even, L = 127 or 7; int4 in pairs, even low | max / L | 1.0625, 0.5625 |
| e4m3, e5m2 | x * (L / max) in that format, L = 448 or 57,344 | max / L | 1.0625 |
| sign | 1 if x >= 0, bit j of byte i is element 8i + j | root of the mean square | 0.1875 |

max is the largest magnitude. A block of zeros has scale 0; where L / max is infinite in fp32 the codes are 0. If an
element is not finite, neither is any element of its decoded block: a lost element must show. (A sign block shows this
too where a square overflows, from magnitudes of about 2e18 on.) Squares are added in one fixed tree of elementwise
additions, so a block's bits do not depend on where a bucket, a leaf or a rank was cut.

Cost: some `CHUNK` elements at a time, so that what lies between the passes stays in the cache of a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
SCALE_BYTES = 4
CHUNK = 1 << 17  # elements
_ENCODING = {8: 4.25, 4: 8.25, 1: 6.0}  # by the bits of a code, bytes that an element of a chunk needs between passes
_DECODING = {8: 0.0, 4: 4.0, 1: 4.5}
_PACK = 0x0102040810204080  # times eight bytes of 0 or 1: the highest byte has them as bits, the first lowest


@dataclass(frozen=True)
class BlockCodec:
    """bits: of an element's code. levels: the code of a block's largest magnitude, 0 for signs. dtype: of one code.
    feedback: it loses so much that what it loses of gradients is sent later."""

    name: str
    bits: int
    levels: float
    dtype: torch.dtype
    feedback: bool = False

    @property
    def block_bytes(self) -> int:
        """Of a block's message."""
        return BLOCK * self.bits // 8 + SCALE_BYTES


CODECS = {
    c.name: c
    for c in (
        BlockCodec("int8", 8, 127.0, torch.int8),
        BlockCodec("int4", 4, 7.0, torch.int8),
        BlockCodec("e4m3", 8, 448.0, torch.float8_e4m3fn),
        BlockCodec("e5m2", 8, 57344.0, torch.float8_e5m2),
        BlockCodec("sign", 1, 0.0, torch.uint8, feedback=True),
    )
}


@dataclass(frozen=True)
class Coding:
    """The codecs, by name, in which a leaf is gathered and its gradients are reduced; None: as they are."""

    gather: str | None = None
    reduce: str | None = None


EXACT = Coding()


def codec_named(name: str) -> BlockCodec:
    """The codec of this name. Raises ValueError.

    >>> codec_named("int4").bits
    4
    """
    if name not in CODECS:
        raise ValueError(f"there is no codec {name!r}; write one of {', '.join(CODECS)}")
    return CODECS[name]


def message_bytes(size: int, codec: BlockCodec) -> int:
    """How many bytes `size` elements take, scales included.

    >>> message_bytes(128, CODECS["int8"]), message_bytes(65, CODECS["sign"])
    (136, 24)
    """
    return -(-size // BLOCK) * codec.block_bytes


def encode(x: Tensor, codec: BlockCodec, counts: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The messages (uint8) of the rows of a floating tensor; fp64 is refused, for scales are fp32. out: where they go.

    counts: (rows, blocks), how many elements of each block count in its scale, the others being zeros; None: all but
    those behind the end of a row.

    >>> encode(torch.tensor([1.0, -1.0]), CODECS["sign"])[:2]
    tensor([253, 255], dtype=torch.uint8)
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.dim() == 0:
        raise TypeError(
            f"encode: x is {x.dtype} of {x.dim()} dims, but codecs take rows of float32, bfloat16 or float16; "
            "keep such a leaf exact"
        )
    size, tail = x.shape[-1], x.shape[-1] % BLOCK
    if out is None:
        out = torch.empty((*x.shape[:-1], message_bytes(size, codec)), dtype=torch.uint8, device=x.device)
    blocks = out.unflatten(-1, (-1, codec.block_bytes))
    if whole := size // BLOCK:
        rows = x[..., : size - tail].unflatten(-1, (whole, BLOCK))
        for part in _parts(rows.shape):
            count = BLOCK if counts is None else counts[..., part, None]
            _encode_blocks(rows[..., part, :].to(torch.float32), blocks[..., part, :], codec, count)
    if tail:
        last = pad(x[..., size - tail :].to(torch.float32), (0, BLOCK - tail)).unsqueeze(-2)
        _encode_blocks(last, blocks[..., whole:, :], codec, tail if counts is None else counts[..., whole:, None])
    return out


def decode(message: Tensor, size: int, codec: BlockCodec) -> Tensor:
    """The float32 rows of `size` elements that `encode` made these messages of. Raises ValueError.

    >>> decode(encode(torch.tensor([7.0, -3.0]), CODECS["int4"]), 2, CODECS["int4"])
    tensor([ 7., -3.])
    """
    if message.dtype != torch.uint8 or message.shape[-1] != message_bytes(size, codec):
        raise ValueError(
            f"decode: a message is {message.shape[-1]} of {message.dtype}, but {size} elements in {codec.name} "
            f"are {message_bytes(size, codec)} bytes (uint8)"
        )
    return decode_blocks(message, codec)[..., :size]


def decode_blocks(message: Tensor, codec: BlockCodec, out: Tensor | None = None) -> Tensor:
    """Messages of whole blocks as float32 rows, what is behind the end of a short block included. out: where they go.

    >>> decode_blocks(encode(torch.ones(3), CODECS["int8"]), CODECS["int8"]).shape
    torch.Size([64])
    """
    blocks = message.unflatten(-1, (-1, codec.block_bytes))
    if out is None:
        shape = (*message.shape[:-1], blocks.shape[-2] * BLOCK)
        out = torch.empty(shape, dtype=torch.float32, device=message.device)
    rows = out.unflatten(-1, (-1, BLOCK))
    for part in _parts(rows.shape):
        _decode_blocks(blocks[..., part, :], rows[..., part, :], codec)
    return out


def decode_sum(messages: Tensor, divisor: int, codec: BlockCodec, out: Tensor | None = None) -> Tensor:
    """The sum over ranks of one message a rank (dim 0), of whole blocks: added in the order of ranks in float32,
    divided once. out: where it goes.

    >>> decode_sum(encode(torch.ones(2, 64), CODECS["int8"]), 1, CODECS["int8"])[:2]
    tensor([2., 2.])
    """
    blocks = messages.unflatten(-1, (-1, codec.block_bytes))
    if out is None:
        shape = (*messages.shape[1:-1], blocks.shape[-2] * BLOCK)
        out = torch.empty(shape, dtype=torch.float32, device=messages.device)
    rows = out.unflatten(-1, (-1, BLOCK))
    room = None
    for part in _parts(rows.shape):
        total = rows[..., part, :]
        _decode_blocks(blocks[0][..., part, :], total, codec)
        room = torch.empty_like(total, memory_format=torch.contiguous_format) if room is None else room
        other = room[..., : total.shape[-2], :]
        for message in blocks[1:]:
            _decode_blocks(message[..., part, :], other, codec)
            total += other
        if divisor != 1:
            total /= divisor
    return out


def encode_scratch(size: int, codec: BlockCodec, dtype: torch.dtype) -> int:
    """Bytes that `encode` holds between its passes over rows of so many elements in all.

    >>> encode_scratch(1024, CODECS["int8"], torch.float32)
    4352
    """
    return round(min(size, CHUNK) * (_ENCODING[codec.bits] + (0 if dtype is torch.float32 else 4)))


def decode_scratch(size: int, codec: BlockCodec, ranks: int = 1) -> int:
    """Bytes that `decode_blocks`, or for several ranks `decode_sum`, holds between its passes.

    >>> decode_scratch(1024, CODECS["int8"]), decode_scratch(1024, CODECS["int8"], ranks=2)
    (0, 4096)
    """
    return round(min(size, CHUNK) * (_DECODING[codec.bits] + (4 if ranks > 1 else 0)))


def _parts(shape: torch.Size) -> Iterator[slice]:
    """Stretches of blocks (the last dim but one) of at most `CHUNK` elements in all."""
    blocks = shape[-2]
    step = max(1, CHUNK // max(1, shape[:-2].numel() * BLOCK))
    for start in range(0, blocks, step):
        yield slice(start, min(start + step, blocks))


def _encode_blocks(rows: Tensor, into: Tensor, codec: BlockCodec, count: int | Tensor) -> None:
    """Writes the messages of blocks of which `count` elements are meant."""
    codes, scales = into[..., :-SCALE_BYTES], into[..., -SCALE_BYTES:].view(torch.float32)
    if codec.bits == 1:
        squares = rows * rows
        for half in (32, 16, 8, 4, 2, 1):
            squares = squares[..., :half] + squares[..., half:]
        scales.copy_((squares / count).double().sqrt_())  # MKL's root in float32 is not IEEE's
        bits = (rows >= 0).view(torch.uint8).view(torch.int64)
        codes.copy_(bits.mul_(_PACK) >> 56)
        return
    most = rows.abs().amax(-1, keepdim=True)
    levels = torch.full_like(most, codec.levels)  # a Python number over a tensor is rounded twice
    scales.copy_(most / levels)
    inverse = levels / most
    values = rows * torch.where(inverse == torch.inf, 0.0, inverse)
    if codec.dtype.is_floating_point:
        codes.view(codec.dtype).copy_(values)
    elif codec.bits == 8:
        codes.view(codec.dtype).copy_(values.round_())
    else:
        pairs = values.round_().to(torch.int8).view(torch.int16)
        codes.copy_((pairs & 15) | (pairs >> 4 & 240))


def _decode_blocks(blocks: Tensor, into: Tensor, codec: BlockCodec) -> None:
    """Writes the elements of blocks' messages."""
    codes, scales = blocks[..., :-SCALE_BYTES], blocks[..., -SCALE_BYTES:].view(torch.float32)
    if codec.bits == 1:
        signs = torch.index_select(_signs(codes.device), 0, codes.to(torch.int32).flatten())
        torch.mul(signs.view(into.shape), scales, out=into)
    elif codec.bits == 4:
        wide = codes.to(torch.int16)
        halves = (wide & 15 | (wide & 240) << 4).view(torch.int8)
        into.copy_(halves.bitwise_xor_(8).sub_(8)).mul_(scales)
    else:
        into.copy_(codes.view(codec.dtype)).mul_(scales)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """(256, 8): of each byte, its bits as 1 and -1."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return (bits * 2 - 1).to(torch.float32)
