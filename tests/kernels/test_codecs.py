"""Block codecs beside a reference that codes one block at a time, and what a block owes its neighbours: nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fzero.kernels import codecs
from fzero.kernels.codecs import (
    CODECS,
    BlockCodec,
    codec_named,
    decode,
    decode_sum,
    encode,
    message_bytes,
)

ALL = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
SIZES = (1, 7, 63, 64, 65, 200, 640)


def reference(x: Tensor, codec: BlockCodec) -> Tensor:
    """What a flat tensor comes back as, block by block."""
    blocks = []
    for part in x.float().split(64):
        if codec.bits == 1:
            scale = part.double().square().mean().sqrt().float()
            blocks.append(torch.where(part >= 0, scale, -scale))
            continue
        most = part.abs().max()
        scaled = part * (torch.tensor(codec.levels) / most) if most > 0 else part
        codes = scaled.to(codec.dtype) if codec.dtype.is_floating_point else scaled.round()
        blocks.append(codes.float() * (most / torch.tensor(codec.levels)))
    return torch.cat(blocks)


def made(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@ALL
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_references(codec: BlockCodec, size: int, dtype: torch.dtype) -> None:
    x = made(size, dtype)
    message = encode(x, codec)
    assert message.dtype == torch.uint8
    assert message.shape == (message_bytes(size, codec),)
    bound = 1e-6 if codec.bits == 1 else 0.0  # the reference adds squares in another order
    torch.testing.assert_close(decode(message, size, codec), reference(x, codec), rtol=bound, atol=0.0)


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large rows are coded some blocks at a time."""
    x = made(3 * 1000).view(3, 1000)
    whole = {name: encode(x, codec) for name, codec in CODECS.items()}
    sums = {name: decode_sum(whole[name], 3, codec) for name, codec in CODECS.items()}
    monkeypatch.setattr(codecs, "CHUNK", 256)
    for name, codec in CODECS.items():
        assert torch.equal(encode(x, codec), whole[name])
        assert torch.equal(decode_sum(whole[name], 3, codec), sums[name])


def test_a_stretch_of_blocks_is_a_stretch_of_bytes() -> None:
    """So a rank's slice of a message is the message of its slice."""
    for codec in CODECS.values():
        message = encode(made(640), codec)
        part = message[codec.block_bytes * 2 : codec.block_bytes * 5]
        assert torch.equal(part, encode(made(640)[128:320], codec))


@ALL
def test_rows_and_cuts_on_blocks_have_the_same_bits(codec: BlockCodec) -> None:
    x = made(640)
    whole = decode(encode(x, codec), 640, codec)
    assert torch.equal(decode(encode(x.view(5, 128), codec), 128, codec).flatten(), whole)
    parts = [decode(encode(part, codec), len(part), codec) for part in x.split([64, 448, 128])]
    assert torch.equal(torch.cat(parts), whole)


@ALL
@pytest.mark.parametrize("lost", [float("nan"), float("inf"), float("-inf")])
def test_a_lost_element_shows_in_its_block_only(codec: BlockCodec, lost: float) -> None:
    x = made(200)
    clean = decode(encode(x, codec), 200, codec)
    x[70] = lost
    back = decode(encode(x, codec), 200, codec)
    assert not back[64:128].isfinite().any()
    assert torch.equal(back[:64], clean[:64])
    assert torch.equal(back[128:], clean[128:])


@ALL
def test_a_block_of_zeros_stays_zero(codec: BlockCodec) -> None:
    assert not decode(encode(torch.zeros(70), codec), 70, codec).any()


@ALL
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_mean_adds_ranks_in_order(codec: BlockCodec, ranks: int) -> None:
    rows = made(ranks * 130).view(ranks, 130)
    total = torch.zeros(130)
    for row in rows:
        total = total + decode(encode(row, codec), 130, codec)
    assert torch.equal(decode_sum(encode(rows, codec), ranks, codec)[..., :130], total / ranks)


def test_bytes_an_element_are_the_formulas() -> None:
    each = {name: message_bytes(6400, codec) / 6400 for name, codec in CODECS.items()}
    assert each == {"int8": 1.0625, "int4": 0.5625, "e4m3": 1.0625, "e5m2": 1.0625, "sign": 0.1875}


def test_refusals() -> None:
    with pytest.raises(ValueError, match="there is no codec 'int3'; write one of int8, int4, e4m3, e5m2, sign"):
        codec_named("int3")
    with pytest.raises(TypeError, match=r"x is torch.float64 of 1 dims, .* keep such a leaf exact"):
        encode(torch.zeros(64, dtype=torch.float64), CODECS["int8"])
    with pytest.raises(ValueError, match=r"a message is 67 of torch.uint8, but 64 elements in int8 are 68 bytes"):
        decode(torch.zeros(67, dtype=torch.uint8), 64, CODECS["int8"])
