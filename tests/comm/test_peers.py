"""peers: two ranks of this process read one another's memory: in place, copied, expected; and how each may fail."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hosts import hosts

from fzero.comm.peers import INLINE_BYTES, SLICE_SECONDS, SharedMemoryPeers
from fzero.errors import DisagreementError, PeerError

pytestmark = pytest.mark.timeout(20, method="thread")  # each test takes some milliseconds, or waits without end


@pytest.fixture
def two() -> Iterator[list[SharedMemoryPeers]]:
    made = hosts(2)
    yield made
    for host in made:
        host.close()


def test_a_source_in_an_arena_is_read_where_it_is(two: list[SharedMemoryPeers]) -> None:
    one, other = two
    source = one.allocate(3 * INLINE_BYTES)
    source.fill_(7)
    assert one.place(source[10:]) == (0, 10)
    assert one.place(torch.zeros(1)) is None
    assert one.offer(5, source, [1]), "in place"
    like = torch.empty(3 * INLINE_BYTES, dtype=torch.uint8)
    taken = other.take(5, 0, like, "it")
    source.fill_(9)
    assert taken.unique().tolist() == [9]
    assert 5 in one.readers
    other.done(5, 0)
    one.settle(5, "it")
    assert 5 not in one.readers


def test_any_other_source_is_copied_first(two: list[SharedMemoryPeers]) -> None:
    one, other = two
    for size in (0, INLINE_BYTES, INLINE_BYTES + 1):
        source = torch.full((size,), 7, dtype=torch.uint8)
        assert not one.offer(size, source, [1])
        source.fill_(9)
        taken = other.take(size, 0, source, "it")
        assert taken.tolist() == [7] * size
        other.done(size, 0)
    blocks = []
    for number in range(10, 14):  # a block that was read is used again
        one.offer(number, torch.ones(2 * INLINE_BYTES, dtype=torch.uint8), [1])
        other.take(number, 0, torch.empty(2 * INLINE_BYTES, dtype=torch.uint8), "it")
        other.done(number, 0)
        blocks.append(one.staged[number].data_ptr())
    assert len({*blocks}) == 1


def test_a_size_that_differs_names_both_ranks(two: list[SharedMemoryPeers]) -> None:
    one, other = two
    one.offer(1, torch.zeros(3), [1])
    with pytest.raises(DisagreementError, match="it: rank 0 gives 12 bytes, rank 1 needs 16"):
        other.take(1, 0, torch.zeros(4), "it")
    other.expect(1, 0, into := torch.ones(4))
    with pytest.raises(DisagreementError, match="rank 0 gives 12 bytes"):
        other.arrive(1, 0, "it")
    assert into.tolist() == [1.0] * 4


def test_what_is_expected_is_copied_while_a_rank_waits_for_anything_else(two: list[SharedMemoryPeers]) -> None:
    one, other = two
    into = torch.zeros(2)
    other.expect(3, 0, into)
    one.offer(3, torch.ones(2), [1])
    one.offer(4, torch.ones(1), [1])
    other.take(4, 0, torch.zeros(1), "another")
    assert into.tolist() == [1.0, 1.0]
    other.arrive(3, 0, "it")
    one.offer(5, torch.full((2,), 2.0), [1])
    assert other.ready(5, [0])
    assert not other.ready(6, [0])
    other.expect(5, 0, into)
    assert into.tolist() == [2.0, 2.0], "it was there already"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "stopped",
            "rank 1 waited for rank 0, which did not come within 0.05 s: it is stopped, or does something else",
        ),
        ("closed", "rank 1 waited for rank 0, which closed its side: it gave up before, or has come to its end"),
        ("died", "rank 1 waited for rank 0, which ended its connection: the first error is in its log"),
        ("halted", "rank 1 waited for rank 0 in vain: rank 0 failed"),
    ],
)
def test_a_rank_that_does_not_come_is_named(two: list[SharedMemoryPeers], how: str, said: str) -> None:
    one, other = two
    other.timeout_seconds = 0.05 if how == "stopped" else 20.0
    if how == "closed":
        one.close()
    elif how == "died":
        one._bye.detach()
        one.peers[1].socket.close()
    elif how == "halted":
        other.halted = lambda: "rank 0 failed"
    began = time.monotonic()
    with pytest.raises(PeerError, match=f"^it: {said}"):
        other.take(1, 0, torch.zeros(1), "it")
    assert time.monotonic() - began < 10
    closed = "rank 1 shares no memory any more: it: rank 1 waited for rank 0"
    calls: list[Callable[[], object]] = [
        lambda: other.offer(2, torch.zeros(1), [0]), lambda: other.take(2, 0, torch.zeros(1), "another"),
        lambda: other.expect(2, 0, torch.zeros(1)), lambda: other.settle(2, "another"), lambda: other.allocate(1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(PeerError, match=closed):
            call()
    if how not in ("stopped", "halted"):
        return
    with pytest.raises(PeerError, match="which closed its side"):
        one.take(1, 1, torch.zeros(1), "it")


def test_a_reader_that_has_closed_its_side_reads_no_more(two: list[SharedMemoryPeers]) -> None:
    one, other = two
    one.offer(1, one.allocate(2 * INLINE_BYTES), [1])
    other.close()
    one.settle(1, "it")
    assert 1 not in one.readers


def test_what_nobody_has_read_is_waited_for(two: list[SharedMemoryPeers]) -> None:
    one = two[0]
    one.timeout_seconds = 0.05
    one.offer(1, one.allocate(2 * INLINE_BYTES), [1])
    with pytest.raises(PeerError, match="it: rank 0 waited for rank 1"):
        one.settle(1, "it")


def test_an_arena_goes_with_its_last_tensor(two: list[SharedMemoryPeers]) -> None:
    one, other = two
    files = len(os.listdir("/proc/self/fd"))
    arena = one.allocate(10)
    assert (arena.numel(), arena.dtype, arena.any().item()) == (10, torch.uint8, False)
    one.offer(1, torch.zeros(1), [1])
    other.take(1, 0, torch.zeros(1), "it")
    assert [*other.peers[0].arenas] == [0]
    del arena
    assert not one.own.places
    one.offer(2, torch.zeros(1), [1])
    other.take(2, 0, torch.zeros(1), "it")
    assert not other.peers[0].arenas
    assert len(os.listdir("/proc/self/fd")) <= files, "no file of it is open on either side"
    one.allocate(1)
    assert one.own.count == 2


def test_a_source_that_was_copied_on_its_arrival_is_settled(two: list[SharedMemoryPeers]) -> None:
    one, other = two
    one.timeout_seconds = 0.5
    source = one.allocate(2 * INLINE_BYTES).fill_(7)
    other.expect(3, 0, into := torch.zeros(2 * INLINE_BYTES, dtype=torch.uint8))
    assert one.offer(3, source, [1])
    assert other.ready(9, [0]) is False, "it takes in what has come"
    one.settle(3, "it")
    assert into.unique().tolist() == [7]
    assert not other.peers[0].offers


def test_a_socket_that_is_full_ends_a_wait(two: list[SharedMemoryPeers]) -> None:
    one = two[0]
    one.timeout_seconds = 0.05
    letter = torch.ones(INLINE_BYTES, dtype=torch.uint8)

    def flood() -> None:
        for number in range(5000):
            one.offer(number, letter, [1])

    with pytest.raises(PeerError, match=r"a full socket: rank 0 waited for rank 1, which did not come within 0\.05 s"):
        flood()


def test_ranks_that_flood_one_another_take_in_what_comes(two: list[SharedMemoryPeers]) -> None:
    def flood(rank: int) -> int:
        host, letter = two[rank], torch.full((INLINE_BYTES,), rank, dtype=torch.uint8)
        for number in range(1000):
            host.offer(number, letter, [1 - rank])
        for number in range(1000):
            assert host.take(number, 1 - rank, letter, "it")[-1] == 1 - rank
            host.done(number, 1 - rank)
        return len(host.peers[1 - rank].offers)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(flood, range(2))) == [0, 0]


def test_what_is_sent_to_a_rank_that_is_gone_is_no_error(two: list[SharedMemoryPeers]) -> None:
    """A rank that waits for it finds out."""
    one, other = two
    other._bye.detach()
    other.peers[0].socket.close()
    one.offer(1, torch.ones(1), [1])
    with pytest.raises(PeerError, match="which ended its connection"):
        one.take(1, 1, torch.ones(1), "it")


def test_what_a_rank_sent_before_it_ended_is_found_at_once(two: list[SharedMemoryPeers]) -> None:
    """Though messages to it were not read, for which the socket has an error first."""
    one, other = two
    one.offer(1, torch.ones(1), [1])
    other.offer(5, torch.ones(1), [0])
    other._bye.detach()
    other.peers[0].socket.close()
    assert one.ready(5, [1])
    assert not one.ready(6, [1])
    assert not one.ready(6, [1]), "its end is known"


def test_a_process_that_was_forked_has_no_part(two: list[SharedMemoryPeers]) -> None:
    one, other = two
    if (child := os.fork()) == 0:
        code = 1
        try:
            one.offer(1, torch.ones(1), [1])
        except PeerError as error:
            told = "it was forked, and its parent is the rank" in str(error)
            code = 0 if told and one.peers[1].socket.fileno() < 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    one.offer(1, torch.ones(1), [1])
    assert other.take(1, 0, torch.zeros(1), "it").tolist() == [1.0], "the parent is still a rank"


def test_a_dead_rank_ends_the_waits_for_others_too() -> None:
    ranks = hosts(3)
    ranks[2]._bye.detach()
    for peer in ranks[2].peers.values():
        peer.socket.close()
    with pytest.raises(PeerError, match="it: rank 0 waited for rank 2, which ended its connection"):
        ranks[0].take(1, 1, torch.zeros(1), "it")
    for host in ranks:
        host.close()


def test_a_rank_that_is_done_does_not_hide_that_another_is_late() -> None:
    """Its socket, which is at its end, wakes nobody."""
    ranks = hosts(3, seconds=0.05)
    ranks[2].close()
    with pytest.raises(PeerError, match=r"it: rank 0 waited for rank 1, which did not come within 0\.05 s"):
        ranks[0].take(1, 1, torch.zeros(1), "it")
    for host in ranks:
        host.close()


def test_a_rank_sleeps_again_and_again_until_its_time_is_up(
    two: list[SharedMemoryPeers], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    asked: list[float] = []

    def slept(seconds: float) -> bool:
        asked.append(seconds)
        if len(asked) == 3:
            one.offer(1, torch.ones(1), [1])
        return len(asked) == 3

    monkeypatch.setattr(other, "_slept", slept)
    assert other.take(1, 0, torch.zeros(1), "it").tolist() == [1.0]
    assert asked == [SLICE_SECONDS] * 3
    asked.clear()
    other.timeout_seconds = 0.01
    monkeypatch.setattr(other, "_slept", lambda seconds: asked.append(seconds))
    with pytest.raises(PeerError, match="did not come"):
        other.take(2, 0, torch.zeros(1), "it")
    assert max(asked) <= 0.01


def test_what_has_come_counts_before_a_wait_is_in_vain(
    two: list[SharedMemoryPeers], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    monkeypatch.setattr("fzero.comm.peers.SPIN_SECONDS", 0.0)
    other.halted = lambda: "rank 0 failed"
    for number in (1, 2):
        one.offer(number, torch.ones(1), [1])
    assert other.take(2, 0, torch.zeros(1), "it").tolist() == [1.0]


def test_a_goodbye_is_heard_behind_all_that_was_sent_before(two: list[SharedMemoryPeers]) -> None:
    one, other = two
    one.offer(1, torch.ones(2), [1])
    one.offer(2, one.allocate(2 * INLINE_BYTES).fill_(5), [1])
    one.close()
    assert other.take(1, 0, torch.zeros(2), "it").tolist() == [1.0, 1.0]
    assert other.take(2, 0, torch.empty(2 * INLINE_BYTES, dtype=torch.uint8), "it").unique().tolist() == [5]
    assert other.peers[0].socket.fileno() >= 0
    with pytest.raises(PeerError, match="closed its side"):
        other.take(3, 0, torch.zeros(1), "it")


def test_a_block_that_is_read_by_some_is_not_used_again() -> None:
    """Of three ranks one has not read it: the next copy lies elsewhere."""
    ranks = hosts(3)
    data = torch.ones(2 * INLINE_BYTES, dtype=torch.uint8)
    ranks[0].offer(1, data, [1, 2])
    ranks[1].take(1, 0, data, "it")
    ranks[1].done(1, 0)
    ranks[0].offer(2, 2 * data, [1, 2])
    assert ranks[2].take(1, 0, data, "it").unique().tolist() == [1]
    ranks[2].done(1, 0)
    ranks[0].offer(3, torch.ones(40 * INLINE_BYTES, dtype=torch.uint8), [1])
    ranks[0].offer(4, 4 * data, [1])
    assert len({ranks[0].staged[number].data_ptr() for number in (2, 3, 4)}) == 3
    assert ranks[0].staged[4].numel() == 1 << 16, "the smallest block that is large enough"
    assert ranks[2].take(2, 0, data, "it").unique().tolist() == [2]
    for host in ranks:
        host.close()


def test_arenas_are_pages_of_their_own_and_places_are_within_them(two: list[SharedMemoryPeers]) -> None:
    one = two[0]
    first, second = one.allocate(4097), one.allocate(1)
    assert [one.own.places[n][1] for n in (0, 1)] == [8192, 4096]
    assert (one.place(first[4096:]), one.place(second)) == ((0, 4096), (1, 0))
    assert first.data_ptr() % 4096 == 0
    assert one.allocate(0).numel() == 0
    one.close()
    with pytest.raises(PeerError, match="rank 0 shares no memory any more: it was closed"):
        one.allocate(1)
    assert first.fill_(3)[-1] == 3, "tensors stay, for this rank alone"


def test_a_sleep_is_as_long_as_asked_for(two: list[SharedMemoryPeers], monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that is over is none, and poll counts milliseconds."""
    asked: list[float] = []
    monkeypatch.setattr(two[0], "polled", SimpleNamespace(poll=lambda ms: asked.append(ms) or []))
    assert [two[0]._slept(seconds) for seconds in (0.25, -1.0)] == [False, False]
    assert asked == [250, 0]


def test_a_block_is_used_again_for_what_just_fits(two: list[SharedMemoryPeers]) -> None:
    one, other = two
    for number, size in enumerate((1 << 16, 1 << 16, (1 << 16) - 1, (1 << 16) + 1)):
        data = torch.ones(size, dtype=torch.uint8)
        one.offer(number, data, [1])
        other.take(number, 0, data, "it")
        other.done(number, 0)
    assert one.own.count == 2, "one for the first three, a larger one for the last"


def test_room_in_a_socket_is_waited_for_as_long_as_for_a_rank(
    two: list[SharedMemoryPeers], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    room = SimpleNamespace(register=lambda *given: None, poll=lambda ms: asked.append(ms) or [])
    monkeypatch.setattr("fzero.comm.peers.select", SimpleNamespace(poll=lambda: room, POLLIN=1, POLLOUT=4))
    two[0].timeout_seconds = 7.0
    letter = torch.ones(INLINE_BYTES, dtype=torch.uint8)
    with pytest.raises(PeerError, match="a full socket"):
        [two[0].offer(number, letter, [1]) for number in range(5000)]
    assert asked == [7000.0], "in milliseconds"


def test_what_was_expected_is_waited_for(two: list[SharedMemoryPeers], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = two
    other.expect(1, 0, into := torch.zeros(2))
    monkeypatch.setattr(os, "sched_yield", lambda: one.offer(1, torch.ones(2), [1]))
    other.arrive(1, 0, "it")
    assert into.tolist() == [1.0, 1.0]


def test_what_comes_at_once_is_not_slept_for(two: list[SharedMemoryPeers], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep and a wake-up take longer."""
    one, other = two
    monkeypatch.setattr(os, "sched_yield", lambda: one.offer(1, torch.ones(1), [1]))
    monkeypatch.setattr(other, "_slept", lambda seconds: pytest.fail("it slept"))
    assert other.take(1, 0, torch.zeros(1), "it").tolist() == [1.0]


def test_a_number_that_comes_again_is_waited_for_anew(two: list[SharedMemoryPeers]) -> None:
    """That its first transfer was read says nothing of the second."""
    one, other = two
    data = torch.ones(2 * INLINE_BYTES, dtype=torch.uint8)
    for number in (1, 2):
        one.offer(number, data, [1])
        other.take(number, 0, data, "it")
        other.done(number, 0)
    for number in (1, 3):
        one.offer(number, number * data, [1])
    assert other.take(1, 0, data, "it").unique().tolist() == [1]


def test_who_closes_lets_go_of_all_memory(two: list[SharedMemoryPeers]) -> None:
    """Of blocks that were read and that were not, of what the other offers, and of what it did not send."""
    one, other = two
    small, large = (torch.ones(size, dtype=torch.uint8) for size in (2 * INLINE_BYTES, 40 * INLINE_BYTES))
    one.offer(1, small, [1])
    other.take(1, 0, small, "it")
    other.done(1, 0)
    one.offer(2, large, [1])
    one.offer(3, large, [1])
    other.take(2, 0, large, "it")
    other.expect(4, 0, torch.zeros(1))
    for host in two:
        host.close()
        for peer in host.peers.values():
            assert [peer.arenas, peer.offers, peer.expected] == [{}, {}, {}]
            assert peer.socket.fileno() < 0
    assert (one.own.places, one.readers) == ({}, {})


def test_the_next_rank_comes_first() -> None:
    """So that not everyone sends to rank 0 at once."""
    ranks = hosts(4)
    assert [*ranks[1].peers] == [2, 3, 0]
    for host in ranks:
        host.close()
