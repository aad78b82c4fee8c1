"""`fzero fake-cuda`: the attention op that torch takes on an H100, beside torch's own numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fzero._torch_compat.fake_cuda import _attention


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5, 8), torch.float32), ((2, 3, 5, 8), torch.float64), ((2, 3, 5, 7), torch.float32), ((5, 8), torch.float32)],
    ids=["three dims", "64 bits", "odd width", "two dims"],
)
def test_plain_products_where_no_kernel_takes_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Three dims ended in an IndexError of the memory-efficient kernel's backward."""
    q, k, v = (torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(i)) for i in range(3))
    torch.testing.assert_close(
        _attention(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )


def test_a_kernel_where_one_does() -> None:
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_efficient_attention"):
        _attention(*torch.randn(3, 2, 3, 5, 8))
