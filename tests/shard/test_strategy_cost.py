"""The price of each transfer, and the preferences in it."""

from __future__ import annotations

import pytest
import torch

from fzero.shard.placements import Partial, Placement, Replicated, Shard
from fzero.shard.strategy_cost import SCATTERED_UNASKED, TRANSFER, Fetch, fewest_bytes

VALUE = torch.empty(8, 16, device="meta")
NBYTES, SHARE = 8 * 16 * 4, 8 * 16 * 4 * 3 / 4  # of four ranks each sends three quarters
R, P, S0, S1 = Replicated(), Partial(), Shard(0), Shard(1)


@pytest.mark.parametrize(
    ("source", "want", "why", "cost"),
    [
        (P, R, {}, 2 * SHARE + TRANSFER),
        (S0, R, {}, SHARE + TRANSFER),
        (S0, R, {"readers": 3}, SHARE / 3 + TRANSFER),
        (S0, S1, {}, SHARE / 4 + TRANSFER),
        (R, S0, {}, NBYTES),  # a part that nobody asked for
        *[(R, S0, {why: True}, 0.0) for why in ("beside", "along", "drawn")],
        (R, S0, {"wished": True}, NBYTES),  # the op's result decides that
        (P, S0, {}, SCATTERED_UNASKED * SHARE),
        *[(P, S0, {why: True}, SHARE + TRANSFER) for why in ("beside", "wished", "along")],
        (P, S0, {"readers": 3, "beside": True}, SHARE + TRANSFER),
    ],
    ids=str,
)
def test_each_transfer(source: Placement, want: Placement, why: dict[str, int], cost: float) -> None:
    assert fewest_bytes(Fetch(VALUE, source, want, 4, **why)) == cost


def test_a_scatter_that_nobody_asked_for_loses_against_the_sum() -> None:
    """And of ways that send as much, the one with fewer transfers wins."""
    assert fewest_bytes(Fetch(VALUE, P, S0, 4)) > fewest_bytes(Fetch(VALUE, P, R, 4))
    assert 0 < TRANSFER < 1
