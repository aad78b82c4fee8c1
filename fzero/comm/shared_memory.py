"""shared_memory: transfers among ranks that read one another's memory (`fzero.comm.peers`).

All-gather: each rank lets the others read its slice, and copies their slices into place. Reduce-scatter: the owner of
slice r adds slice r of ranks 0..N-1 straight from their memory, in that order, and divides once. These are the bits of
`P2P`, without a receive buffer. An all_reduce gathers the sums as well. An all_reduce_small, for scalars, adds the
whole buffers.

A receiver reads a message from the sender's memory once its receive has started, while it waits for anything else. The
sender's wait returns when it was read. So ranks that send to one another do not stand still.

A source in an arena is read where it is. The other ranks may still read it after `wait`, so it must not change before
`settle`. Any other source is copied first and settles at once.

Cost per rank: a gather copies (N-1)/N of the buffer; a reduce-scatter reads the own slice of every rank and writes one
slice. Two ranks, 64 MB in arenas, beside point-to-point over loopback: gather 3.8 ms against 17.6, reduce-scatter 7.3
against 26.7. 1 MB: 0.16 against 0.47 and 0.24 against 0.72. Copied first, 64 MB take 10.0 and 13.7 ms.
"""

from __future__ import annotations

import torch

from fzero.comm import heartbeat
from fzero.comm.group import Line
from fzero.comm.peers import SharedMemoryPeers
from fzero.comm.transfers import Messages, Pending, combine, drain, finish
from fzero.ir.messages import as_it_lies
from fzero.ir.op import Op

LANES = 8  # axes, at most


def _letter(receiver: int, tag: int, count: int) -> int:
    """The number of a message: of no collective, and of no other message of the sender that may be in flight."""
    return 1 << 58 | (count & 0xFFFF) << 40 | (receiver & 0xFFFF) << 24 | (tag & 0xFFFFFF)


class Shared:
    """`Comm` on SharedMemoryPeers.

    line: the ranks that it is among. lane: below LANES; one for each axis, so that transfers of two axes differ in
    number.

    Invariants: `pending` and `started` (the transfer's number) hold the gathers and reductions that were not waited
    for, by the name of the buffer written; `pending` also holds messages. `letters` counts the messages by sender,
    receiver and tag. `lent` holds the numbers of transfers whose
    sources the others may still read in place, by the same name, until `settle`. `number` grows by 2 with every start,
    because an all_reduce uses two. Only the methods here write these, on the thread that runs the program.
    """

    def __init__(self, host: SharedMemoryPeers, line: Line, lane: int = 0) -> None:
        self.host, self.rank, self.world, self.ranks = host, line.place, line.size, line.ranks
        self.lane, self.number = lane, 0
        self.others = [line.ranks[place] for place in Messages(line.place, line.size).others()]
        self.presence = heartbeat.of(line.group)
        self.letters: dict[tuple[int, int, int], int] = {}
        self.pending: dict[str, Pending] = {}
        self.started: dict[str, int] = {}
        self.lent: dict[str, list[int]] = {}

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a transfer; see `Comm.start`. Settles an earlier transfer into the same buffer first."""
        if not op.is_collective:
            self.number += 2
            self.pending[name] = self._message(op, as_it_lies(tensors[0]))
            return
        self.settle(name)
        self.number += 2
        number, label = self.number * LANES + self.lane, f"{op.kind} into {name}"
        source, dest = tensors[0].reshape(-1), tensors[len(op.reads)].view(-1)
        self.started[name] = number
        self._offer(name, number, source)
        if op.gathers:
            own = dest.view(self.world, -1)[self.rank]
            if own.data_ptr() != source.data_ptr():
                own.copy_(source)
            self.pending[name] = Pending([], lambda: self._collect(number, dest, label), [source])
        elif op.exchanges:
            self.pending[name] = Pending([], lambda: self._swap(number, source, dest, label), [source])
        else:
            self.pending[name] = Pending([], lambda: self._sum(name, op, number, source, dest, label), [source])

    def ready(self, name: str) -> bool:
        """Whether every peer has offered its part of the transfer."""
        return name not in self.started or self.host.ready(self.started[name], self.others)

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

    def _message(self, op: Op, data: torch.Tensor) -> Pending:
        """Starts a send or recv of `data` (1-D). The n-th message of a tag meets the n-th receive."""
        places = (self.rank, op.peer) if op.is_send else (op.peer, self.rank)
        letter = (*places, op.tag)
        count = self.letters[letter] = self.letters.get(letter, -1) + 1
        number = _letter(places[1], op.tag, count) * LANES + self.lane
        peer, label = self.ranks[op.peer], f"{op.kind} of tag {op.tag}"
        if op.is_send:
            in_place = self.host.offer(number, data, [peer])
            return Pending([], (lambda: self.host.settle(number, label)) if in_place else (lambda: None), [data])
        self.host.expect(number, peer, data)
        return Pending([], lambda: self.host.arrive(number, peer, label))

    def _offer(self, name: str, number: int, source: torch.Tensor) -> None:
        """Lets the peers read `source`; remembers the transfer if they read it in place."""
        if self.host.offer(number, source, self.others):
            self.lent.setdefault(name, []).append(number)

    def _collect(self, number: int, whole: torch.Tensor, label: str) -> None:
        """Copies the peers' slices into `whole`."""
        parts = whole.view(self.world, -1)
        for rank in self.others:
            part = parts[self.ranks.index(rank)]
            part.copy_(self.host.take(number, rank, part, label))
            self.host.done(number, rank)

    def _swap(self, number: int, source: torch.Tensor, dest: torch.Tensor, label: str) -> None:
        """Copies this rank's part of every rank's source into `dest`."""
        parts = dest.view(self.world, -1)
        place = self.ranks.index(self.host.rank)
        parts[place].copy_(source.view(self.world, -1)[place])
        for rank in self.others:
            taken = self.host.take(number, rank, source, label).view(self.world, -1)
            parts[self.ranks.index(rank)].copy_(taken[place])
            self.host.done(number, rank)

    def _sum(self, name: str, op: Op, number: int, source: torch.Tensor, dest: torch.Tensor, label: str) -> None:
        """Adds the ranks' slices in rank order; an all_reduce gathers the sums too."""
        cut = not op.row.small
        wholes = {rank: self.host.take(number, rank, source, label) for rank in self.others} | {self.host.rank: source}
        parts = [wholes[r].view(self.world, -1)[self.rank] if cut else wholes[r] for r in self.ranks]
        local = dest.view(self.world, -1)[self.rank] if op.row.changes_target else dest
        combine(op, parts, local)
        for rank in self.others:
            self.host.done(number, rank)
        if op.row.changes_target:
            self._offer(name, number + LANES, local)
            self._collect(number + LANES, dest, label)
