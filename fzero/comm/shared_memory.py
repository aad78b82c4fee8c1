"""shared_memory: transfers among ranks that read one another's memory (`fzero.comm.peers`).

All-gather: each rank lets the others read its slice, and copies their slices into place. Reduce-scatter: the owner of
slice r adds slice r of ranks 0..N-1 straight from their memory, in that order, and divides once. These are the bits of
`P2P`, without a receive buffer. An all_reduce gathers the sums as well. An all_reduce_small, for scalars, adds the
whole buffers.

A source in an arena is read where it is. The other ranks may still read it after `wait`, so it must not change before
`settle`. Any other source is copied first and settles at once.

Cost per rank: a gather copies (N-1)/N of the buffer; a reduce-scatter reads the own slice of every rank and writes one
slice. Two ranks, 64 MB in arenas, beside point-to-point over loopback: gather 3.8 ms against 17.6, reduce-scatter 7.3
against 26.7. 1 MB: 0.16 against 0.47 and 0.24 against 0.72. Copied first, 64 MB take 10.0 and 13.7 ms.
"""

from __future__ import annotations

from typing import Any

import torch

from fzero.comm import heartbeat
from fzero.comm.peers import SharedMemoryPeers
from fzero.comm.transfers import Messages, Pending, combine, drain, finish
from fzero.ir.records import Op


class Shared:
    """`Comm` on SharedMemoryPeers. `send` and `recv` go point-to-point over the process group.

    Invariants: `pending` and `started` (the transfer's number) hold the gathers and reductions that were not waited
    for, by the name of the buffer written; `pending` also holds messages. `lent` holds the numbers of transfers whose
    sources the others may still read in place, by the same name, until `settle`. `number` grows by 2 with every start,
    because an all_reduce uses two numbers. Only the methods here write these, on the thread that runs the program.
    """

    def __init__(self, host: SharedMemoryPeers, world_size: int, group: Any = None) -> None:
        self.host, self.rank, self.world, self.number = host, host.rank, world_size, 0
        self.messages = Messages(host.rank, world_size, group)
        self.presence = heartbeat.of(group)
        self.pending: dict[str, Pending] = {}
        self.started: dict[str, int] = {}
        self.lent: dict[str, list[int]] = {}

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a transfer; see `Comm.start`. Settles an earlier transfer into the same buffer first."""
        if not op.is_collective:
            self.number += 2
            self.pending[name] = self.messages.start(op, tensors)
            return
        self.settle(name)
        self.number += 2
        number, label = self.number, f"{op.kind} into {name}"
        source, dest = tensors[0].reshape(-1), tensors[len(op.reads)].view(-1)
        self.started[name] = number
        self._offer(name, number, source)
        if op.gathers:
            own = dest.view(self.world, -1)[self.rank]
            if own.data_ptr() != source.data_ptr():
                own.copy_(source)
            self.pending[name] = Pending([], lambda: self._collect(number, dest, label), [source])
        else:
            self.pending[name] = Pending([], lambda: self._sum(name, op, number, source, dest, label), [source])

    def ready(self, name: str) -> bool:
        """Whether every peer has offered its part of the transfer."""
        return name not in self.started or self.host.ready(self.started[name])

    def wait(self, name: str) -> None:
        """Returns when the transfer is done. Raises KeyError if none was started, and PeerError."""
        finish(self.pending.pop(name), self.presence)
        self.started.pop(name, None)

    def settle(self, name: str) -> None:
        """Returns when every peer has read this rank's source of the transfer into `name`. Raises PeerError."""
        numbers = self.lent.pop(name, ())
        if numbers:
            self.presence.waits = True
            try:
                for number in numbers:
                    self.host.settle(number, f"reading of the source of {name}")
            finally:
                self.presence.waits = False

    def drain(self) -> None:
        """Ends all transfers that were started."""
        drain(self, list(self.pending))

    def close(self) -> None:
        """Closes the host; see `SharedMemoryPeers.close`."""
        self.host.close()

    def _offer(self, name: str, number: int, source: torch.Tensor) -> None:
        """Lets the peers read `source`; remembers the transfer if they read it in place."""
        if self.host.offer(number, source):
            self.lent.setdefault(name, []).append(number)

    def _collect(self, number: int, whole: torch.Tensor, label: str) -> None:
        """Copies the peers' slices into `whole`."""
        parts = whole.view(self.world, -1)
        for peer in self.messages.others():
            parts[peer].copy_(self.host.take(number, peer, parts[peer], label))
            self.host.done(number, peer)

    def _sum(self, name: str, op: Op, number: int, source: torch.Tensor, dest: torch.Tensor, label: str) -> None:
        """Adds the ranks' slices in rank order; an all_reduce gathers the sums too."""
        cut = not op.row.small
        wholes = {peer: self.host.take(number, peer, source, label) for peer in self.messages.others()} | {
            self.rank: source
        }
        parts = [wholes[r].view(self.world, -1)[self.rank] if cut else wholes[r] for r in range(self.world)]
        local = dest.view(self.world, -1)[self.rank] if op.row.changes_target else dest
        combine(op, parts, local)
        for peer in self.messages.others():
            self.host.done(number, peer)
        if op.row.changes_target:
            self._offer(name, number + 1, local)
            self._collect(number + 1, dest, label)
