"""shared_memory: transfers among ranks that read one another's memory (`fzero.comm.peers`).

A rank lets those read its source to whom it sends some of it (`fzero.ir.collectives`). It copies what it gets into
place, or adds it straight from the memory of ranks 0..N-1, in that order, and divides once. These are the bits of
`P2P`, without a receive buffer. An all_reduce gathers the sums as well.

A receiver reads a message from the sender's memory once its receive has started, while it waits for anything else. The
sender's wait returns when it was read. So ranks that send to one another do not stand still.

A source in an arena is read where it is. The other ranks may still read it after `wait`, so it must not change before
`settle`. Any other source is copied first and settles at once.

Cost per rank: a gather copies (N-1)/N of the buffer; a reduce-scatter reads the own slice of every rank and writes one
slice. Two ranks, 64 MB in arenas, beside point-to-point over loopback: gather 3.8 ms against 17.6, reduce-scatter 7.3
against 26.7. 1 MB: 0.16 against 0.47 and 0.24 against 0.72. Copied first, 64 MB take 10.0 and 13.7 ms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import count

import torch

from fzero.comm import heartbeat
from fzero.comm.group import Line
from fzero.comm.peers import SharedMemoryPeers
from fzero.comm.transfers import Messages, Pending, drain, finish, keep_own
from fzero.ir.collectives import ALL_GATHER, Collective, combine
from fzero.ir.messages import as_it_lies
from fzero.ir.op import Op

LANES = 8  # axes, at most


def _letter(receiver: int, tag: int, nth: int) -> int:
    """The number of a message: of no collective, and of no other message of the sender that may be in flight."""
    return 1 << 58 | (nth & 0xFFFF) << 40 | (receiver & 0xFFFF) << 24 | (tag & 0xFFFFFF)


class Shared:
    """`Comm` on SharedMemoryPeers.

    line: the ranks that it is among. lane: below LANES; one for each axis, so that transfers of two axes differ in
    number.

    Invariants: `pending` and `started` (the transfer's number, and the ranks that send to this one) hold the
    collectives that were not waited for, by the name of the buffer written; `pending` also holds messages. `letters`
    counts the messages by sender, receiver and tag. `lent` holds the numbers of transfers whose sources the others may
    still read in place, by the same name, until `settle`. `number` grows by 2 with every start, because an all_reduce
    uses two. Only the methods here write these, on the thread that runs the program.
    """

    def __init__(self, host: SharedMemoryPeers, line: Line, lane: int = 0) -> None:
        self.host, self.rank, self.world, self.ranks = host, line.place, line.size, line.ranks
        self.lane, self.number = lane, 0
        self.others = Messages(line.place, line.size).others()
        self.presence = heartbeat.of(line.group)
        self.letters: defaultdict[tuple[int, int, int], Iterator[int]] = defaultdict(count)
        self.pending: dict[str, Pending] = {}
        self.started: dict[str, tuple[int, list[int]]] = {}
        self.lent: dict[str, list[int]] = {}

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a transfer; see `Comm.start`. Settles an earlier transfer into the same buffer first."""
        record = op.row.collective
        if record is None:
            self.number += 2
            self.pending[name] = self._message(op, as_it_lies(tensors[0]))
            return
        self.settle(name)
        self.number += 2
        number, label = self.number * LANES + self.lane, f"{op.kind} into {name}"
        source, dest = tensors[0].reshape(-1), tensors[len(op.reads)].view(-1)
        numel = source.numel()
        senders = record.senders(numel, self.rank, self.world)
        self.started[name] = number, [self.ranks[place] for place in self.others if place in senders]
        readers = [place for place in self.others if record.sends(numel, self.rank, place, self.world) is not None]
        self._offer(name, number, source, readers)
        if op.reduces:
            done = partial(self._sum, name, op, record, number, source, dest, label)
        else:
            keep_own(record, source, record.places(dest, numel, self.rank, self.world), self.rank, self.world)
            done = partial(self._collect, record, number, source, dest, label)
        self.pending[name] = Pending([], done, [source])

    def ready(self, name: str) -> bool:
        """Whether every peer that sends to this rank has offered its part of the transfer."""
        return name not in self.started or self.host.ready(*self.started[name])

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
        number = _letter(places[1], op.tag, next(self.letters[letter])) * LANES + self.lane
        peer, label = self.ranks[op.peer], f"{op.kind} of tag {op.tag}"
        if op.is_send:
            in_place = self.host.offer(number, data, [peer])
            return Pending([], (lambda: self.host.settle(number, label)) if in_place else (lambda: None), [data])
        self.host.expect(number, peer, data)
        return Pending([], lambda: self.host.arrive(number, peer, label))

    def _offer(self, name: str, number: int, source: torch.Tensor, readers: list[int]) -> None:
        """Lets these of the line read `source`; remembers the transfer if they read it in place."""
        if readers and self.host.offer(number, source, [self.ranks[place] for place in readers]):
            self.lent.setdefault(name, []).append(number)

    def _collect(self, record: Collective, number: int, source: torch.Tensor, dest: torch.Tensor, label: str) -> None:
        """Copies what the peers send into its places in `dest`."""
        places = record.places(dest, source.numel(), self.rank, self.world)
        for place in self.others:
            if place in places:
                taken = self.host.take(number, self.ranks[place], source, label)
                part = record.part(taken, place, self.rank, self.world)
                assert part is not None
                places[place].copy_(part)
                self.host.done(number, self.ranks[place])

    def _sum(
        self, name: str, op: Op, record: Collective, number: int, source: torch.Tensor, dest: torch.Tensor, label: str
    ) -> None:
        """Adds the ranks' parts in rank order; an all_reduce gathers the sums too."""
        wholes = {place: self.host.take(number, self.ranks[place], source, label) for place in self.others}
        wholes[self.rank] = source
        parts = [record.part(wholes[place], place, self.rank, self.world) for place in range(self.world)]
        local = dest.view(self.world, -1)[self.rank] if record.scattered else dest
        combine([part for part in parts if part is not None], op.reduction, op.divisor, local)
        for place in self.others:
            self.host.done(number, self.ranks[place])
        if record.scattered:
            self._offer(name, number + LANES, local, self.others)
            self._collect(ALL_GATHER, number + LANES, local, dest, label)
