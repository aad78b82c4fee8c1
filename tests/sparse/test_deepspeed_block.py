"""deepspeed_block: a configuration's block is the layout that DeepSpeed makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fzero import random, sparse
from fzero.errors import SpecError

KEY = random.key(0)
CASES: list[tuple[dict[str, Any], Any]] = [
    ({}, sparse.fixed(4, 128)),
    ({"mode": "dense", "block": 32}, sparse.dense(4, 128, block=32)),
    (
        {
            "mode": "fixed", "block": 16, "different_layout_per_head": True, "num_local_blocks": 4,
            "num_global_blocks": 1, "attention": "bidirectional", "horizontal_global_attention": False,
            "num_different_global_patterns": 4,
        },
        sparse.fixed(4, 128, different_layout_per_head=True, num_different_global_patterns=4),
    ),
    (
        {"mode": "variable", "num_random_blocks": 1, "local_window_blocks": [1, 2], "attention": "unidirectional"},
        sparse.variable(
            4, 128, num_random_blocks=1, local_window_blocks=(1, 2), attention="unidirectional", key=KEY
        ),
    ),
    ({"mode": "bigbird", "num_global_blocks": 2}, sparse.bigbird(4, 128, num_random_blocks=0, num_global_blocks=2)),
    (
        {"mode": "bslongformer", "global_block_indices": [0, 3], "different_layout_per_head": True},
        sparse.longformer(4, 128, global_block_indices=(0, 3)),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "wanted"), CASES)
def test_a_block_is_its_layout(config: dict[str, Any], wanted: sparse.BlockLayout) -> None:
    got = sparse.from_deepspeed(config, 4, 128, key=KEY)
    assert (got.seq_len, got.block, got.right) == (wanted.seq_len, wanted.block, wanted.right)
    assert torch.equal(got.table(4), wanted.table(4))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"mode": "fixd"}, r"mode='fixd'.*Did you mean 'fixed'\?"),
        (
            {"mode": "bigbird", "num_local_blocks": 4},
            "sparse_attention.num_local_blocks: mode 'bigbird' reads block, num",
        ),
        ({"mode": "bigbird", "num_random_blocks": 1}, r"needed key=fzero.random.key\(0\)"),
        ({"block": 24}, "128 tokens are no multiple of block=24; pad by 16 to 144"),
    ],
)
def test_refusals(config: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        sparse.from_deepspeed(config, 4, 128)
