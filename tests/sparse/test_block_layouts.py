"""block_layouts: against definitions block by block, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from fzero.errors import SpecError
from fzero.sparse import block_layouts as layouts


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("globals_", [((0,), (1,)), ((2, 5), (4, 6)), ((9,), (10,))])
def test_longformer(attention: str, window: int, globals_: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    starts, ends = globals_
    got = layouts.longformer(
        2,
        8 * 16,
        num_sliding_window_blocks=window,
        global_block_indices=starts,
        global_block_end_indices=ends,
        attention=attention,
    )
    for h, i, j in itertools.product(range(2), range(8), range(8)):
        wide = any(s <= x < e for s, e in zip(starts, ends, strict=True) for x in (i, j))
        want = (abs(i - j) <= window // 2 or wide) and (j <= i or attention == "bidirectional")
        assert bool(got[h, i, j]) == want, (h, i, j)


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize("wide", [1, 2])
def test_fixed(attention: str, wide: int) -> None:
    got = layouts.fixed(
        3,
        8 * 16,
        num_global_blocks=wide,
        attention=attention,
        num_different_global_patterns=2,
        different_layout_per_head=True,
    )
    for h, i, j in itertools.product(range(3), range(8), range(8)):
        first = 4 - (1 + h % 2) * wide
        within = first <= j % 4 < first + wide
        reach = attention == "bidirectional" or i >= j // 4 * 4 + first
        local = i // 4 == j // 4 and (j <= i or attention == "bidirectional")
        assert bool(got[h, i, j]) == (local or (within and reach)), (h, i, j)


def test_from_mask_and_dense() -> None:
    mask = torch.zeros(1, 8, 8, dtype=torch.bool)
    mask[0, 5, 2] = True
    assert layouts.from_mask(mask, block=4).tolist() == [[[False, False], [True, False]]]
    assert torch.equal(layouts.dense(1, 8, block=4), layouts.from_mask(~torch.zeros_like(mask), block=4))


def test_refusals() -> None:
    with pytest.raises(SpecError, match="100 tokens are no multiple of block=16; pad by 12 to 112"):
        layouts.dense(1, 100)
    with pytest.raises(SpecError, match="needed one of unidirectional, bidirectional"):
        layouts.fixed(1, 64, attention="both")
    with pytest.raises(SpecError, match="no multiple of num_global_blocks=3"):
        layouts.fixed(1, 64, num_global_blocks=3)
    with pytest.raises(SpecError, match="needed 1 to 1"):
        layouts.fixed(1, 64, num_different_global_patterns=2)
    with pytest.raises(SpecError, match="needs attention='bidirectional'"):
        layouts.fixed(1, 64, attention="unidirectional", horizontal_global_attention=True)
    with pytest.raises(SpecError, match="needed at most 4"):
        layouts.longformer(1, 64, num_sliding_window_blocks=5)
    with pytest.raises(SpecError, match="needed 0 <= start < end"):
        layouts.longformer(1, 64, global_block_indices=(2,), global_block_end_indices=(2,))
    with pytest.raises(SpecError, match="needed one end each"):
        layouts.longformer(1, 64, global_block_indices=(2,), global_block_end_indices=())
    with pytest.raises(SpecError, match="needed bool"):
        layouts.from_mask(torch.zeros(2, 2))
