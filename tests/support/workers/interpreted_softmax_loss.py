"""The loss over a vocabulary in Triton's interpreter, against torch's own: run by test_kernels.py with
TRITON_INTERPRET=1."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stretches import drawn, near, stretch
from torch import Tensor
from torch.nn import functional as F

from fzero.codegen import own_kernels
from fzero.kernels import softmax_loss

aten = torch.ops.aten

assert os.environ["TRITON_INTERPRET"] == "1"
few = settings(max_examples=12, deadline=None, derandomize=True, database=None)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@few
@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(0, 20),
    DTYPES,
    st.booleans(),
    st.booleans(),
    st.sampled_from([-100, 0, 1]),
    st.booleans(),
    st.sampled_from([(64, 64), (2048, 4096), (16, 32)]),
)
def test_loss_and_gradient(
    rows: int, columns: int, more: int, dtype: torch.dtype, mean: bool, seeded: bool, ignored: int, over: bool,
    blocks: tuple[int, int],
) -> None:  # fmt: skip
    """As torch's in fp64; what lies behind the vocabulary is not read, and written with zeros."""
    logits = drawn(rows, columns + more, seed=0, dtype=torch.float32).mul(10).to(dtype)
    logits[:, columns:] = torch.nan
    target = torch.randint(0, columns, (rows,), generator=torch.Generator().manual_seed(1))
    target[rows // 2 :: 3] = ignored
    exact = logits[:, :columns].double().requires_grad_()
    wanted = F.cross_entropy(exact, target, ignore_index=ignored, reduction="mean" if mean else "sum")
    seed = torch.tensor(0.5) if seeded else None
    wanted.backward(None if seed is None else seed.double())
    out, loss = logits.clone() if over else torch.full_like(logits, 3.0), torch.tensor(torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_loss, "AT_ONCE", blocks[0])
        patch.setattr(softmax_loss, "WRITTEN", blocks[1])
        softmax_loss.softmax_loss(
            out if over else logits, target, seed, loss, out, columns=columns, mean=mean, ignored=ignored
        )
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert exact.grad is not None
    assert near(out[:, :columns], exact.grad)
    assert not out[:, columns:].any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_torchs(bad: float) -> None:
    x = torch.tensor([[0.0, bad, 1.0], [1.0, 2.0, 3.0], [-math.inf, 0.0, -math.inf]])
    target = torch.tensor([1, 0, 1])
    exact = x.clone().requires_grad_()
    losses = F.cross_entropy(exact, target, reduction="sum")
    losses.backward()
    out, loss = torch.empty_like(x), torch.tensor(0.0)
    softmax_loss.softmax_loss(x, target, None, loss, out, columns=3, mean=False, ignored=-100)
    torch.testing.assert_close(loss, losses.detach(), equal_nan=True)
    torch.testing.assert_close(out, exact.grad, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e6, 1e6, 3e38])
def test_rows_of_large_numbers_are_torchs(least: float) -> None:
    """The complaint: a row that is masked with the least number had a loss of -inf, and gradients of inf."""
    x, target = torch.full((2, 4), least), torch.tensor([1, 3])
    out, loss = torch.empty_like(x), torch.tensor(0.0)
    softmax_loss.softmax_loss(x, target, None, loss, out, columns=4, mean=True, ignored=-100)
    assert float(loss) == pytest.approx(math.log(4), rel=1e-6)
    assert out[0].tolist() == pytest.approx([0.125, -0.375, 0.125, 0.125], rel=1e-6)


@pytest.mark.parametrize("bad", [-1, 3, 4, 1 << 40])
def test_a_target_that_is_no_column_is_seen(bad: int) -> None:
    x, target = torch.zeros(2, 4), torch.tensor([1, bad])
    out, loss = torch.empty_like(x), torch.tensor(0.0)
    softmax_loss.softmax_loss(x, target, None, loss, out, columns=3, mean=True, ignored=-100)
    assert loss.isnan()
    assert out[1, :3].isnan().all()
    assert out[0].isfinite().all()


# ---- the stretches that have this kernel -----------------------------------------------------------------------------


def both(reduction: int, cast: bool = True, seeded: bool = False, pad: int = 0, backward: int = 0) -> Any:
    """The loss of logits (8, 12 + pad) and its gradient, as a step has them."""

    def fn(x: Tensor, y: Tensor, *seed: Tensor) -> list[Tensor]:
        cut = aten.slice(x, -1, 0, 12).view(2, 4, 12) if pad else x.view(2, 4, 12)
        logs = aten._log_softmax((cut.float() if cast else cut).view(8, 12), 1, False)
        target = y.view(8)
        loss, count = aten.nll_loss_forward(logs, target, None, reduction, -100)
        grad = seed[0] if seeded else torch.ones_like(loss)
        zeros = aten.nll_loss_backward(grad, logs, target, None, backward or reduction, -100, count)
        found = aten._log_softmax_backward_data(zeros, logs, 1, torch.float32).view(2, 4, 12)
        low = (found.to(torch.bfloat16) if cast else found).view(8, 12)
        return [loss, aten.constant_pad_nd(low, [0, pad, 0, 0]) if pad else low]

    return fn


LOGITS = drawn(8, 12, seed=0, dtype=torch.bfloat16)
WIDE = drawn(8, 16, seed=0, dtype=torch.bfloat16)
Y = torch.tensor([[0, 3, -100, 5], [11, 2, 2, 7]])
SEED = torch.tensor(3.0)


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (both(1), [LOGITS, Y]),
        (both(2), [LOGITS, Y]),
        (both(1, cast=False), [LOGITS.float(), Y]),
        (both(1, seeded=True), [LOGITS, Y, SEED]),
        (both(1, pad=4), [WIDE, Y]),
        (both(2, seeded=True, pad=4), [WIDE, Y, SEED]),
    ],
)
def test_a_stretch_runs_as_one_kernel(fn: Any, inputs: list[Tensor]) -> None:
    run = own_kernels.kernel_for(stretch(fn, inputs))
    assert run is not None
    assert run.over == (0, len(inputs) + 1)
    wanted = fn(*inputs)
    got = [torch.full_like(x, torch.nan) for x in wanted]
    for into in (got[1], inputs[0].clone()):  # elsewhere, and over the logits
        given = [into if into is not got[1] else inputs[0], *inputs[1:]]
        run(*given, got[0], into)
        assert near(got[0], wanted[0])
        assert near(into, wanted[1])


def read_elsewhere(x: Tensor, y: Tensor) -> list[Tensor]:
    loss, grad = both(1)(x, y)
    return [loss, grad, x + 1]


def scaled(x: Tensor, y: Tensor) -> list[Tensor]:
    loss, grad = both(1)(x, y)
    return [loss * 2, grad]


def kept_in_fp32(x: Tensor, y: Tensor) -> list[Tensor]:
    loss, grad = both(1, cast=False)(x.float(), y)
    return [loss, grad]


def turned(x: Tensor, y: Tensor) -> list[Tensor]:
    loss, grad = both(1)(x, y)
    return [loss, grad.t().contiguous()]


def weighed(x: Tensor, y: Tensor) -> list[Tensor]:
    logs = aten._log_softmax(x.float(), 1, False)
    weight = torch.ones(12)
    loss, count = aten.nll_loss_forward(logs, y.view(8), weight, 1, -100)
    zeros = aten.nll_loss_backward(torch.ones_like(loss), logs, y.view(8), weight, 1, -100, count)
    return [loss, aten._log_softmax_backward_data(zeros, logs, 1, torch.float32).to(torch.bfloat16)]


def of_several_labels(x: Tensor, y: Tensor) -> list[Tensor]:
    """Rows of 12 logits that are two labels' of six."""
    target = y.view(16)
    logs = aten._log_softmax(x.float().view(16, 6), 1, False)
    loss, count = aten.nll_loss_forward(logs, target, None, 1, -100)
    zeros = aten.nll_loss_backward(torch.ones_like(loss), logs, target, None, 1, -100, count)
    found = aten._log_softmax_backward_data(zeros, logs, 1, torch.float32)
    return [loss, found.view(8, 12).to(torch.bfloat16)]


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (of_several_labels, [LOGITS, Y.clamp(0, 5).repeat(2, 1)]),
        (read_elsewhere, [LOGITS, Y]),
        (scaled, [LOGITS, Y]),
        (kept_in_fp32, [LOGITS, Y]),
        (turned, [LOGITS, Y]),
        (weighed, [LOGITS, Y]),
        (both(1, backward=2), [LOGITS, Y]),
        (both(1, cast=False), [LOGITS.double(), Y]),
        (both(1, cast=False), [LOGITS, Y]),
    ],
)
def test_other_stretches_have_none(fn: Any, inputs: list[Tensor]) -> None:
    """More than the kernel does, other rows, other dtypes, weights, a gradient of another reduction."""
    assert own_kernels.kernel_for(stretch(fn, inputs)) is None
