"""Ranks of this process that read one another's memory."""

from __future__ import annotations

import socket

from fzero.comm.peers import SharedMemoryPeers


def hosts(world: int, seconds: float = 10.0) -> list[SharedMemoryPeers]:
    """One for each rank, connected; each waits so long for another."""
    pairs: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for low in range(world):
        for high in range(low + 1, world):
            pairs[low][high], pairs[high][low] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [SharedMemoryPeers(rank, own, seconds) for rank, own in enumerate(pairs)]
