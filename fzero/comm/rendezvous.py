"""rendezvous: finds out, once and on all ranks alike, whether the ranks of a process group share memory.

Each rank sends over gloo its machine (boot id), its network namespace and the address where it listens. A rank in
another namespace counts as on another machine, so that a link that was made slow stays slow. Each pair of ranks
connects by a Unix socket, and every rank reads a random token in every other rank's memory. If one rank fails, the
answer is no on all ranks. Two ranks need 5 ms.
"""

from __future__ import annotations

import os
import re
import secrets
import select
import socket
import struct
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from fzero.comm import heartbeat
from fzero.comm.agree import tell
from fzero.comm.peers import SharedMemoryPeers
from fzero.errors import FzeroError, PeerError

MEET_SECONDS = 30.0
MAX_SILENT = 256  # guests that have shown nothing yet; beyond, the one that came first is sent away


def meet(
    rank: int, world_size: int, group: Any = None, *, timeout_seconds: float | None = None
) -> tuple[SharedMemoryPeers | None, str]:
    """Returns (the SharedMemoryPeers of the ranks, "") or (None, the reason why they share no memory). Collective over
    `group` (gloo).

    timeout_seconds: how long a rank is waited for from then on; None is the group's timeout. A failure is an answer
    here, not an error.
    """
    here = heartbeat.of(group)
    listener, note = _listen(world_size)
    with listener or nullcontext():
        notes = [n.decode() for n in tell(note.encode(), world_size, group)]
        why, host = _apart(notes), None
        if listener is not None and not why:
            try:
                host = SharedMemoryPeers(rank, _connected(rank, listener, notes), MEET_SECONDS)
                _probe(host, notes)
                host.timeout_seconds = here.timeout_seconds if timeout_seconds is None else timeout_seconds
                host.halted = lambda: here.halted
            except (OSError, FzeroError) as error:
                why = f"rank {rank}: {error}"
                if host is not None:
                    host.close()  # so that no rank waits for this one
                    host = None
    answers = [n.decode(errors="replace") for n in tell(why.encode(), world_size, group)]
    why = "; ".join(dict.fromkeys(answer for answer in answers if answer))
    if host is not None and why:
        host.close()
        host = None
    return host, why


def _listen(backlog: int) -> tuple[socket.socket | None, str]:
    """A listening socket without a file, and this rank's note: machine, network namespace, address, token."""
    if not hasattr(os, "memfd_create"):
        return None, "! this system has no memfd_create"
    name = f"fzero-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
        listener.bind(b"\0" + name.encode())
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        return None, f"! {error}"
    return listener, f"{machine} {network} {name} {secrets.token_hex(16)}"


def _apart(notes: list[str]) -> str:
    """The reason why ranks with these notes share no memory, or "". It is the same on every rank."""
    for rank, note in enumerate(notes):
        if note.startswith("!"):
            return f"rank {rank}: {note[2:]}"
        for field_, label in enumerate(("machine", "network namespace")):
            if note.split()[field_] != notes[0].split()[field_]:
                return f"rank {rank} is in another {label} than rank 0"
    return ""


def _connected(rank: int, listener: socket.socket, notes: list[str]) -> dict[int, socket.socket]:
    """Returns a socket to every other rank.

    This rank connects to lower ranks and shows each the token that it sent over gloo. Higher ranks connect here. Any
    process on this machine may find the address. A process of another user is sent away. One that shows no token, or
    nothing yet, costs the others nothing.
    """
    deadline = time.monotonic() + MEET_SECONDS
    sockets = {lower: _visit(rank, lower, notes[lower], deadline) for lower in range(rank)}
    awaited = set(range(rank + 1, len(notes)))
    listener.setblocking(False)
    poll, silent = select.poll(), dict[int, socket.socket]()
    poll.register(listener, select.POLLIN)
    try:
        while awaited:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerError(f"rank {min(awaited)} did not connect within {MEET_SECONDS:g} s")
            for number, _ in poll.poll(left * 1000):
                if number == listener.fileno():
                    _let_in(listener, silent, poll)
                elif guest := silent.pop(number, None):
                    poll.unregister(guest)
                    other = _rank_of(guest, notes[rank].split()[3])
                    if other in awaited:
                        awaited.remove(other)
                        sockets[other] = guest
                    else:
                        guest.close()
    finally:
        for guest in silent.values():
            guest.close()
    return sockets


def _visit(rank: int, other: int, note: str, deadline: float) -> socket.socket:
    """A socket to a lower rank, which has been shown its token. Strangers may fill that rank's queue for a while."""
    _, _, name, token = note.split()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(MEET_SECONDS)
        while True:
            try:
                connection.connect(b"\0" + name.encode())
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PeerError(f"rank {other} let nobody in within {MEET_SECONDS:g} s") from None
                time.sleep(0.001)
        if _user(connection) != os.geteuid():
            raise PeerError(f"who answers for rank {other} is user {_user(connection)}, not {os.geteuid()}")
        connection.send(f"{token} {rank}".encode())
    except BaseException:
        connection.close()
        raise
    return connection


def _user(peer: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


def _let_in(listener: socket.socket, silent: dict[int, socket.socket], poll: select.poll) -> None:
    """Accepts a connection of this user; its token is still to come."""
    try:
        guest, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return
    if _user(guest) != os.geteuid():
        guest.close()
        return
    guest.setblocking(False)
    silent[guest.fileno()] = guest
    poll.register(guest, select.POLLIN)
    if len(silent) > MAX_SILENT:
        first = silent.pop(next(iter(silent)))
        poll.unregister(first)
        first.close()


def _rank_of(guest: socket.socket, token: str) -> int | None:
    """The rank that a guest says it is; None without the right token. The kernel closes descriptors that it sends
    along."""
    try:
        message = guest.recv(256)
    except OSError:
        return None
    shown, _, number = message.partition(b" ")
    return int(number) if secrets.compare_digest(shown, token.encode()) and re.fullmatch(rb"\d{1,6}", number) else None


def _probe(host: SharedMemoryPeers, notes: list[str]) -> None:
    """Reads in each rank's memory the token that this rank sent over gloo. Raises PeerError if it is not there."""
    pages = [torch.tensor(list(note.split()[3].encode() * 256), dtype=torch.uint8) for note in notes]
    own = pages[host.rank]
    local = host.allocate(own.numel()).copy_(own)
    host.offer(0, local, host.peers)
    for rank in host.peers:
        if not torch.equal(host.take(0, rank, local, "the probe"), pages[rank]):
            raise PeerError(f"rank {rank} wrote into its memory what rank {host.rank} does not find there")
        host.done(0, rank)
    host.settle(0, "the probe")
