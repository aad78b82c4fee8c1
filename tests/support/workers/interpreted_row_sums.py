"""Sums over rows in Triton's interpreter, against torch's own ops: run by test_kernels.py with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stretches import drawn, made, near, stretch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fzero._torch_compat import FakeTensorMode
from fzero.codegen import own_kernels
from fzero.ir import forms
from fzero.kernels import row_sums

aten = torch.ops.aten

assert os.environ["TRITON_INTERPRET"] == "1"
few = settings(max_examples=12, deadline=None, derandomize=True, database=None)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def is_sum(total: Tensor, of: Tensor) -> bool:
    """The sum of what was written, in fp32, rounded once: within the last place."""
    wanted = of.double().reshape(-1, total.numel()).sum(0)
    room = 2**-7 if of.dtype == torch.bfloat16 else 2**-10 if of.dtype == torch.float16 else 1e-5
    return bool(((total.double() - wanted).abs() <= room * wanted.abs() + 1e-4).all())


@few
@given(st.integers(1, 300), st.integers(1, 600), DTYPES, st.sampled_from(["tanh", "none"]))
def test_gelu(rows: int, width: int, dtype: torch.dtype, approximate: str) -> None:
    grad, x = (drawn(rows, width, seed=seed, dtype=dtype) for seed in (0, 1))
    out, total = made(rows, width, like=x), made(width, like=x)
    row_sums.gelu_backward_sum(grad, x, out, total, approximate=approximate)
    assert near(out, torch.ops.aten.gelu_backward(grad.double(), x.double(), approximate=approximate))
    assert is_sum(total, out)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu_far_from_zero(approximate: str) -> None:
    x = torch.tensor([[-100.0, -20.0, 0.0, 20.0, 100.0]])
    out, total = made(1, 5, like=x), made(5, like=x)
    row_sums.gelu_backward_sum(torch.ones(1, 5), x, out, total, approximate=approximate)
    assert out.tolist() == [[0, 0, 0.5, 1, 1]]
    assert torch.equal(total, out[0])


@few
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 150), st.sampled_from([8, 64, 80]), DTYPES, st.booleans())
def test_pack(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, turned: bool) -> None:
    shape = (batch, length, heads, dim) if turned else (batch, heads, length, dim)
    three = [drawn(*shape, seed=seed, dtype=dtype) for seed in range(3)]
    if turned:
        three = [x.transpose(1, 2) for x in three]
    wanted = torch.stack(three).permute(1, 3, 0, 2, 4).contiguous()
    out, total = made(*wanted.shape, like=wanted), made(3 * heads * dim, like=wanted)
    row_sums.pack_sum(three[0], three[1], three[2], out, total)
    assert torch.equal(out, wanted)
    assert is_sum(total, out)


@few
@given(st.integers(1, 70), st.integers(1, 700), DTYPES, st.booleans(), st.booleans())
def test_layer_norm(rows: int, width: int, dtype: torch.dtype, added: bool, summed: bool) -> None:
    grad, x, more = (drawn(rows, width, seed=seed, dtype=dtype) for seed in range(3))
    weight = 1 + drawn(width, seed=3, dtype=dtype)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x.float(), [width], None, None, 1e-5)
    out, sums = made(rows, width, like=x), [made(width, like=x) for _ in range(2 + summed)]
    row_sums.layer_norm_backward_sums(grad, x, mean, rstd, weight, more if added else None, out, *sums)
    wide = [t.double() for t in (grad, x, mean, rstd, weight)]
    wanted = torch.ops.aten.native_layer_norm_backward(
        wide[0], wide[1], [width], wide[2], wide[3], wide[4], torch.zeros(width).double(), [True, True, True]
    )
    assert near(out, wanted[0] + more.double() if added else wanted[0])
    assert near(sums[0], wanted[1])
    assert near(sums[1], wanted[2])
    assert not summed or is_sum(sums[2], out)


# ---- the stretches that have such a kernel ---------------------------------------------------------------------------


def gelu(grad: Tensor, x: Tensor) -> list[Tensor]:
    dx = aten.gelu_backward(grad.view(2, 16, 48), x.view(2, 16, 48), approximate="tanh")
    return [dx, dx.view(32, 48).sum([0], True).view(48)]


def packing(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    packed = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).clone(memory_format=torch.contiguous_format)
    return [packed, packed.view(32, 48).sum([0], True)]


def norm(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, more: Tensor) -> list[Tensor]:
    dx, dw, db = aten.native_layer_norm_backward(grad, x, [48], mean, rstd, weight, weight, [True, True, True])
    total = more + dx
    return [dw, total, db, total.view(32, 48).sum([0], True)]


def norm_alone(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> list[Tensor]:
    return list(aten.native_layer_norm_backward(grad, x, [48], mean, rstd, weight, weight, [True, True, True]))


def gelu_twice(grad: Tensor, x: Tensor) -> list[Tensor]:
    return [*gelu(grad, x), grad * 2]


def sum_along(grad: Tensor, x: Tensor) -> list[Tensor]:
    dx = aten.gelu_backward(grad, x)
    return [dx, dx.view(32, 48).sum([1], True)]


def packed_and_stacked(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    stacked = torch.stack([q, k, v])
    packed = stacked.permute(1, 3, 0, 2, 4).clone(memory_format=torch.contiguous_format)
    return [packed, packed.view(32, 48).sum([0]), stacked]


def packing_by_part(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    packed = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).clone(memory_format=torch.contiguous_format)
    return [packed, packed.view(96, 16).sum([0])]


def gelu_written_twice(grad: Tensor, x: Tensor) -> list[Tensor]:
    dx, total = gelu(grad, x)
    return [dx, total, dx]


def norm_of_an_odd_width(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> list[Tensor]:
    return list(aten.native_layer_norm_backward(grad, x, [45], mean, rstd, weight, weight, [True, True, True]))


def norm_and_a_row(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> list[Tensor]:
    dx, *sums = norm_alone(grad, x, mean, rstd, weight)
    return [dx + weight, *sums]


def norm_and_a_number(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> list[Tensor]:
    dx, *sums = norm_alone(grad, x, mean, rstd, weight)
    return [dx + 2.0, *sums]


def norm_summed_by_half_rows(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> list[Tensor]:
    dx, *sums = norm_alone(grad, x, mean, rstd, weight)
    return [dx, *sums, dx.view(64, 24).sum([0])]


ROWS = [drawn(2, 16, 48, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
STATS = list(aten.native_layer_norm(ROWS[1].float(), [48], None, None, 1e-5)[1:])
HEADS = [drawn(2, 2, 16, 8, seed=seed, dtype=torch.bfloat16) for seed in range(3)]
NORM = [ROWS[0].float(), ROWS[1].float(), *STATS, 1 + drawn(48, seed=3, dtype=torch.float32), ROWS[2].float()]


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (gelu, ROWS[:2]),
        (packing, HEADS),
        (norm, NORM),
        (norm_alone, NORM[:-1]),
    ],
)
def test_a_stretch_runs_as_one_kernel(fn: Any, inputs: Sequence[Tensor]) -> None:
    gm = stretch(fn, inputs)
    run = own_kernels.kernel_for(gm)
    assert run is not None
    wanted, got = ([torch.full_like(x, torch.nan) for x in fn(*inputs)] for _ in range(2))
    gm(*inputs, *wanted)
    run(*inputs, *got)
    assert all(near(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (gelu_twice, ROWS[:2]),
        (sum_along, ROWS[:2]),
        (gelu, [x.double() for x in ROWS[:2]]),
        (packing, [HEADS[0], HEADS[1], HEADS[2].transpose(1, 2).contiguous().transpose(1, 2)]),
        (norm_alone, [x.double() for x in NORM[:-1]]),
        (gelu_written_twice, ROWS[:2]),
        (packed_and_stacked, HEADS),
        (packing_by_part, HEADS),
        (norm_and_a_row, NORM[:-1]),
        (norm_and_a_number, NORM[:-1]),
        (norm_summed_by_half_rows, NORM[:-1]),
        (norm_of_an_odd_width, [x[..., :45].contiguous() if x.shape[-1] == 48 else x for x in NORM[:-1]]),
    ],
)
def test_other_stretches_have_none(fn: Any, inputs: Sequence[Tensor]) -> None:
    """More than the kernel does, sums along rows, other dtypes, strides, shapes, a result that has two places."""
    run = own_kernels.kernel_for(stretch(fn, inputs))
    assert run is None


@pytest.mark.parametrize("form", [(3, 2, 16, 48), (48, 16, 2)])
def test_a_result_that_is_spread_or_turned_where_it_lies_has_none(form: tuple[int, ...]) -> None:
    def fn(grad: Tensor, x: Tensor, into: Tensor, total: Tensor) -> list[Tensor]:
        dx, found = gelu(grad, x)
        into.copy_(dx)
        total.copy_(found)
        return []

    into = torch.empty(form, dtype=torch.bfloat16)
    inputs = [*ROWS[:2], into if len(form) == 4 else into.permute(2, 1, 0), torch.empty(48, dtype=torch.bfloat16)]
    mode = FakeTensorMode()
    gm = forms.propagate(make_fx(fn)(*inputs), [mode.from_tensor(x) for x in inputs])
    assert own_kernels.kernel_for(gm) is None
