"""Ranks that start again find nothing of an earlier start in the store that they share with it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import fzero
from fzero.comm.store_prefix import prefixed


def started(store: dist.Store, world: int, order: list[int]) -> list[str]:
    """What each rank reads under one key after all have written it, having come in this order."""
    gates = [threading.Event() for _ in order]

    def rank(r: int) -> str:
        if (place := order.index(r)) > 0:
            assert gates[place - 1].wait(20)
        gates[place].set()  # the next may come while this one waits
        mine = prefixed(store, r, world, 20.0)
        assert not mine.check(["left"]), "something of an earlier start"
        assert mine.add("came", 1) <= world
        mine.wait(["came"])
        while mine.add("came", 0) < world:
            pass
        mine.set("left", "1")
        return str(mine.add("came", 0))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_each_start_meets_in_a_part_of_its_own(order: list[int]) -> None:
    store = dist.HashStore()
    for _ in range(3):
        assert started(store, 3, order) == ["3"] * 3


def test_a_start_that_died_half_way_leaves_nothing_that_counts() -> None:
    """A rank that wrote its token and died, and another world size, before the one that comes together."""
    store = dist.HashStore()
    for rank, world, missing in ((1, 2, 0), (0, 2, 1), (0, 3, 2)):
        message = rf"rank {rank}: rank {missing} of {world} did not come within 0.05 s to start the process group"
        with pytest.raises(fzero.HangError, match=message) as error:
            prefixed(store, rank, world, 0.05)
        assert error.value.missing == (missing,)
    assert started(store, 2, [0, 1]) == ["2"] * 2
    assert started(store, 3, [2, 0, 1]) == ["3"] * 3


@pytest.mark.parametrize("foreign", ["x", b"\xff\xfe", "0 1 99999 -1 " + "9" * 5000, "A" * 1_000_000])
@pytest.mark.parametrize("key", ["token/1", "offer", "accepted/1", "go", "missing"])
def test_what_fzero_did_not_write_ends_in_an_error_of_its_own(
    foreign: str | bytes, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's store is open to every program that reaches its port."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "mine")
    store = dist.HashStore()
    store.set(f"fzero/rounds/{'missing/mine' if key == 'missing' else key}", foreign)
    for rank in (0, 1):
        with pytest.raises(fzero.HangError, match=rf"rank {rank}: .*did not come within 0.02 s") as error:
            prefixed(store, rank, 2, 0.02)
        assert set(error.value.missing) <= {0, 1}
