"""AdamW in 8 bits, in Triton's interpreter: run by test_kernels.py with TRITON_INTERPRET=1.

The kernel promises the operator's bits where the root is IEEE's. PyTorch's on the CPU is not (MKL's: up to 0.75 units
in the last place), so the operator is run with one that is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fzero.kernels import KERNELS, adam8_kernel
from fzero.optim import _adam8

assert os.environ["TRITON_INTERPRET"] == "1"
STEP: Any = (0.9, 0.999, 1e-8, 0.1)
LR = torch.tensor(1e-2, dtype=torch.float64)
few = settings(max_examples=12, deadline=None, derandomize=True, database=None)
floats = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
sizes = st.sampled_from([0, 1, 63, 64, 65, 1023, 1024, 1025]) | st.integers(0, 2200)


@pytest.fixture(autouse=True, scope="module")
def _ieee_roots() -> Iterator[None]:
    own = Tensor.sqrt, Tensor.sqrt_

    def root(x: Tensor) -> Tensor:
        return torch.as_tensor(np.sqrt(x.numpy()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "sqrt", root)
        patch.setattr(Tensor, "sqrt_", lambda x: x.copy_(root(x)))
        yield
    assert own == (Tensor.sqrt, Tensor.sqrt_)


def state(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """(param, grad, mu, mu_scales, nu, nu_scales) as they are after some steps."""
    generator = torch.Generator().manual_seed(seed)
    p, g, m = (torch.randn(size, generator=generator).to(dtype) for _ in range(3))
    g[: size // 3] *= 1e-4
    v = torch.rand(size, generator=generator) ** 4
    v[size // 2 :] *= 1e-6
    mu, mu_scales = _adam8.encode_mu(_adam8._blocks(m.float() * 0.1))
    nu, nu_scales = _adam8.encode_nu(_adam8._blocks(v), torch.zeros(-(-size // 64), 64, dtype=torch.int32))
    return [p, g, mu.view(-1)[:size].clone(), mu_scales, nu.view(-1)[:size].clone(), nu_scales]


def both(tensors: list[Tensor], count: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernel and what the operator makes: (param, mu, mu_scales, nu, nu_scales)."""
    results = []
    for step in (adam8_kernel.adamw8_, _adam8.adamw8_):
        own = [t.clone() for t in tensors]
        step(*own, torch.tensor(count), LR, *STEP)
        results.append([own[0], *own[2:]])
    return results[0], results[1]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0)) if a.is_floating_point() else torch.equal(a, b)


@few
@given(sizes, floats, st.sampled_from([1, 2, 3, 1000, 12_345]))
def test_a_step_has_the_bits_of_the_operator(size: int, dtype: torch.dtype, count: int) -> None:
    got, wanted = both(state(size, dtype), count)
    assert all(same(a, b) for a, b in zip(got, wanted, strict=True))


def test_fifty_steps_from_nothing() -> None:
    own, other = ([torch.ones(700), *_zero(700)] for _ in range(2))
    for count in range(1, 51):
        g = torch.randn(700, generator=torch.Generator().manual_seed(count)) * torch.arange(700) / 100
        adam8_kernel.adamw8_(own[0], g, *own[1:], torch.tensor(count), LR, *STEP)
        _adam8.adamw8_(other[0], g, *other[1:], torch.tensor(count), LR, *STEP)
    assert all(same(a, b) for a, b in zip(own, other, strict=True))
    assert not torch.equal(own[0], torch.ones(700))


def _zero(size: int) -> list[Tensor]:
    blocks = -(-size // 64)
    codes = torch.zeros(size, dtype=torch.int8), torch.zeros(size, dtype=torch.uint8)
    return [codes[0], torch.zeros(blocks), codes[1], torch.zeros(blocks)]


@pytest.mark.parametrize("lost", [float("inf"), float("-inf"), float("nan"), 3e38, 1e-40])
def test_what_is_lost_stays_in_its_block(lost: float) -> None:
    tensors = state(200)
    tensors[1][70] = lost
    (p, m, ms, v, vs), wanted = both(tensors)
    free = ms.isnan().repeat_interleave(64)[:200]  # codes of a NaN mean nothing
    assert same(p, wanted[0])
    assert torch.equal(m[~free], wanted[1][~free])
    assert same(ms, wanted[2])
    free = vs.isnan().repeat_interleave(64)[:200]
    assert torch.equal(v[~free], wanted[3][~free])
    assert same(vs, wanted[4])
    clean = both(state(200))[0]
    assert torch.equal(p[:64], clean[0][:64])
    assert torch.equal(m[128:], clean[1][128:])
    decoded = adam8_kernel.decode_reference(m, ms)
    assert decoded[64:128].isfinite().all() == (abs(lost) < 1e39)


@few
@given(st.integers(65, 2000), st.data())
def test_a_slice_on_blocks_has_the_bits_of_the_whole(size: int, data: Any) -> None:
    tensors = state(size)
    first = data.draw(st.integers(0, size // 64))
    part, blocks = slice(first * 64, size), slice(first, None)
    cut = [t[blocks] if i in (3, 5) else t[part] for i, t in enumerate(tensors)]
    whole, sliced = both(tensors)[0], both(cut)[0]
    for i, (a, b) in enumerate(zip(whole, sliced, strict=True)):
        assert same(a[blocks] if i in (2, 4) else a[part], b)


def test_the_pure_form_writes_nothing_over() -> None:
    tensors = state(300)
    before = [t.clone() for t in tensors]
    new = KERNELS["fzero.adamw8.default"].launch(*tensors, torch.tensor(3), LR, *STEP)
    assert all(same(a, b) for a, b in zip(tensors, before, strict=True))
    assert all(same(a, b) for a, b in zip(new, both(tensors)[0], strict=True))


def test_the_reference_decodes_what_the_operator_encodes() -> None:
    _, _, m, ms, v, vs = state(300)
    blocks = _adam8._blocks
    torch.testing.assert_close(adam8_kernel.decode_reference(m, ms), _adam8.decode_mu(blocks(m), ms).view(-1)[:300])
    torch.testing.assert_close(adam8_kernel.decode_reference(v, vs), _adam8.decode_nu(blocks(v), vs).view(-1)[:300])
