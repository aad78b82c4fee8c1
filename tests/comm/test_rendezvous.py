"""Ranks find one another whatever strangers do at their door: nothing of a stranger's counts, stays or takes time."""

from __future__ import annotations

import array
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fzero.comm import heartbeat, rendezvous
from fzero.comm.peers import SharedMemoryPeers
from fzero.errors import PeerError

WORLD = 3
pytestmark = pytest.mark.timeout(60, method="thread")  # a rank that waits without end is a thread here


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[socket.socket], list[str]]]:
    """Each rank's listener, and what it told the others."""
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 12.0)
    with ExitStack() as stack:
        listeners, notes = zip(*(rendezvous._listen(WORLD) for _ in range(WORLD)), strict=True)
        for one in listeners:
            assert one is not None
            stack.enter_context(one)
        yield list(listeners), list(notes)


def met(doors: Any, before: Callable[[], None] = lambda: None) -> tuple[float, dict[int, dict[int, socket.socket]]]:
    """(seconds it took, the sockets of each rank)."""
    listeners, notes = doors
    found: dict[int, dict[int, socket.socket]] = {}
    ranks = [
        threading.Thread(target=lambda r=rank: found.update({r: rendezvous._connected(r, listeners[r], notes)}))
        for rank in range(WORLD)
    ]
    began = time.monotonic()
    ranks[0].start()
    before()
    for rank in ranks[1:]:
        rank.start()
    for rank in ranks:
        rank.join(60)
    return time.monotonic() - began, found


def whole(found: dict[int, dict[int, socket.socket]]) -> bool:
    """Whether each pair of ranks is connected; closes all."""
    for rank, peers in found.items():
        for other, one in peers.items():
            one.send(f"{rank} to {other}".encode())
    right = [
        found[other][rank].recv(99) == f"{rank} to {other}".encode() for rank, peers in found.items() for other in peers
    ]
    for peers in found.values():
        for one in peers.values():
            one.close()
    return len(right) == WORLD * (WORLD - 1) and all(right)


def stranger(note: str, *messages: bytes) -> socket.socket:
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guest.setblocking(False)
    with suppress(BlockingIOError):  # the queue is full
        guest.connect(b"\0" + note.split()[2].encode())
        for message in messages:
            guest.send(message)
    return guest


def test_ranks_meet(doors: Any) -> None:
    assert whole(met(doors)[1])


def test_strangers_cost_no_time(doors: Any) -> None:
    """Silent ones, more than a queue holds; ones that say too little, too much, or a number without its token."""
    token = doors[1][0].split()[3]
    said = [
        (), (b"",), (b"x" * 9000,), (token[:-1].encode(),), (b" 1",), (b"\xff\xfe 1",), (f"{token} ".encode(),),
        (f"{token} 0".encode(),), (f"{token} 7".encode(),), (f"{token} -1".encode(),), (f"{token} 1 ".encode(),),
        (f"{token} {'1' * 300}".encode(),), (f"{token} \u0661".encode(),),
    ]  # fmt: skip
    kept: list[socket.socket] = []

    def more() -> None:
        for messages in said:
            kept.append(stranger(doors[1][0], *messages))
            time.sleep(0.002)

    kept += [stranger(doors[1][0]) for _ in range(20)]
    took, found = met(doors, more)
    assert whole(found)
    assert took < rendezvous.MEET_SECONDS / 3  # a silent one took all of it
    for one in kept:
        one.close()


def test_a_stranger_is_sent_away_before_a_rank_comes(doors: Any) -> None:
    with stranger(doors[1][0], b"x 1") as guest:
        guest.settimeout(9)
        told = list[bytes]()
        assert whole(met(doors, lambda: told.append(guest.recv(9)))[1])
    assert told == [b""]


def test_more_strangers_than_are_waited_for(doors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_SILENT", 4)
    kept: list[socket.socket] = []

    def more() -> None:
        for _ in range(40):
            kept.append(stranger(doors[1][0]))
            time.sleep(0.001)

    before = len(os.listdir("/proc/self/fd"))
    assert whole(met(doors, more)[1])
    assert len(os.listdir("/proc/self/fd")) == before + len(kept)  # none of the other ends
    for one in kept:
        one.close()


def test_descriptors_of_a_stranger_are_closed(doors: Any) -> None:
    reading, writing = os.pipe()
    guest = stranger(doors[1][0])

    def more() -> None:
        guest.sendmsg([b"take these"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writing] * 8))])
        os.close(writing)
        assert os.read(reading, 1) == b"", "the pipe's other end is open nowhere"

    assert whole(met(doors, more)[1])
    os.close(reading)
    guest.close()


def test_another_user_is_sent_away_though_it_knows_the_token(doors: Any) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    _, _, name, token = doors[1][0].split()
    script = f"""
import os, socket
os.setuid(65534)
guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
guest.connect(b"\\0{name}")
try:
    guest.send(b"{token} 1")
    print(guest.recv(9))
except (BrokenPipeError, ConnectionResetError):
    print(b"")
"""
    told = []

    def more() -> None:
        told.append(
            subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
        )

    assert whole(met(doors, more)[1])
    assert told[0].stdout == "b''\n"


def test_nor_is_another_users_process_shown_a_token(doors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_user", lambda peer: os.geteuid() + 1)
    with pytest.raises(PeerError, match=r"who answers for rank 0 is user \d+, not \d+") as error:
        rendezvous._connected(1, doors[0][1], doors[1])
    guest, _ = doors[0][0].accept()
    with guest:
        guest.settimeout(9)
        assert guest.recv(99) == b"", f"it ends at once, though somebody holds {error}"


def test_a_rank_that_does_not_come_is_named(doors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 0.1)
    with stranger(doors[1][0]) as guest:
        with pytest.raises(PeerError, match=r"rank 1 did not connect within 0\.1 s") as error:
            rendezvous._connected(0, doors[0][0], doors[1])
        guest.settimeout(9)
        assert guest.recv(9) == b"", f"it is sent away at once, though somebody holds {error}"


def test_a_rank_sleeps_until_somebody_comes_or_its_time_is_up(doors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, clock = list[float](), [100.0]

    def slept(milliseconds: float) -> list[tuple[int, int]]:
        asked.append(milliseconds)
        clock[0] += 11.5 if len(asked) == 1 else 0.5
        return []

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    polled = SimpleNamespace(poll=slept, register=lambda *given: None)
    monkeypatch.setattr(rendezvous, "select", SimpleNamespace(poll=lambda: polled, POLLIN=select.POLLIN))
    with pytest.raises(PeerError, match="rank 1 did not connect"):
        rendezvous._connected(0, doors[0][0], doors[1])
    assert asked == [12_000.0, 500.0], "in milliseconds"
    assert not doors[0][0].getblocking(), "who has gone again holds nobody up"


def test_who_has_spoken_is_listened_to_no_more(doors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is let in is heard by others; what a stranger sends later, or its end, wakes nobody."""
    real, heard = select.poll(), set[int]()

    class Polled:
        def register(self, one: socket.socket, events: int) -> None:
            heard.add(one.fileno())
            real.register(one, events)

        def unregister(self, one: socket.socket) -> None:
            heard.remove(one.fileno())
            real.unregister(one)

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            return real.poll(milliseconds)

    listener, notes = doors[0][0], doors[1][:2]
    monkeypatch.setattr(rendezvous, "select", SimpleNamespace(poll=Polled, POLLIN=select.POLLIN))
    with stranger(notes[0], b"x"), stranger(notes[0], f"{notes[0].split()[3]} 1".encode()):
        for one in rendezvous._connected(0, listener, notes).values():
            one.close()
    assert heard == {listener.fileno()}


# --- what two ranks of this process find ------------------------------------------------------------------------------


def both(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """What `meet` returns on two ranks that are threads; notes go by hand."""
    gate, told = threading.Barrier(2), dict[tuple[int, int], bytes]()
    calls = threading.local()

    def tell(note: bytes, world: int, group: Any) -> list[bytes]:
        calls.number = getattr(calls, "number", 0) + 1
        told[calls.number, calls.rank] = note
        gate.wait(20)
        return [told[calls.number, rank] for rank in range(2)]

    def of(rank: int) -> Any:
        calls.rank = rank
        return rendezvous.meet(rank, 2, **options)

    monkeypatch.setattr(rendezvous, "tell", tell)
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 3.0)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of, range(2)))


def test_two_ranks_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, why), (other, too) = both(monkeypatch, timeout_seconds=5.0)
    assert (why, too) == ("", "")
    assert (one.timeout_seconds, other.timeout_seconds) == (5.0, 5.0)
    assert (one.halted(), other.halted()) == ("", "")
    source = one.allocate(3 * 4096).fill_(7)
    one.offer(9, source, [1])
    assert other.take(9, 0, torch.empty_like(source), "it").unique().tolist() == [7]
    for host in (one, other):
        host.close()
    (one, _), (other, _) = both(monkeypatch)
    assert one.timeout_seconds == heartbeat.ALONE.timeout_seconds
    for host in (one, other):
        host.close()


def test_what_one_rank_cannot_do_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(host: Any, notes: list[str]) -> None:
        if host.rank == 1:
            raise PeerError("not there")

    closed, close, listen = list[int](), SharedMemoryPeers.close, rendezvous._listen
    monkeypatch.setattr(SharedMemoryPeers, "close", lambda host: closed.append(host.rank) or close(host))
    monkeypatch.setattr(rendezvous, "_probe", probe)
    assert both(monkeypatch) == [(None, "rank 1: not there")] * 2
    assert sorted(closed) == [0, 1]
    able = iter([True, False])
    monkeypatch.setattr(rendezvous, "_listen", lambda n: listen(n) if next(able) else (None, "! no such call"))
    (one, why), other = both(monkeypatch)
    assert (one, why) == other
    assert (one, why[6:]) == (None, ": no such call")
    monkeypatch.setattr(rendezvous, "_listen", lambda world: (None, "! no such call"))
    assert both(monkeypatch) == [(None, "rank 0: no such call")] * 2


def test_nobody_waits_for_a_rank_that_can_make_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its descriptors are used up. The others waited for half a minute, or ended in a HangError."""
    real = rendezvous._probe

    def probe(host: Any, notes: list[str]) -> None:
        if host.rank == 1:
            raise OSError(24, "Too many open files")
        real(host, notes)

    monkeypatch.setattr(rendezvous, "_probe", probe)
    (one, why), other = both(monkeypatch)
    assert (one, why) == other
    assert one is None
    assert "rank 1: [Errno 24] Too many open files" in why
    assert "closed" in why  # what rank 0 saw, at once


def test_a_token_that_is_not_there_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hosts = [SharedMemoryPeers(rank, {1 - rank: pairs[rank]}, 0.5) for rank in range(2)]
    notes = [[f"m n a {token * 32}" for token in tokens] for tokens in ("xy", "xz")]

    def probed(rank: int) -> str:
        try:
            rendezvous._probe(hosts[rank], notes[rank])
        except PeerError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(probed, range(2)))
    assert found[0] == "rank 1 wrote into its memory what rank 0 does not find there"
    for host in hosts:
        host.close()


def test_a_rank_that_cannot_listen_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(rendezvous.os, "memfd_create")
        assert rendezvous._listen(2) == (None, "! this system has no memfd_create")

    def fails(path: str) -> str:
        raise PermissionError("not here")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(rendezvous.os, "readlink", fails)
    assert rendezvous._listen(2) == (None, "! not here")
    assert len(os.listdir("/proc/self/fd")) == before


def test_ranks_apart_are_told_by_the_first_that_differs() -> None:
    here = "m net:[1] a t"
    assert rendezvous._apart([here, here, here]) == ""
    assert rendezvous._apart([here, here, "m net:[2] b u"]) == "rank 2 is in another network namespace than rank 0"
    assert rendezvous._apart([here, "n net:[2] b u", "! no"]) == "rank 1 is in another machine than rank 0"
    assert rendezvous._apart([here, "! no such call"]) == "rank 1: no such call"


def test_a_queue_that_stays_full_ends_a_visit(doors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers fill it; a rank that listens to nobody does not empty it."""
    kept = [stranger(doors[1][0]) for _ in range(3 * WORLD)]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:
            doors[0][0].accept()[0].close()

    monkeypatch.setattr(rendezvous.time, "sleep", sleep)
    rendezvous._visit(1, 0, doors[1][0], time.monotonic() + 5).close()
    assert len(slept) == 5, "until there is room"
    with pytest.raises(PeerError, match="rank 0 let nobody in within 12 s"):
        rendezvous._visit(1, 0, doors[1][0], time.monotonic() - 1)
    for one in kept:
        one.close()


def test_a_guest_that_is_gone_is_no_error(doors: Any) -> None:
    silent: dict[int, socket.socket] = {}
    doors[0][0].setblocking(False)
    rendezvous._let_in(doors[0][0], silent, select.poll())
    assert silent == {}, "nobody is there"
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    assert rendezvous._rank_of(one, "token") is None, "it has said nothing"
    other.send(b"token 12")
    assert rendezvous._rank_of(one, "token") == 12
    one.close()
    assert rendezvous._rank_of(one, "token") is None
    other.close()
