"""peers: the ranks of one machine: memory that each may read of the others, and signals between them.

Memory. An arena (`SharedMemoryPeers.allocate`) is an anonymous file (`memfd_create`, not bounded by /dev/shm). Every
peer maps it; its descriptor travels over the sockets. A source outside of all arenas is copied into a staging block,
or, up to INLINE_BYTES, sent in the message itself.

Signals. `offer` sends each peer the place of a source. `take` waits for that and returns the peer's memory. `done`
tells the peer that it was read. `settle` waits until all peers have read. A message carries the transfer's number and
the source's place. So ranks need not agree on where a source lies or in which order they wait. A message is a system
call, hence a memory barrier. A rank that waits spins for SPIN_SECONDS and then sleeps. A round trip between two ranks
takes 5 microseconds spinning, 55 sleeping. A dead peer shows as the end of its socket; a peer that has nothing more to
do says goodbye first.

Given up: peers' pages count in each rank's resident size, though they exist once. Huge pages are not used: on shared
memory they made 512 times fewer faults and a slower first touch. The first touch costs 0.6 ms per MB: keep arenas.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from fzero.errors import DisagreementError, PeerError
from fzero.ir.messages import flat_bytes

HEAD = struct.Struct("<2Q")  # of each message: kind, number (of the transfer or arena)
PLACE = struct.Struct("<3Q")  # of a source that is READY: arena, offset in it, bytes
ARENA, DROPPED, READY, LETTER, READ, BYE = range(6)
INLINE_BYTES = 4096
SPIN_SECONDS = 50e-6  # about the cost of a sleep and a wake-up
SLICE_SECONDS = 0.25  # a rank that sleeps looks so often whether it waits in vain
MIN_BLOCK_BYTES = 1 << 16


@dataclass
class _Peer:
    """Another rank: its socket, its arenas as mapped here, and its signals. Written by its own methods and those of
    `SharedMemoryPeers` alone.

    offers: by transfer, the bytes, and whether the peer waits for `READ`. expected: by transfer, the tensor into which
    `expect` copies. read: transfers of ours that it has read.
    end: "closed" after a goodbye, "died" without one.
    """

    rank: int
    socket: socket.socket
    arenas: dict[int, torch.Tensor] = field(default_factory=dict)
    offers: dict[int, tuple[torch.Tensor, bool]] = field(default_factory=dict)  # bytes; whether to say `read`
    expected: dict[int, torch.Tensor] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    end: str = ""  # "closed" when it said goodbye, "died" when it did not

    def heard(self, message: bytes, attached: Sequence[tuple[int, int, bytes]]) -> int:
        """Takes in a message. Returns its number."""
        kind, number = HEAD.unpack_from(message)
        if kind == READY:
            arena, offset, size = PLACE.unpack_from(message, HEAD.size)
            self.offers[number] = (self.arenas[arena].narrow(0, offset, size), True)
        elif kind == LETTER:
            letter = bytearray(message[HEAD.size :])
            data = torch.frombuffer(letter, dtype=torch.uint8) if letter else torch.empty(0).byte()
            self.offers[number] = (data, False)
        elif kind == READ:
            self.read.add(number)
        elif kind == ARENA:
            (descriptor,) = struct.unpack("i", attached[0][2])
            try:
                self.arenas[number] = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)  # all of it
            finally:
                os.close(descriptor)
        elif kind == DROPPED:
            self.arenas.pop(number, None)
        else:
            self.end = "closed"
        return number


class _OwnArenas:
    """The arenas of this rank. places: address and bytes, by number. dropped: those that died since peers heard of
    it."""

    def __init__(self) -> None:
        self.count = 0
        self.places: dict[int, tuple[int, int]] = {}
        self.dropped: deque[int] = deque()

    def allocate(self, num_bytes: int, announce: Callable[[bytes, int], None]) -> torch.Tensor:
        """announce: sends the peers a message and a descriptor."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE or mmap.PAGESIZE
        number, self.count = self.count, self.count + 1
        descriptor = os.memfd_create("fzero")
        try:
            os.ftruncate(descriptor, size)
            pages = mmap.mmap(descriptor, size)
            announce(HEAD.pack(ARENA, number), descriptor)
        finally:
            os.close(descriptor)
        arena = torch.frombuffer(pages, dtype=torch.uint8)
        self.places[number] = (arena.data_ptr(), size)
        weakref.finalize(pages, _drop, self.places, self.dropped, number)
        return arena[:num_bytes]

    def place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        address = tensor.data_ptr()
        found = ((n, address - first) for n, (first, size) in self.places.items() if first <= address < first + size)
        return next(found, None)


class SharedMemoryPeers:
    """The ranks of one process group, all on this machine. Made by `fzero.comm.rendezvous`.

    A transfer is among this rank and some of the others. Its number is one that no other transfer in flight here has.

    A failure of a peer is a PeerError that names the peer and the transfer; the host is closed then. A rank that waits
    calls `halted`: it returns text if the wait is in vain.

    Only the methods here write the fields, and only one thread may call them; `rendezvous` sets `timeout_seconds` and
    `halted` once. A process that was forked from a rank has no part in the host.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_seconds: float) -> None:
        """Takes the connected sockets, by rank."""
        world = len(sockets) + 1
        self.rank, self.timeout_seconds, self.failure = rank, timeout_seconds, ""
        self.halted: Callable[[], str] = str
        self.room = HEAD.size + INLINE_BYTES, socket.CMSG_SPACE(struct.calcsize("i"))  # of a message, of a descriptor
        self.peers = {r: _Peer(r, sockets[r]) for r in ((rank + i) % world for i in range(1, world))}  # next one first
        self.polled = select.poll()
        for peer in self.peers.values():
            peer.socket.setblocking(False)
            self.polled.register(peer.socket, select.POLLIN)
        self.own = _OwnArenas()
        self.readers: dict[int, tuple[int, ...]] = {}  # by transfer: the peers that read it
        self.staged: dict[int, torch.Tensor] = {}  # by transfer
        self.blocks: list[torch.Tensor] = []
        self._bye = weakref.finalize(self, _say_bye, [peer.socket for peer in self.peers.values()])
        _INSTANCES.add(self)

    # --- memory

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Returns zeroed bytes (uint8, 1-D, page-aligned) that every peer can read.

        They are freed when the last tensor on them dies. Other ranks map them when they next wait. So not all ranks
        need to allocate, nor in one order. Raises PeerError if the host is closed.
        """
        self._check()
        return self.own.allocate(num_bytes, partial(self._tell, self.peers))

    def place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Returns (arena, offset in bytes) of a tensor's first element; None if it lies in no arena."""
        return self.own.place(tensor)

    def _staged(self, number: int, data: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `data` in a block that no peer reads any more."""
        for peer in self.peers.values():
            while self._receive(peer):
                pass
        for done in [n for n in self.staged if all(n in p.read or p.end for p in self._readers(n))]:
            self.blocks.append(self.staged.pop(done))
            self._forget(done)
        fitting = [i for i, block in enumerate(self.blocks) if block.numel() >= data.numel()]
        if fitting:
            block = self.blocks.pop(min(fitting, key=lambda i: self.blocks[i].numel()))
        else:
            block = self.allocate(max(MIN_BLOCK_BYTES, 1 << (data.numel() - 1).bit_length()))
        self.staged[number] = block
        return block[: data.numel()].copy_(data)

    # --- signals

    def offer(self, number: int, source: torch.Tensor, to: Collection[int]) -> bool:
        """Lets the peers `to` read `source` (1-D, contiguous) as transfer `number`.

        Returns whether they read it in place: then it must not change before `settle`.
        """
        self._check()
        while self.own.dropped:
            self._tell(self.peers, HEAD.pack(DROPPED, self.own.dropped.popleft()))
        data = flat_bytes(source)
        size = data.numel()
        if size <= INLINE_BYTES:
            self._tell(to, HEAD.pack(LETTER, number) + data.numpy().tobytes())
            return False
        self.readers[number] = tuple(to)
        place = self.place(data)
        there = place or self.place(self._staged(number, data))
        assert there is not None  # a block lies in an arena
        self._tell(to, HEAD.pack(READY, number) + PLACE.pack(*there, size))
        return place is not None

    def ready(self, number: int, of: Collection[int]) -> bool:
        """Whether each of these peers has offered its part of a transfer."""
        for peer in map(self.peers.__getitem__, of):
            while number not in peer.offers and self._receive(peer):
                pass
        return all(number in self.peers[rank].offers for rank in of)

    def take(self, number: int, rank: int, like: torch.Tensor, label: str) -> torch.Tensor:
        """Returns the memory that a peer offered, seen as `like` (1-D). It is valid until `done`.

        `label` names the transfer in messages. Raises DisagreementError if the sizes differ, PeerError if the peer does
        not come.
        """
        peer = self.peers[rank]
        self._until(peer, lambda: number in peer.offers, label)
        data, needed = peer.offers[number][0], like.numel() * like.element_size()
        if data.numel() != needed:
            raise DisagreementError(f"{label}: rank {rank} gives {data.numel()} bytes, rank {self.rank} needs {needed}")
        return data.view(like.dtype)

    def done(self, number: int, rank: int) -> None:
        """Tells the peer that this rank has read the memory it took."""
        peer = self.peers[rank]
        if peer.offers.pop(number)[1]:
            self._send(peer, HEAD.pack(READ, number))

    def expect(self, number: int, rank: int, into: torch.Tensor) -> None:
        """Copies what a peer offers as transfer `number` into `into` (1-D) as soon as it is here.

        That is at once, or while this rank waits for anything else. So a sender's `settle` waits for this call alone.
        """
        self._check()
        self.peers[rank].expected[number] = into
        self._copy(self.peers[rank], number)

    def arrive(self, number: int, rank: int, label: str) -> None:
        """Returns when a transfer that was expected has been copied. Raises as `take` does."""
        peer = self.peers[rank]
        self._until(peer, lambda: number not in peer.expected or number in peer.offers, label)
        if number in peer.expected:
            self.take(number, rank, peer.expected.pop(number), label)  # raises: their sizes differ

    def settle(self, number: int, label: str) -> None:
        """Returns when the peers have read a source that was offered to them in place. Raises PeerError."""
        self._check()
        for peer in self._readers(number):
            self._until(peer, lambda peer=peer: number in peer.read or peer.end == "closed", label)  # type: ignore[misc]
        self._forget(number)

    def close(self) -> None:
        """Says goodbye and releases the peers' memory. Tensors from `allocate` stay, for this rank alone."""
        self.failure = self.failure or "it was closed"
        self._bye()
        for peer in self.peers.values():
            peer.arenas.clear()
            peer.offers.clear()
            peer.expected.clear()
        self.readers.clear()
        self.staged.clear()
        self.blocks.clear()

    # --- pieces

    def _copy(self, peer: _Peer, number: int) -> None:
        """Copies an offer that is expected and fits."""
        if number not in peer.offers or number not in peer.expected:
            return
        data, into = peer.offers[number][0], peer.expected[number]
        if data.numel() == into.numel() * into.element_size():
            into.copy_(data.view(into.dtype))
            del peer.expected[number]
            self.done(number, peer.rank)

    def _readers(self, number: int) -> list[_Peer]:
        return [self.peers[rank] for rank in self.readers[number]]

    def _forget(self, number: int) -> None:
        for rank in self.readers.pop(number):
            self.peers[rank].read.discard(number)

    def _check(self) -> None:
        if self.failure:
            raise PeerError(f"rank {self.rank} shares no memory any more: {self.failure}")

    def _fail(self, peer: _Peer, label: str) -> PeerError:
        how = {
            "died": "ended its connection: the first error is in its log. Start all ranks again",
            "closed": "closed its side: it gave up before, or has come to its end",
            "": f"did not come within {self.timeout_seconds:g} s: it is stopped, or does something else",
        }[peer.end]
        self.failure = f"{label}: rank {self.rank} waited for rank {peer.rank}, which {how}"
        self.close()
        return PeerError(self.failure)

    def _tell(self, ranks: Collection[int], message: bytes, descriptor: int | None = None) -> None:
        for rank in ranks:
            self._send(self.peers[rank], message, descriptor)

    def _send(self, peer: _Peer, message: bytes, descriptor: int | None = None) -> None:
        """Sends a message. A peer that is gone gets none: a rank that waits for it finds out."""
        attached = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        while not peer.end:
            try:
                if attached:
                    peer.socket.sendmsg([message], attached)
                else:
                    peer.socket.send(message)
                return
            except BlockingIOError:  # some 200 messages wait for it: its own are taken in, or both would stand still
                room = select.poll()
                room.register(peer.socket, select.POLLIN | select.POLLOUT)
                if not room.poll(self.timeout_seconds * 1000):
                    raise self._fail(peer, "a full socket") from None
                self._receive(peer)
            except (BrokenPipeError, ConnectionResetError):
                return

    def _receive(self, peer: _Peer) -> bool:
        """Handles one message; returns False if there is none."""
        if peer.end:
            return False
        try:
            message, attached, _, _ = peer.socket.recvmsg(*self.room)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it ended with messages of ours unread; its own may still be there
            return True
        if message:
            self._copy(peer, peer.heard(message, attached))
        else:
            peer.end = "died"
        if peer.end:
            self.polled.unregister(peer.socket)
        return not peer.end

    def _until(self, peer: _Peer, arrived: Callable[[], bool], label: str) -> None:
        """Handles messages until `arrived()`. Raises PeerError at the timeout, if a peer died, or if `halted` returns
        text."""
        self._check()
        deadline = spin = 0.0
        while not arrived():
            if self._receive(peer):
                continue
            now = time.monotonic()
            deadline = deadline or now + self.timeout_seconds
            spin = spin or now + SPIN_SECONDS
            gone = peer if peer.end else next((p for p in self.peers.values() if p.end == "died"), None)
            if gone is not None and not arrived():
                raise self._fail(gone, label)
            if now < spin:
                os.sched_yield()
            elif self.halted():
                self.failure = f"{label}: rank {self.rank} waited for rank {peer.rank} in vain: {self.halted()}"
                self.close()
                raise PeerError(self.failure)
            elif not self._slept(min(deadline - now, SLICE_SECONDS)) and time.monotonic() >= deadline:
                raise self._fail(peer, label)

    def _slept(self, seconds: float) -> bool:
        """Sleeps until a message comes and handles all there are; returns False if none came."""
        events = self.polled.poll(max(seconds, 0) * 1000)
        numbers = {number for number, _ in events}
        for peer in self.peers.values():
            if peer.socket.fileno() in numbers:
                while self._receive(peer):
                    pass
        return bool(events)


def _drop(arenas: dict[int, tuple[int, int]], dropped: deque[int], number: int) -> None:
    """The last tensor on an arena died. Its addresses may soon belong to other memory, and peers may unmap it."""
    arenas.pop(number, None)
    dropped.append(number)


def _say_bye(sockets: list[socket.socket]) -> None:
    for connection in sockets:
        with suppress(OSError):
            connection.send(HEAD.pack(BYE, 0))
        connection.close()


# for forks alone: a child that kept the sockets would hide a death
_INSTANCES: weakref.WeakSet[SharedMemoryPeers] = weakref.WeakSet()


def _forked() -> None:
    for host in _INSTANCES:
        host.failure = "it was forked, and its parent is the rank"
        for peer in host.peers.values():
            peer.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
