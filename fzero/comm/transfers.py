"""transfers: how the transfers of one rank run on torch.distributed.

p2p (gloo). `P2P` builds every transfer from `isend` and `irecv`: who sends what is in the kind's record
(`fzero.ir.collectives`). What keeps a place of its own in the target arrives there. What is added up arrives in
scratch; the rank then adds the parts of ranks 0..N-1 in that order and divides once. An all_reduce then gathers the
slices. (N-1)/N of the buffer travels per rank and direction.

gloo's own reductions are not used. They do not add in rank order, and cutting a buffer in two changes their bits. Here
no world size, bucket size or order of issue changes the bits, and it is faster. `gloo` is `P2P` with gloo's all-gather.

shared (`fzero.comm.shared_memory`). The ranks of one machine read one another's memory. The sums and their order are
the same.

nccl (CUDA). `Nccl` uses the library's collectives. Bits are equal only for the same algorithm and layout.

Ranks issue the same transfers in the same order (`fzero.verify` checks this), so a running number is the tag of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fzero.comm import heartbeat
from fzero.comm.group import Line
from fzero.comm.protocol import Comm
from fzero.errors import DisagreementError, FzeroError, PeerError
from fzero.ir.collectives import ALL_GATHER, Collective, combine
from fzero.ir.messages import as_it_lies, flat_bytes
from fzero.ir.op import Op

# its name in 2.13.0, and in 2.11.0
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


@dataclass(frozen=True)
class Pending:
    """A transfer that was started and not waited for.

    requests: torch's handles; the transfer is done when all of them are. finish: the computation that remains then.
    keep: tensors that must stay alive until then.
    """

    requests: list[Any]
    finish: Callable[[], None] = lambda: None
    keep: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Messages:
    """Point-to-point messages of one rank on a process group (None: the default group). Ranks are those of the group.

    back: the group of messages to lower ranks, if they have one of their own.
    """

    rank: int
    world: int
    group: Any = None
    back: Any = None

    def others(self) -> list[int]:
        """The other ranks. The next rank comes first, so that not everyone sends to rank 0 at once."""
        return [(self.rank + i) % self.world for i in range(1, self.world)]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Starts to send a contiguous tensor. Returns torch's handle."""
        return dist.isend(tensor, group=self._group(self.rank, peer), group_dst=peer, tag=tag)

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Starts to receive into a contiguous tensor. Returns torch's handle."""
        return dist.irecv(tensor, group=self._group(peer, self.rank), group_src=peer, tag=tag)

    def _group(self, sender: int, receiver: int) -> Any:
        return self.back if self.back is not None and receiver < sender else self.group

    def start(self, op: Op, tensors: Sequence[torch.Tensor]) -> Pending:
        """Starts a send or recv op; the memory of its one tensor is sent or written."""
        run = self.send if op.is_send else self.recv
        return Pending([run(moved(as_it_lies(tensors[0])), op.peer, op.tag)])


# what NCCL moves and adds (torch's ProcessGroupNCCL); complex numbers are added as pairs
NCCL_DTYPES = {
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
}
NCCL_DTYPES |= {torch.float64}


def moved(flat: torch.Tensor) -> torch.Tensor:
    """A view of a 1-D tensor that is only moved: as bytes, where a library may not know the dtype."""
    return flat if flat.dtype in NCCL_DTYPES else flat_bytes(flat)


def added(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor that is summed."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


AllGather = Callable[[Messages, torch.Tensor, torch.Tensor, int], list[Any]]


def by_messages(
    messages: Messages, record: Collective, source: torch.Tensor, rooms: Mapping[int, torch.Tensor], tag: int
) -> list[Any]:
    """Starts what a record says that this rank sends of its source (1-D), and receives; `rooms`: where, by sender.
    Returns torch's handles."""
    rank, world = messages.rank, messages.world
    requests = [messages.recv(rooms[peer], peer, tag) for peer in messages.others() if peer in rooms]
    for peer in messages.others():
        if (part := record.part(source, rank, peer, world)) is not None:
            requests.append(messages.send(part, peer, tag))
    return requests


def keep_own(
    record: Collective, source: torch.Tensor, places: Mapping[int, torch.Tensor], rank: int, world: int
) -> None:
    """Copies what a rank sends to itself into its place, unless it lies there."""
    part = record.part(source, rank, rank, world)
    if part is not None and part.data_ptr() != places[rank].data_ptr():
        places[rank].copy_(part)


def gather_by_messages(messages: Messages, own: torch.Tensor, whole: torch.Tensor, tag: int) -> list[Any]:
    """Starts an all-gather of the ranks' `own` (1-D) into `whole` (1-D, in rank order). Returns torch's handles."""
    return place_by_messages(messages, ALL_GATHER, own, whole, tag)


def place_by_messages(
    messages: Messages, record: Collective, source: torch.Tensor, dest: torch.Tensor, tag: int
) -> list[Any]:
    """Starts a collective whose parts have places of their own in `dest` (1-D). Returns torch's handles."""
    places = record.places(dest, source.numel(), messages.rank, messages.world)
    requests = by_messages(messages, record, source, places, tag)
    keep_own(record, source, places, messages.rank, messages.world)
    return requests


def gather_by_gloo(messages: Messages, own: torch.Tensor, whole: torch.Tensor, tag: int) -> list[Any]:
    """The same by gloo's own all-gather."""
    whole, own = whole.view(torch.uint8), flat_bytes(own)  # gloo does not know every dtype
    return [all_gather_single(whole, own, group=messages.group, async_op=True)]


def finish(pending: Pending, presence: heartbeat.Presence) -> None:
    """Returns when a transfer is done. Raises PeerError if a peer does not come or its connection ends."""
    presence.waits = True
    try:
        for request in pending.requests:
            request.wait()
        pending.finish()
    except FzeroError:
        raise
    except RuntimeError as error:
        raise PeerError(str(error)) from error
    finally:
        presence.waits = False


def drain(comm: Comm, names: Sequence[str]) -> None:
    """Ends transfers that a failed step has started, so that nothing arrives in memory of the next step."""
    for name in names:
        comm.wait(name)
        comm.settle(name)


class P2P:
    """`Comm` from point-to-point messages on a process group.

    Invariant: `pending` holds the transfers that were started and not waited for, by the name of the buffer that they
    write. `number` grows by 2 with every start, because an all_reduce uses two tags. Only the methods here
    write these two, on the thread that runs the program.
    """

    def __init__(self, line: Line, *, all_gather: AllGather = gather_by_messages) -> None:
        self.rank, self.world, self.number = line.place, line.size, 0
        self.messages = Messages(line.place, line.size, line.group)
        self.presence = heartbeat.of(line.group)
        self.all_gather = all_gather
        self.pending: dict[str, Pending] = {}

    def ready(self, name: str) -> bool:
        """Always True: `wait` may block, since each rank has a process of its own."""
        return True

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a transfer; see `Comm.start`."""
        self.number += 2
        if op.row.collective is None:
            self.pending[name] = self.messages.start(op, tensors)
            return
        source, dest = tensors[0].reshape(-1), tensors[len(op.reads)].view(-1)
        if op.reduces:
            self.pending[name] = self._reduce(op, op.row.collective, source, dest, tensors[len(op.reads) + 1])
        elif op.gathers:
            self.pending[name] = Pending(self.all_gather(self.messages, source, dest, self.number))
        else:
            requests = place_by_messages(self.messages, op.row.collective, source, dest, self.number)
            self.pending[name] = Pending(requests, keep=[source])

    def wait(self, name: str) -> None:
        """Returns when the transfer is done. Raises KeyError if none was started, and PeerError."""
        finish(self.pending.pop(name), self.presence)

    def settle(self, name: str) -> None:
        """Returns at once: when `wait` returned, the source had been sent."""

    def drain(self) -> None:
        """Ends all transfers that were started."""
        drain(self, list(self.pending))

    def _reduce(
        self, op: Op, record: Collective, source: torch.Tensor, dest: torch.Tensor, scratch: torch.Tensor
    ) -> Pending:
        """Moves the parts into `scratch` ((N-1) rows). `Pending.finish` adds them in rank order; an all_reduce
        then gathers the slices."""
        own, tag = record.part(source, self.rank, self.rank, self.world), self.number
        assert own is not None
        others = self.messages.others()
        rooms = {peer: scratch[i].view(-1)[: own.numel()] for i, peer in enumerate(others)}
        requests = by_messages(self.messages, record, source, rooms, tag)

        def add() -> None:
            local = dest.view(self.world, -1)[self.rank] if record.scattered else dest
            in_order = [own if r == self.rank else rooms[r] for r in range(self.world)]
            combine(in_order, op.reduction, op.divisor, local)
            if record.scattered:
                for request in self.all_gather(self.messages, local, dest, tag + 1):
                    request.wait()

        return Pending(requests, add, [source, scratch])


def gloo(line: Line) -> P2P:
    """Returns a `P2P` that gathers by gloo's own all-gather."""
    return P2P(line, all_gather=gather_by_gloo)


class Nccl:
    """`Comm` on NCCL's collectives. A wait puts an event on the compute stream; the host goes on.

    `pending` as in `P2P`. `number` counts messages alone: NCCL's collectives have no tags. Only the methods here write
    these two, on the thread that runs the program. `calls`, by kind: starts a collective, and returns torch's
    handle; the division comes after.
    """

    def __init__(self, line: Line, presence: heartbeat.Presence | None = None) -> None:
        self.number, self.group = 0, line.group
        self.messages = Messages(line.place, line.size, line.group, line.back)
        self.presence = presence or heartbeat.of(line.group)
        self.pending: dict[str, Pending] = {}
        self.calls: dict[str, Callable[[Nccl, Op, torch.Tensor, torch.Tensor], Any]] = {
            "all_gather": Nccl._gather,
            "all_gather_values": Nccl._gather,
            "reduce_scatter": Nccl._scatter,
            "all_reduce": Nccl._reduce,
            "all_reduce_small": Nccl._reduce,
            "all_to_all": Nccl._exchange,
        }

    def ready(self, name: str) -> bool:
        """Always True: the host does not wait."""
        return True

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a transfer; see `Comm.start`."""
        if not op.is_collective:
            self.number += 2
            self.pending[name] = self.messages.start(op, tensors)
            return
        source, dest, divisor = tensors[0], tensors[len(op.reads)], op.divisor
        work = self.calls[op.kind](self, op, source, dest)

        def divide() -> None:
            if divisor != 1:
                dest.div_(divisor)

        self.pending[name] = Pending([work], divide, keep=[source])

    def wait(self, name: str) -> None:
        """Orders the compute stream after the transfer. Raises KeyError if none was started, and PeerError."""
        finish(self.pending.pop(name), self.presence)

    def settle(self, name: str) -> None:
        """Returns at once: the streams keep the order."""

    def drain(self) -> None:
        """Ends all transfers that were started."""
        drain(self, list(self.pending))

    def _gather(self, op: Op, source: torch.Tensor, dest: torch.Tensor) -> Any:
        return all_gather_single(moved(dest.view(-1)), moved(source.view(-1)), group=self.group, async_op=True)

    def _exchange(self, op: Op, source: torch.Tensor, dest: torch.Tensor) -> Any:
        return dist.all_to_all_single(moved(dest.view(-1)), moved(source.view(-1)), group=self.group, async_op=True)

    def _scatter(self, op: Op, source: torch.Tensor, dest: torch.Tensor) -> Any:
        return dist.reduce_scatter_tensor(added(dest), added(source), op=self._how(op), group=self.group, async_op=True)

    def _reduce(self, op: Op, source: torch.Tensor, dest: torch.Tensor) -> Any:
        dest.view(-1).copy_(source.reshape(-1))
        return dist.all_reduce(added(dest), op=self._how(op), group=self.group, async_op=True)

    def _how(self, op: Op) -> Any:
        return dist.ReduceOp.MAX if op.reduction == "max" else dist.ReduceOp.SUM


class Alone:
    """`Comm` of a world of one, whose programs have no transfers. Holds nothing that changes."""

    number = 0
    sent_bytes: Mapping[str, int] = MappingProxyType({})

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Raises DisagreementError: a transfer in a world of one is a fault."""
        raise DisagreementError(f"{op.kind} into {name} in a world of one")

    def ready(self, name: str) -> bool:
        """Always True."""
        return True

    def wait(self, name: str) -> None:
        """Raises KeyError: nothing was started."""
        raise KeyError(name)

    def settle(self, name: str) -> None:
        """Raises KeyError: nothing was started."""
        raise KeyError(name)

    def drain(self) -> None:
        """Returns at once: nothing is ever in flight."""
