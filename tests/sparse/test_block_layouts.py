"""block_layouts: against definitions block by block, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fzero import random
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
    ).blocks(2)
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
    ).blocks(3)
    for h, i, j in itertools.product(range(3), range(8), range(8)):
        first = 4 - (1 + h % 2) * wide
        within = first <= j % 4 < first + wide
        reach = attention == "bidirectional" or i >= j // 4 * 4 + first
        local = i // 4 == j // 4 and (j <= i or attention == "bidirectional")
        seen = (local or (within and reach)) and (j <= i or attention == "bidirectional")
        assert bool(got[h, i, j]) == seen, (h, i, j)


def test_from_mask_and_dense() -> None:
    mask = torch.zeros(1, 8, 8, dtype=torch.bool)
    mask[0, 5, 2] = True
    assert layouts.from_mask(mask, block=4).blocks().tolist() == [[[False, False], [True, False]]]
    every = layouts.from_mask(~torch.zeros_like(mask), block=4)
    assert torch.equal(layouts.dense(1, 8, block=4).blocks(), every.blocks())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 100])
@pytest.mark.parametrize("block", [4, 16, None])
def test_sliding_window(window: int, causal: bool, block: int | None) -> None:
    layout = layouts.sliding_window(64, window=window, causal=causal, block=block)
    ahead = torch.arange(64) - torch.arange(64)[:, None]
    near = (ahead > -window) & (ahead <= 0) if causal else ahead.abs() <= window // 2
    assert torch.equal(layout.tokens()[0], near)
    count = 64 // layout.block
    held = near.view(count, layout.block, count, layout.block).any(3).any(1)
    assert torch.equal(layout.blocks()[0], held), "no block is visited for nothing"
    assert layout.rules.width(count) >= int(held.sum(-1).max())


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
def test_bigbird(attention: str) -> None:
    key = random.key(3)
    options = {"num_random_blocks": 2, "attention": attention, "different_layout_per_head": True}
    layout = layouts.bigbird(3, 32 * 16, key=key, **options)
    got = layout.blocks(3)
    assert torch.equal(got, layouts.bigbird(3, 32 * 16, key=key, **options).blocks(3))
    assert not torch.equal(got, layouts.bigbird(3, 32 * 16, key=random.key(4), **options).blocks(3))
    assert not torch.equal(got[0], got[1])
    at = torch.arange(32)
    plain = ((at[:, None] - at).abs() <= 1) | (at == 0) | (at[:, None] == 0)
    plain = plain.tril() if attention == "unidirectional" else plain
    assert (got | ~plain).all()
    drawn = (got & ~plain).sum(-1)
    assert int(drawn.max()) == 2
    assert 1.5 <= float(drawn[:, 8:].float().mean()) <= 2, "of those drawn, few fall on the others"
    assert not (got.triu(1).any() and attention == "unidirectional")


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
def test_variable(attention: str) -> None:
    given = torch.tensor([[[7], [0], [1], [2], [3], [4], [5], [6]]])
    got = layouts.variable(
        2, 8 * 16, local_window_blocks=(1, 3, 2), global_block_indices=(1,), attention=attention,
        num_random_blocks=1, random_blocks=given,
    ).blocks(2)  # fmt: skip
    window = (0, 1, 1, 1, 2, 2, 3, 3)
    causal = attention == "unidirectional"
    for h, i, j in itertools.product(range(2), range(8), range(8)):
        own = window[i] == window[j] or (j == 1 and (i >= 1 or not causal)) or int(given[0, i, 0]) == j
        assert bool(got[h, i, j]) == (own and (j <= i or not causal)), (h, i, j)


def test_from_columns() -> None:
    """In any order, with a table of its own for each batch."""
    chosen = torch.tensor([[[[1, 0], [-1, 0]]], [[[0, -1], [1, 0]]]])
    layout = layouts.from_columns(chosen, block=4, causal=True)
    assert layout.columns is not None
    assert layout.columns.tolist() == [[[[0, 1], [0, -1]]], [[[0, -1], [0, 1]]]]
    assert (layout.seq_len, layout.block, layout.right) == (8, 4, 0)
    with pytest.raises(SpecError, match="a layout of 2 batches"):
        layout.blocks()


def test_a_layout_is_a_picture() -> None:
    text = str(layouts.fixed(1, 8 * 16, num_local_blocks=2, attention="unidirectional"))
    assert text.splitlines()[:3] == [
        "128 tokens in blocks of 16, keys from any back to 0 ahead: 24 of 64 blocks",
        "# . . . . . . .",
        "# # . . . . . .",
    ]
    assert len(str(layouts.dense(1, 64 * 16)).splitlines()) == 1, "too many for a picture"


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
    with pytest.raises(SpecError, match="window=0; needed at least 1 token"):
        layouts.sliding_window(64, window=0)
    with pytest.raises(SpecError, match="100 tokens are no multiple of block=16; pad by 12 to 112"):
        layouts.sliding_window(100, window=8)
    with pytest.raises(SpecError, match=r"num_random_blocks=1; needed key=fzero.random.key\(0\), or random_blocks="):
        layouts.bigbird(1, 64)
    with pytest.raises(SpecError, match=r"random_blocks has shape \(1, 4, 2\); needed \(1, 4, 1\), from 0 to 3"):
        layouts.bigbird(1, 64, random_blocks=torch.zeros(1, 4, 2, dtype=torch.int64))
    with pytest.raises(SpecError, match="num_global_blocks=5 of 4 blocks"):
        layouts.bigbird(1, 64, num_global_blocks=5, num_random_blocks=0)
    with pytest.raises(SpecError, match="needed sizes of at least 1"):
        layouts.variable(1, 64, local_window_blocks=())
    with pytest.raises(SpecError, match="needs attention='bidirectional'"):
        layouts.variable(1, 64, attention="unidirectional", horizontal_global_attention=True)
    with pytest.raises(SpecError, match=r"needed int \(batch, heads, rows, width\)"):
        layouts.from_columns(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: layouts.sliding_window(64, window=4.5), r"window=4.5; needed an int"),  # type: ignore[arg-type]
        (lambda: layouts.sliding_window(64.0, window=4), r"seq_len=64.0"),  # type: ignore[arg-type]
        (lambda: layouts.sliding_window(64, window=0), r"window=0; needed at least 1 token"),
        (lambda: layouts.from_mask([[True]]), r"from_mask: given a list; needed bool"),  # type: ignore[arg-type]
        (lambda: layouts.from_mask(torch.ones(0, 16, 16, dtype=torch.bool)), r"needed bool \(heads, tokens, tokens\)"),
        (lambda: layouts.from_columns([[0]]), r"from_columns: given a list; needed int"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_or_tensor_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        make()


def test_a_window_longer_than_the_text_is_all_of_it() -> None:
    assert torch.equal(
        layouts.sliding_window(64, window=1 << 70, causal=True).tokens()[0], torch.ones(64, 64).tril() > 0
    )
