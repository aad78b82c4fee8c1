"""Block codecs of what travels between ranks: a tensor as one message of bytes, and back. In aten, for every device.

Rows of n elements (the last dim; what is before it is kept) are cut into blocks of 64, each with an fp32 scale. A
row's message is its codes, then its scales. The last block of a row may be short: it is coded with zeros behind it,
which do not count in its scale. So a caller that codes leaf by leaf never mixes two leaves in a block.

| codec | code of x | scale of a block | bytes an element |
|---|---|---|---|
| int8, int4 | round(x * (L / max)), halves to even, L = 127 or 7; int4 in pairs, even low | max / L | 1.0625, 0.5625 |
| e4m3, e5m2 | x * (L / max) in that format, L = 448 or 57,344 | max / L | 1.0625 |
| sign | 1 if x >= 0, bit j of byte i is element 8i + j | root of the mean square | 0.1875 |

max is the largest magnitude. A block of zeros has scale 0, and so has one whose L / max is infinite in fp32. If an
element is not finite, neither is any element of its decoded block: a lost element must show. (A sign block shows this
too where a square overflows, from magnitudes of about 2e18 on.) Squares are added in one fixed tree of elementwise
additions, so a block's bits do not depend on where a bucket, a leaf or a rank was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
SCALE_BYTES = 4


@dataclass(frozen=True)
class BlockCodec:
    """bits: of an element's code. levels: the code of a block's largest magnitude, 0 for signs. dtype: of one code."""

    name: str
    bits: int
    levels: float
    dtype: torch.dtype


CODECS = {
    c.name: c
    for c in (
        BlockCodec("int8", 8, 127.0, torch.int8),
        BlockCodec("int4", 4, 7.0, torch.int8),
        BlockCodec("e4m3", 8, 448.0, torch.float8_e4m3fn),
        BlockCodec("e5m2", 8, 57344.0, torch.float8_e5m2),
        BlockCodec("sign", 1, 0.0, torch.uint8),
    )
}


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
    return -(-size // BLOCK) * (BLOCK * codec.bits // 8 + SCALE_BYTES)


def encode(x: Tensor, codec: BlockCodec, counts: Tensor | None = None) -> Tensor:
    """The messages (uint8) of the rows of a floating tensor; fp64 is refused, for scales are fp32.

    counts: how many elements of each block count in its scale, the others being zeros; None: all but those behind the
    end of a row.

    >>> encode(torch.tensor([1.0, -1.0]), CODECS["sign"])[:2]
    tensor([253, 255], dtype=torch.uint8)
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.dim() == 0:
        raise TypeError(
            f"encode: x is {x.dtype} of {x.dim()} dims, but codecs take rows of float32, bfloat16 or float16; "
            "keep such a leaf exact"
        )
    size = x.shape[-1]
    rows = pad(x.to(torch.float32), (0, -size % BLOCK))
    rows = rows.view(*x.shape[:-1], rows.shape[-1] // BLOCK, BLOCK)
    codes, scales = _signs(rows, size, counts) if codec.bits == 1 else _scaled(rows, codec)
    return torch.cat([codes.flatten(-2), scales.contiguous().view(torch.uint8)], -1)


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
    blocks = -(-size // BLOCK)
    codes, scales = message.split([message.shape[-1] - blocks * SCALE_BYTES, blocks * SCALE_BYTES], -1)
    each = scales.contiguous().view(torch.float32)[..., None]
    rows = codes.contiguous().view(*message.shape[:-1], blocks, BLOCK * codec.bits // 8)
    if codec.bits == 1:
        shifts = torch.arange(8, dtype=torch.uint8, device=message.device)
        values = torch.where((rows[..., None] >> shifts & 1).flatten(-2) == 1, each, -each)
    elif codec.bits == 4:
        halves = torch.stack([rows & 15, rows >> 4], -1).flatten(-2).to(torch.int8)
        values = ((halves ^ 8) - 8).to(torch.float32) * each
    else:
        values = rows.view(codec.dtype).to(torch.float32) * each
    return values.flatten(-2)[..., :size]


def decode_mean(messages: Tensor, size: int, codec: BlockCodec) -> Tensor:
    """The mean over ranks of one message a rank (dim 0): added in the order of ranks in float32, divided once.

    >>> both = encode(torch.tensor([[7.0, -3.0], [7.0, 0.0]]), CODECS["int4"])
    >>> decode_mean(both, 2, CODECS["int4"])
    tensor([ 7.0000, -1.5000])
    """
    total = decode(messages[0], size, codec)
    for message in messages[1:]:
        total = total + decode(message, size, codec)
    return total / len(messages)


def _scaled(rows: Tensor, codec: BlockCodec) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and scales of blocks, by their largest magnitude."""
    most = rows.abs().amax(-1)
    levels = torch.full_like(most, codec.levels)  # a Python number over a tensor is rounded twice
    inverse = levels / most
    scales = torch.where(inverse == torch.inf, 0.0, most / levels)
    usable = (inverse.isfinite() & most.isfinite())[..., None]
    values = torch.where(usable, rows * inverse[..., None], 0.0)
    if codec.dtype.is_floating_point:
        return values.to(codec.dtype).view(torch.uint8), scales
    codes = values.round().to(codec.dtype).view(torch.uint8)
    if codec.bits == 4:
        codes = codes[..., 0::2] & 15 | codes[..., 1::2] << 4
    return codes, scales


def _signs(rows: Tensor, size: int, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Bits (uint8, eight a byte) and scales of blocks."""
    squares = rows * rows
    for half in (32, 16, 8, 4, 2, 1):
        squares = squares[..., :half] + squares[..., half:]
    if counts is None:
        counts = (size - torch.arange(rows.shape[-2], device=rows.device) * BLOCK).clamp(max=BLOCK)
    weights = 1 << torch.arange(8, device=rows.device)
    bits = (rows >= 0).unflatten(-1, (BLOCK // 8, 8)).to(torch.uint8) * weights.to(torch.uint8)
    return bits.sum(-1, dtype=torch.uint8), (squares[..., 0] / counts).sqrt()
