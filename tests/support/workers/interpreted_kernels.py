"""The Triton kernels on the CPU, in Triton's interpreter: run by test_kernels.py with TRITON_INTERPRET=1.

Bits where a file promises bits. Elsewhere the kernel may be twice as far from the exact result as PyTorch in the same
dtype is, and some units in the last place.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fzero import optim
from fzero.kernels import KERNELS, adamw, cast, codec_kernels, codecs, flat_norms, hyper
from fzero.kernels import round as rounding
from fzero.kernels.codecs import CODECS, BlockCodec, message_bytes
from fzero.optim.adam import ENDLESS

assert os.environ["TRITON_INTERPRET"] == "1"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STEP: Any = (0.9, 0.999, 1e-8, 0.1)
few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
sizes = st.sampled_from([0, 1, 2, 63, 64, 65, 1023, 1024, 1025, 2047, 2049]) | st.integers(0, 3000)
offsets = st.integers(0, 3)
floats = st.sampled_from([F32, BF16, F16])
ODD = [0.0, -0.0, 1e-45, -1e-40, 1.17e-38, 3e-37, 1e30, 3.4e38, -3.4028234663852886e38, 65504.0, 65520.0, 1.00390625]
LOST = [float("inf"), float("-inf"), float("nan")]


def values(
    size: int, offset: int = 0, dtype: torch.dtype = F32, seed: int = 0, odd: list[float] | None = None
) -> Tensor:
    """Numbers of many sizes, starting `offset` elements into their memory; some of them replaced by `odd` ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size + offset, generator=generator) * 10.0 ** torch.randint(-3, 3, (), generator=generator)
    if odd and size:
        places = torch.randint(offset, size + offset, (max(1, size // 8),), generator=generator)
        x[places] = torch.tensor(odd)[torch.randint(0, len(odd), places.shape, generator=generator)]
    return x.to(dtype)[offset:]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; any NaN equals any other."""
    assert a.dtype == b.dtype
    if not a.is_floating_point():
        return torch.equal(a, b)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(whole), b[~nan].view(whole))


def near(got: Tensor, exact: Tensor, other: Tensor, old: Tensor | float = 0.0) -> None:
    """The oracle: at most twice as far from the exact result as `other`; one unit in the result's last place, and two
    of float32 at the size of the `old` value that the result is a difference from."""
    info, old = torch.finfo(got.dtype), torch.as_tensor(old).double().abs()
    room = 2 * (other.double() - exact).abs() + info.eps * exact.abs() + info.smallest_normal * info.eps
    room = room + 2 * torch.finfo(F32).eps * (old + exact.abs())
    assert ((got.double() - exact).abs() <= room).all(), ((got.double() - exact).abs() - room).max()


# ---- AdamW -----------------------------------------------------------------------------------------------------------


def state(
    size: int, offset: int = 0, param: torch.dtype = F32, grad: torch.dtype = F32, moment: torch.dtype = F32
) -> Any:
    p, g = values(size, offset, param, 1), values(size, offset, grad, 2)
    return p, g, values(size, offset, moment, 3) * 0.1, values(size, offset, moment, 4).square() * 0.1


def stepped(p: Tensor, g: Tensor, m: Tensor, v: Tensor, count: int = 3, lr: float = 1e-2, **options: Any) -> Any:
    p, m, v = p.clone(), m.clone(), v.clone()
    decoupled = options.pop("decoupled", True)
    scalars = torch.tensor(count), torch.tensor(lr, dtype=torch.float64)
    adamw.adamw_(p, g, m, v, *scalars, *STEP, decoupled, **options)
    return p, m, v


@few
@given(sizes, offsets, floats, st.booleans(), st.sampled_from([1, 2, 1000, 10**6]))
def test_adamw_is_as_near_as_aten(size: int, offset: int, dtype: torch.dtype, decoupled: bool, count: int) -> None:
    p, g, m, v = state(size, offset, dtype, dtype, dtype)
    got = stepped(p, g, m, v, count, decoupled=decoupled)
    exact = adamw.adamw_reference(p, g, m, v, count, 1e-2, *STEP, decoupled, dtype=torch.float64)
    other = torch.ops.fzero.adamw(p, g, m, v, torch.tensor(count), torch.tensor(1e-2).double(), *STEP, decoupled)
    for one in zip(got, exact, other, (p, m, v), strict=True):
        near(*one)


@pytest.mark.parametrize("kinds", [(F32, BF16, F32), (F32, F32, BF16), (F32, F16, F32), (BF16, F32, F32)])
def test_dtypes_may_differ(kinds: Any) -> None:
    p, g, m, v = state(1500, 0, *kinds)
    exact = adamw.adamw_reference(p, g, m, v, 3, 1e-2, *STEP, dtype=torch.float64)
    for got, wanted, old in zip(stepped(p, g, m, v), exact, (p, m, v), strict=True):
        near(got, wanted, wanted, old)


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_the_gradient_is_unscaled_and_clipped(scale: float) -> None:
    p, g, m, v = state(1500)
    clip = torch.tensor(0.3, dtype=torch.float64)
    got = stepped(p, g * scale, m, v, scale=torch.tensor(scale), clip=clip)
    exact = adamw.adamw_reference(p, g * scale, m, v, 3, 1e-2, *STEP, factor=0.3 / scale, dtype=torch.float64)
    for one, wanted, old in zip(got, exact, (p, m, v), strict=True):
        near(one, wanted, wanted, old)


@pytest.mark.parametrize("flag", [torch.tensor(True), torch.tensor(1.0)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_skipped_step_leaves_every_bit(flag: Tensor, dtype: torch.dtype) -> None:
    p, g, m, v = state(1100, 1, dtype, F32, dtype)
    p[3:6] = torch.tensor(LOST)
    g[7:10] = torch.tensor(LOST)
    whole = torch.int32 if dtype == F32 else torch.int16
    copy = torch.full((1100,), 7.0, dtype=BF16)
    seed = torch.tensor(5) if dtype == BF16 else None
    seeds = adamw.Seeds(seed, seed, seed)
    kept = stepped(p, g, m, v, skip=flag, seeds=seeds, copy=copy)
    assert all(torch.equal(a.view(whole), b.view(whole)) for a, b in zip(kept, (p, m, v), strict=True))
    assert same(copy, p.to(BF16))
    taken = stepped(p, g, m, v, skip=torch.zeros_like(flag), seeds=seeds)
    assert all(same(a, b) for a, b in zip(taken, stepped(p, g, m, v, seeds=seeds), strict=True))
    assert not same(taken[0], p)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_copy_is_the_new_parameter(dtype: torch.dtype) -> None:
    copy = torch.empty(1025, dtype=dtype)
    assert same(copy, stepped(*state(1025), copy=copy)[0].to(dtype)), "written in the same pass"


@few
@given(sizes, offsets, st.integers(-(2**63), 2**63 - 1))
def test_random_rounding_is_that_of_the_op(size: int, offset: int, seed: int) -> None:
    """The same step with room for all digits, rounded by the op."""
    p, g, m, v = state(size, offset, BF16, F32, BF16)
    seeds = [torch.tensor((seed + i + 2**63) % 2**64 - 2**63) for i in range(3)]
    got = stepped(p, g, m, v, seeds=adamw.Seeds(*seeds))
    wide = stepped(p.float(), g, m.float(), v.float())
    for one, exact, own in zip(got, wide, seeds, strict=True):
        assert same(one, optim.stochastic_round(exact, own))


@few
@given(st.integers(1, 2500), st.data())
def test_a_slice_has_the_bits_of_the_whole(size: int, data: Any) -> None:
    start = data.draw(st.integers(0, size - 1))
    part = slice(start, data.draw(st.integers(start, size)))
    tensors = state(size)
    for a, b in zip(stepped(*tensors), stepped(*(t[part] for t in tensors)), strict=True):
        assert same(a[part], b)


def test_the_operators_of_the_table() -> None:
    """The pure form writes nothing over; lists and one another agree bit for bit."""
    p, g, m, v = state(1100)
    count, lr = torch.tensor(3), torch.tensor(1e-2, dtype=torch.float64)
    before = [t.clone() for t in (p, m, v)]
    new = KERNELS["fzero.adamw.default"].launch(p, g, m, v, count, lr, *STEP, True)
    assert all(same(a, b) for a, b in zip((p, m, v), before, strict=True))
    assert all(same(a, b) for a, b in zip(new, stepped(p, g, m, v), strict=True))
    options = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    names = ["amsgrad", "maximize"]
    for name, decoupled in (("aten._fused_adamw_.default", True), ("aten._fused_adam_.tensor_lr", False)):
        ps, ms, vs = ([t[:64].clone(), t[64:].clone()] for t in (p, m, v))
        counts = [torch.tensor(3.0)] * 2
        KERNELS[name].launch(ps, [g[:64], g[64:]], ms, vs, [], counts, **options, **dict.fromkeys(names, False))
        wanted = stepped(p, g, m, v, decoupled=decoupled)
        assert all(same(torch.cat(a), b) for a, b in zip((ps, ms, vs), wanted, strict=True))
    with pytest.raises(ValueError, match="no kernel for amsgrad"):
        adamw.fused_adamw_(ps, ps, ms, vs, [], counts, **options, amsgrad=True)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 999, 12_345, 10**6, 2**31 + 5, ENDLESS])
def test_the_numbers_of_a_step(count: int) -> None:
    lr = torch.tensor(1e-3, dtype=torch.float64)
    rate, root = KERNELS["fzero.bias_corrections.default"].launch(torch.tensor(count), lr, 0.9, 0.999)
    exact = [1e-3 / (1 - 0.9**count), (1 - 0.999**count) ** 0.5]
    assert [rate.float(), root.float()] == torch.tensor(exact, dtype=torch.float64).float().tolist()


@few
@given(sizes, st.sampled_from([1, 2, 1000, 10**6]), st.booleans())
def test_corrections_once_for_all_leaves_change_no_bit(size: int, count: int, decoupled: bool) -> None:
    """And they are read: a step with the corrections of another count has other bits."""
    tensors, lr = state(size), torch.tensor(1e-2, dtype=torch.float64)
    rate, root = hyper.bias_corrections(torch.tensor(count), lr, *STEP[:2])
    own = stepped(*tensors, count, decoupled=decoupled)
    assert all(map(same, own, stepped(*tensors, count, decoupled=decoupled, rate=rate, root=root)))
    if size:
        assert not same(own[0], stepped(*tensors, count, decoupled=decoupled, rate=rate * 2, root=root)[0])


def test_the_numbers_that_a_kernel_makes() -> None:
    """w a, clip / scale and 1 / root are made in float64 and then rounded: those of the formula, bit for bit."""
    p, g, m, v = (t.numpy() for t in state(1500))
    rate, root = hyper.bias_corrections(torch.tensor(3), torch.tensor(1e-2, dtype=torch.float64), *STEP[:2])
    beta1, rest1, beta2, rest2, eps = (np.float32(x) for x in (0.9, 1 - 0.9, 0.999, 1 - 0.999, 1e-8))
    scale, clip = torch.tensor(3.0), torch.tensor(0.7, dtype=torch.float64)
    size, inverse, shrink, factor = (np.float32(x) for x in (float(rate), 1 / float(root), 1e-2 * 0.1, 0.7 / 3.0))
    g = g * factor
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    wanted = p - (shrink * p + size * m / (np.sqrt(v) * inverse + eps))
    got = stepped(*state(1500), scale=scale, clip=clip)
    for a, b in zip(got, (wanted, m, v), strict=True):
        assert same(a, torch.from_numpy(b))


# ---- flat buffers ----------------------------------------------------------------------------------------------------


@few
@given(sizes, offsets, st.integers(-(2**63), 2**63 - 1))
def test_stochastic_rounding(size: int, offset: int, seed: int) -> None:
    x = values(size, offset, odd=ODD + LOST)
    got = rounding.stochastic_round(x, torch.tensor(seed))
    wanted = rounding.stochastic_round_reference(x, seed)
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16)), "a NaN's bits, too"
    assert torch.equal(got.view(torch.int16), optim.stochastic_round(x, torch.tensor(seed)).view(torch.int16))


def test_the_edges_of_stochastic_rounding() -> None:
    edges = [0x7F800001, 0x7FFFFFFF, 0x7F800000, 0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF, 0x7F7EFFFF, 0x00000001, 0x007FFFFF]
    x = torch.tensor(edges + [-(2**31) + e for e in edges], dtype=torch.int32).view(F32)
    for seed in range(8):
        got = rounding.stochastic_round(x, torch.tensor(seed)).view(torch.int16)
        assert torch.equal(got, optim.stochastic_round(x, torch.tensor(seed)).view(torch.int16))


@few
@given(sizes, offsets, floats, floats, st.sampled_from([None, 1.0, 0.37, 1e-3, 1e4]))
def test_cast_and_scale(size: int, offset: int, source: torch.dtype, target: torch.dtype, by: float | None) -> None:
    x = values(size, offset, source, odd=ODD + LOST)
    scale = None if by is None else torch.tensor(by)
    out = torch.empty(size + offset, dtype=target)[offset:]
    cast.cast(out, x, scale)
    assert same(out, cast.cast_reference(x, target, scale))


@pytest.mark.parametrize("target", [BF16, F16])
def test_every_tie_and_subnormal_number_is_rounded_as_torch_does(target: torch.dtype) -> None:
    middle = torch.arange(0, 2**16, 7).to(torch.int32) << 16 | 0x8000  # between two numbers of bfloat16
    x = torch.cat([middle + near for near in (-1, 0, 1)]).view(F32)
    out = torch.empty(x.shape, dtype=target)
    cast.cast(out, x)
    assert same(out, x.to(target))


@few
@given(st.sampled_from([0, 1, 2048, 2049, 10_000]) | st.integers(0, 5000), offsets, floats)
def test_norm_and_finite_check(size: int, offset: int, dtype: torch.dtype) -> None:
    x = values(size, offset, dtype, odd=[0.0, 1e-40, 60000.0])
    bad = torch.tensor(True)
    total = flat_norms.sum_squares(x, nonfinite=bad)
    assert total.item() == pytest.approx(flat_norms.sum_squares_reference(x)[0].item(), rel=1e-13)
    assert total.dtype == torch.float64
    assert not bad
    assert torch.equal(total, flat_norms.sum_squares(x.clone())), "the start of the buffer does not matter"


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("place", [0, 2047, 2048, 4098])
def test_a_number_that_is_not_finite_is_found(lost: float, place: int) -> None:
    x = torch.full((4099,), -3.4028234663852886e38)
    for flag in (torch.tensor(False), torch.tensor(0.0)):
        flat_norms.sum_squares(x, nonfinite=flag)
        assert not flag, "large is not infinite"
    x[place] = lost
    for flag in (torch.tensor(False), torch.tensor(0.0)):
        flat_norms.sum_squares(x, nonfinite=flag)
        assert flag == 1


# ---- codecs ----------------------------------------------------------------------------------------------------------


@few
@given(sizes, offsets, floats, st.sampled_from([None, ODD, ODD + LOST]))
def test_a_message_is_the_codecs(size: int, offset: int, dtype: torch.dtype, odd: Any) -> None:
    """A block of zeros and one of subnormal numbers, whose inverse is infinite, are among the blocks."""
    x = values(size, offset, dtype, odd=odd)
    x[64:128] = 0.0
    x[128:192] *= 1e-38
    finite = torch.tensor([bool(part.isfinite().all()) for part in x.split(64)] if size else [], dtype=torch.bool)
    for codec in CODECS.values():
        got, wanted = (f.view(-1, codec.block_bytes) for f in (codec_kernels.encode(codec, x), codecs.encode(x, codec)))
        assert torch.equal(got[finite], wanted[finite]), f"{codec.name}: bit for bit"
        assert same(got[:, -4:].contiguous().view(F32), wanted[:, -4:].contiguous().view(F32)), (
            "of each block the scale"
        )
        back = codec_kernels.decode(codec, got.flatten())
        assert same(back, codecs.decode_blocks(got.flatten(), codec))
        assert not back.view(-1, 64)[~finite].isfinite().any(), "what is lost shows"


@few
@given(st.integers(1, 2200), st.integers(1, 5), st.sampled_from([1, 2, 3, 7]), st.sampled_from([0, 4, 64]))
def test_a_sum_adds_ranks_in_order(size: int, ranks: int, divisor: int, gap: int) -> None:
    """Of rows that lie apart in a larger buffer, as those that an all-to-all has written."""
    for codec in CODECS.values():
        messages = torch.stack([codecs.encode(values(size, seed=i, odd=ODD), codec) for i in range(ranks)])
        room = torch.full((ranks, messages.shape[1] + gap), 255, dtype=torch.uint8)
        rows = room[:, gap // 2 // 4 * 4 :][:, : messages.shape[1]]
        rows.copy_(messages)
        got = codec_kernels.decode_sum(codec, rows, divisor)
        assert same(got, codecs.decode_sum(messages, divisor, codec))


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_every_byte_is_decoded(codec: BlockCodec) -> None:
    """At each place of a block; fp8 has codes of infinity and NaN."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(codec.block_bytes).view(-1, codec.block_bytes)
    blocks[:, -4:] = torch.tensor([0.37]).view(torch.uint8)
    message = blocks.flatten()
    assert same(codec_kernels.decode(codec, message), codecs.decode_blocks(message, codec))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_number_of_fp16_and_its_neighbours_become_the_fp8_of_torch(name: str) -> None:
    """Ties, and numbers below the smallest normal one; each block has the largest, so that nothing is scaled."""
    codec = CODECS[name]
    x = torch.arange(0, 2**16, 7).to(torch.int16).view(F16).float()
    x = torch.cat([x, x * (1 + 2**-20), x * (1 - 2**-20), torch.tensor([1.5, 2.5, 3.5]) * 2.0**-9])
    x = x[x.abs() <= codec.levels]
    x = torch.nn.functional.pad(x, (0, -len(x) % 63)).view(-1, 63)
    x = torch.nn.functional.pad(x, (0, 1), value=codec.levels).flatten()
    codes = codec_kernels.encode(codec, x).view(-1, codec.block_bytes)[:, :-4]
    assert torch.equal(codes.flatten(), x.to(codec.dtype).view(torch.uint8))


def test_nothing_is_written_past_the_end() -> None:
    """Each result is a part of a larger buffer, whose rest stays."""
    whole: list[Tensor] = []

    def part(size: int, dtype: torch.dtype = F32) -> Tensor:
        whole.append(torch.full((size + 40,), 77, dtype=dtype))
        return whole[-1][20 : size + 20]

    for size in (1, 129, 1025):
        p, m, v, copy = (part(size, t) for t in (F32, F32, F32, BF16))
        adamw.adamw_(p, values(size), m, v, torch.tensor(1), torch.tensor(1e-3), *STEP, copy=copy)
        cast.cast(part(size, F16), values(size))
        rounding.stochastic_round(values(size), torch.tensor(1), out=part(size, BF16))
        for codec in CODECS.values():
            message = part(message_bytes(size, codec), torch.uint8)
            codec_kernels.encode(codec, values(size), out=message)
            codec_kernels.decode(codec, message, out=part(-(-size // 64) * 64))
    assert all((t[:20] == 77).all() and (t[-20:] == 77).all() for t in whole)
