"""The optimizers' operators: torch's bits, bits that do not depend on slices, and what they refuse."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.optim import _ops

HYPER = (0.9, 0.99, 1e-8, 0.1)
few = settings(max_examples=25, deadline=None, derandomize=True)


def operands(n: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    p, g, m, v = (torch.randn(n) for _ in range(4))
    return [t.to(dtype) for t in (p, g, m, v.square())]


def scalars(count: int, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(count), torch.tensor(lr, dtype=torch.float64)


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_op_is_torch_fused_bit_for_bit(decoupled: bool) -> None:
    torch.manual_seed(0)
    p, _, m, v = operands(1037)
    m, v = torch.zeros_like(m), torch.zeros_like(v)
    ours, leaf = p.clone(), p.clone().requires_grad_()
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = cls([leaf], lr=3e-3, betas=HYPER[:2], weight_decay=HYPER[3], fused=True)
    for step in range(1, 21):
        g = torch.randn_like(p)
        ours, m, v = _ops.adamw(ours, g, m, v, *scalars(step, 3e-3), *HYPER, decoupled)
        leaf.grad = g
        optimizer.step()
    state = optimizer.state[leaf]
    for x, y in ((ours, leaf), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@given(size=st.integers(0, 5000), cuts=st.lists(st.integers(0, 78)), seed=st.integers(0, 2**31))
@few
def test_slices_on_64_elements_have_the_bits_of_the_whole(dtype: Any, size: int, cuts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    whole, last = operands(size, dtype), (*scalars(7, 1e-2), *HYPER, True)
    cut = [t.clone() for t in whole]
    _ops.adamw_(*whole, *last)
    edges = sorted({0, size, *(64 * c for c in cuts if 64 * c < size)})
    for start, end in zip([0, *edges], edges, strict=False):
        _ops.adamw_(*(t[start:end] for t in cut), *last)
    assert all(torch.equal(x, y) for x, y in zip(whole, cut, strict=True))


@pytest.mark.parametrize("transposed", range(16))
def test_strides_do_not_matter(transposed: int) -> None:
    plain, last = operands((6, 5)), (*scalars(2, 1e-2), *HYPER, False)
    strided = [t.t().contiguous().t() if transposed >> i & 1 else t.clone() for i, t in enumerate(plain)]
    pure = _ops.adamw(*strided, *last)
    assert [t.stride() for t in pure] == [strided[i].stride() for i in (0, 2, 3)]
    _ops.adamw_(*plain, *last)
    _ops.adamw_(*strided, *last)
    for x, y, z in zip((plain[0], plain[2], plain[3]), (strided[0], strided[2], strided[3]), pure, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-7)
        assert torch.equal(y, z)


def test_a_slice_with_gaps_is_updated_alone() -> None:
    wide, last = torch.zeros(4, 8), (*scalars(1, 0.1), 0.9, 0.99, 1e-8, 0.0, True)
    _ops.adamw_(wide[:, :3], torch.ones(4, 3), torch.zeros(4, 3), torch.zeros(4, 3), *last)
    torch.testing.assert_close(wide[:, :3], torch.full((4, 3), -0.1))
    assert not wide[:, 3:].any()


def test_ops_agree_with_their_shape_rules() -> None:
    last = (*scalars(1, 1e-2), *HYPER, True)
    checks = ("test_schema", "test_faketensor")
    for args in (operands((3, 5)), operands(()), operands(0), [t.t() for t in operands((3, 5))]):
        torch.library.opcheck(torch.ops.fzero.adamw.default, (*args, *last), test_utils=checks)
        torch.library.opcheck(torch.ops.fzero.adamw_.default, (*args, *last), test_utils=checks)
        torch.library.opcheck(torch.ops.fzero.delta.default, args[:2], test_utils=checks)
        torch.library.opcheck(torch.ops.fzero.apply_delta.default, args[:2], test_utils=checks)
        torch.library.opcheck(torch.ops.fzero.sum_squares.default, args[:1], test_utils=checks)


def test_tags() -> None:
    for name in ("adamw", "adamw_", "delta", "apply_delta"):
        assert torch.Tag.pointwise in getattr(torch.ops.fzero, name).default.tags
    assert torch.Tag.pointwise not in torch.ops.fzero.sum_squares.default.tags


def test_the_op_refuses_what_the_kernel_would_misread() -> None:
    p, g, m, v = operands(4)
    last = (*scalars(1, 0.1), *HYPER, True)
    with pytest.raises(ValueError, match=r"grad has shape \(3,\), param has shape \(4,\)"):
        _ops.adamw(p, g[:3], m, v, *last)
    with pytest.raises(TypeError, match=r"mu is torch.bfloat16, param is torch.float32"):
        _ops.adamw(p, g, m.bfloat16(), v, *last)
    with pytest.raises(ValueError, match=r"lr has shape \(1,\), but it must be 0-d"):
        _ops.adamw_(p, g, m, v, last[0], last[1][None], *HYPER, True)
    with pytest.raises(TypeError, match=r"x is torch.int64"):
        _ops.sum_squares(torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 200_001])
def test_sum_squares(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    buffer = torch.randn(size + 3).to(dtype)
    x = buffer[3:]
    got = _ops.sum_squares(x)
    assert got.shape == ()
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(math.fsum(v * v for v in x.tolist()), rel=1e-13)
    assert torch.equal(got, _ops.sum_squares(x.clone())), "the bits depend on where the tensor lies"


def test_sum_squares_does_not_lose_small_terms() -> None:
    x = torch.full((100_000,), 1e-4)
    x[0] = 1e4  # a float32 sum would drop every other term
    assert _ops.sum_squares(x).item() > 1e8
    assert _ops.sum_squares(torch.ones(2, 3).t()).item() == 6.0


@pytest.mark.gpu
@pytest.mark.parametrize("decoupled", [True, False])
def test_cuda_agrees_with_cpu_and_does_not_synchronise(decoupled: bool) -> None:
    torch.manual_seed(0)
    host, last = operands(64 * 1000 + 17), (*scalars(3, 1e-2), *HYPER, decoupled)
    device = [t.cuda() for t in host]
    on_device = [x.cuda() if isinstance(x, torch.Tensor) else x for x in last]
    cut = [t.clone() for t in device]
    torch.cuda.set_sync_debug_mode("error")
    try:
        _ops.adamw_(*device, *on_device)
        _ops.adamw_(*(t[:6400] for t in cut), *on_device)
        _ops.adamw_(*(t[6400:] for t in cut), *on_device)
        total = _ops.sum_squares(device[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(device, cut, strict=True))
    _ops.adamw_(*host, *last)
    for x, y in zip(device, host, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-5, atol=1e-6)
    assert total.item() == pytest.approx(_ops.sum_squares(host[0]).item(), rel=1e-6)
