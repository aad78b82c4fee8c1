"""Ranks that start again find nothing of an earlier start in the store that they share with it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import fzero
from fzero.comm import store_prefix
from fzero.comm.store_prefix import prefixed, wait_for_keys

pytestmark = pytest.mark.timeout(60, method="thread")  # each test takes some milliseconds, or waits without end


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
        until = time.monotonic() + 20
        while mine.add("came", 0) < world:
            assert time.monotonic() < until, "the others met elsewhere"
            time.sleep(0.001)
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


def test_rank_0_tells_the_others_who_is_missing_and_lets_them_read_it() -> None:
    """Its process may hold the store. Another one's time may not be up yet."""
    store = dist.HashStore()
    rounds = dist.PrefixStore("fzero/rounds", store)

    def missing(rank: int) -> tuple[tuple[int, ...], bool]:
        with pytest.raises(fzero.HangError) as error:
            prefixed(store, rank, 3, 0.3 if rank == 0 else 10.0)
        token = rounds.get("token/1").decode()
        return error.value.missing, rounds.check([f"told/{token}"])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(missing, range(2))) == [((2,), True)] * 2, "rank 1 need not wait for its own time"


def test_rank_0_alone_asks_whether_all_have_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large world each rank would ask for the keys of all, again and again."""
    asked: list[list[str]] = []

    class Noted:
        def __init__(self, store: dist.Store) -> None:
            self.get, self.set, self.store = store.get, store.set, store

        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            return bool(self.store.check(keys))

    store = dist.HashStore()
    store.set("offer", "mine mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "mine")
    monkeypatch.setattr(store_prefix, "dist", SimpleNamespace(PrefixStore=lambda name, store: Noted(store)))
    with pytest.raises(fzero.HangError):
        prefixed(store, 1, 2, 0.02)
    assert ["accepted/0", "accepted/1"] not in asked
    prefixed(store, 0, 2, 20.0)
    assert ["accepted/0", "accepted/1"] in asked


def test_keys_that_do_not_come_are_returned() -> None:
    store = dist.HashStore()
    store.set("a", "")
    assert wait_for_keys(store, ["a"], 10.0) == []
    assert wait_for_keys(store, ["a", "b", "c"], 0.02) == ["b", "c"]
    threading.Timer(0.05, lambda: store.set("b", "")).start()
    assert wait_for_keys(store, ["a", "b"], 10.0) == []


def test_who_has_not_accepted_the_offer_is_missing() -> None:
    """Rank 2 wrote its token and was offered, and is gone since."""
    store = dist.HashStore()
    rounds = dist.PrefixStore("fzero/rounds", store)
    tokens = {rank: f"t{rank}" for rank in range(3)}
    for rank, token in tokens.items():
        rounds.set(f"token/{rank}", token)
    assert store_prefix._missing(rounds, 1, 3, "t1") == [0], "there is no offer"
    offer = "t0 t1 t2"
    rounds.set("offer", offer)
    for rank in (0, 1):
        rounds.set(f"accepted/{rank}", store_prefix._name(offer))
    assert store_prefix._missing(rounds, 1, 3, "t1") == [2]
    rounds.set("accepted/2", store_prefix._name("an earlier one"))
    assert store_prefix._missing(rounds, 1, 3, "t1") == [2]
    assert store_prefix._missing(rounds, 1, 4, "t1") == [3], "it has no token"
    assert store_prefix._missing(rounds, 1, 3, "x") == [0], "it offers what it finds, and did not find this"


def test_a_rank_that_waits_leaves_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("fzero.comm.store_prefix.time.sleep", slept.append)
    with pytest.raises(fzero.HangError):
        prefixed(dist.HashStore(), 1, 2, 0.02)
    assert {*slept} == {store_prefix.POLL_SECONDS}
    slept.clear()
    assert wait_for_keys(dist.HashStore(), ["a"], 0.02) == ["a"]
    assert {*slept} == {store_prefix.POLL_SECONDS}
