"""Parts of uniform numbers are those of the whole, whatever is drawn to make them."""

from __future__ import annotations

import pytest
import torch

import fzero


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 8, 64), (3, 1024), (2, 6, 500), (7, 300)], ids=str)
def test_parts_are_those_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    key = fzero.random.key(5)
    whole = torch.ops.fzero.uniform(key, list(shape), dtype, -1.0, 2.0)
    for dim, size in enumerate(shape):
        for n in (n for n in (1, 2, 3, 4) if size % n == 0):
            for rank, part in enumerate(whole.chunk(n, dim)):
                drawn = torch.ops.fzero.uniform_part(
                    key, list(shape), dtype, -1.0, 2.0, torch.tensor(rank), n, dim
                )  # fmt: skip
                assert torch.equal(drawn, part)
