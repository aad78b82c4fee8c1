"""Block-sparse attention in Triton's interpreter: run by test_kernels.py with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from sparse_calls import SparseCall, drawn, masked

from fzero.kernels import block_sparse

assert os.environ["TRITON_INTERPRET"] == "1"
few = settings(max_examples=12, deadline=None, derandomize=True, database=None)


def interpreted(call: SparseCall) -> list[torch.Tensor]:
    q, k, v, grad = call.tensors
    out = block_sparse.attention_out(*call.args, out=torch.empty_like(grad))
    into = {name: torch.full_like(x, torch.nan) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    return [out, *block_sparse.backward_out(grad, *call.args, **into)]


def far(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in zip(got, wanted, strict=True))


@few
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]))
def test_numbers_are_those_of_masked_sdpa(seed: int, rows: int) -> None:
    call = drawn(seed, block=16, rows=rows, batch=1, groups=1 + seed % 2, repeat=1 + seed % 3 // 2)
    assert far(interpreted(call), masked(call, torch.float64)) <= 1e-5


@pytest.mark.parametrize("bounds", [(-1, -1), (0, 0), (16, 0), (17, 3), (5, -1)])
def test_edges_of_windows(bounds: tuple[int, int]) -> None:
    call = drawn(3, block=16, rows=3, batch=1, groups=1, repeat=1, table="none", bounds=bounds, documents=False)
    assert far(interpreted(call), masked(call, torch.float64)) <= 1e-5


def test_operands_of_other_strides() -> None:
    call = drawn(4, block=16, rows=2)
    first = interpreted(call)
    turned = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in call.tensors[:3])
    out = block_sparse.attention_out(*turned, *call.args[3:], out=torch.empty_like(call.tensors[3]))
    assert torch.equal(out, first[0])
