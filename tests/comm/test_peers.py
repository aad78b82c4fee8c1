"""peers: two ranks of this process read one another's memory: in place, copied, expected; and how each may fail."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from hosts import hosts

from fzero.comm.peers import INLINE_BYTES, SharedMemoryPeers
from fzero.errors import DisagreementError, PeerError


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
    with pytest.raises(PeerError, match="rank 1 shares no memory any more: it: rank 1 waited for rank 0"):
        other.offer(2, torch.zeros(1), [0])
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
    one.allocate(1)
    assert one.own.count == 2
