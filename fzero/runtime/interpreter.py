"""interpreter: every rank of a program in one process, without a process group, one op at a time.

Ranks take turns: each runs until it waits for a transfer that another rank has not joined. As on a network, the n-th
collective of each rank on an axis meets the n-th of the others. If no rank can go on, the error names each rank and its
op.

Results are those of the executor bit for bit: reductions add ranks 0..N-1 in order and divide once. With `poison=True`
memory is NaN before it is written, after it is freed, and while a transfer into it is in flight. Sources are read as
late as a network might read them. The memory that a transfer reads, writes or receives into must not change from its
start to its wait; its sources must not change until it settles. So this is the oracle for programs whose only fault is
their timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fzero.errors import FzeroError
from fzero.ir.mesh import Mesh
from fzero.ir.messages import bytes_of
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.runtime.handlers import Rank, spoil, steps


class DeadlockError(FzeroError, RuntimeError):
    """No rank can go on; the message names each rank's op. Also raised if ranks issue collectives that do not match."""


class HazardError(FzeroError, RuntimeError):
    """Raised under `poison=True`: memory of a transfer was touched while it was in flight."""


@dataclass
class _Letter:
    """A sent tensor. The wait of the receiver or of the sender, the earlier one, reads it into `content`."""

    tensor: torch.Tensor
    content: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        if self.content is None:
            self.content = self.tensor.clone()
        return self.content


@dataclass
class _Transfer:
    """One rank's part in a collective: its op and tensors. `_complete` writes `result`."""

    op: Op
    tensors: list[torch.Tensor]
    result: torch.Tensor | None = None


@dataclass
class Mailbox:
    """The transfers among the ranks of one process. Only `LocalComm` writes it.

    issued: by axis and rank, the collectives in order of issue. mail: by (axis, sender, receiver, tag), the messages in
    flight.
    """

    mesh: Mesh
    poison: bool = False
    issued: dict[tuple[str, int], dict[int, list[_Transfer]]] = field(default_factory=dict)
    mail: dict[tuple[object, ...], deque[_Letter]] = field(default_factory=dict)

    def peers(self, rank: int, axis: str) -> list[int]:
        """The ranks that meet `rank` over an axis, itself included; all ranks where the mesh has no such axis."""
        return self.mesh.peers(rank, axis) if axis in self.mesh else list(range(self.mesh.world_size))

    def of_group(self, rank: int, axis: str) -> dict[int, list[_Transfer]]:
        """By rank, the collectives that were issued over an axis by those that meet `rank` there."""
        peers = self.peers(rank, axis)
        return self.issued.setdefault((axis, peers[0]), {peer: [] for peer in peers})

    def peer(self, rank: int, op: Op) -> int:
        """The rank at the other end of a message. `op.peer` is its coordinate on the axis."""
        return self.peers(rank, op.axis or "")[op.peer]


class LocalComm:
    """`Comm` among the ranks of one process. Only its methods write its fields.

    pending: by target, the axis and the index of a collective. inbox, outbox: by name, the messages in flight. moves:
    by target, the source and the target of each move, in order. before: under `poison`, by target, the tensors of each
    transfer with their values at its start. lent: those that other ranks may still read, with their values at the wait.
    """

    number = 0

    def __init__(self, world: Mailbox, rank: int) -> None:
        self.world, self.rank = world, rank
        self.pending: dict[str, tuple[str, int]] = {}
        self.inbox: dict[str, tuple[tuple[object, ...], torch.Tensor]] = {}
        self.outbox: dict[str, _Letter] = {}
        self.moves: dict[str, list[list[torch.Tensor]]] = {}
        self.before: dict[str, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        self.lent: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Joins a transfer. Nothing moves before the wait."""
        axis = op.axis or ""
        if self.world.poison:
            self._poison(op, tensors)
            self.before.setdefault(name, []).append([(tensor, tensor.clone()) for tensor in tensors])
        if op.moves:
            self.moves.setdefault(name, []).append(tensors)
        elif op.is_send:
            key = (axis, self.rank, self.world.peer(self.rank, op), op.tag)
            self.outbox[name] = _Letter(tensors[0])
            self.world.mail.setdefault(key, deque()).append(self.outbox[name])
        elif op.is_recv:
            self.inbox[name] = ((axis, self.world.peer(self.rank, op), self.rank, op.tag), tensors[len(op.reads)])
        else:
            issued = self.world.of_group(self.rank, axis)[self.rank]
            issued.append(_Transfer(op, tensors))
            self.pending[name] = (axis, len(issued) - 1)

    def _poison(self, op: Op, tensors: list[torch.Tensor]) -> None:
        """Fills the target with NaN until the wait. Scratch becomes zero; a free of it would spoil it."""
        source, targets = tensors[0], tensors[len(op.reads) :]
        for target in targets[:1]:
            inside = op.gathers and source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
            source_values = source.clone() if inside else None
            spoil(target)
            if source_values is not None:
                source.copy_(source_values)
        for scratch in targets[1:]:
            scratch.zero_()

    def _check(self, name: str) -> None:
        for tensor, was in self.before[name].pop(0) if self.before.get(name) else ():
            if not _same_bits(tensor, was):
                raise HazardError(f"rank {self.rank}: memory of the transfer into {name} changed before its wait")

    def settle(self, name: str) -> None:
        """Raises HazardError if a source changed since the wait."""
        for tensor, was in self.lent.pop(name, ()):
            if not _same_bits(tensor, was):
                raise HazardError(f"rank {self.rank}: a source of the transfer into {name} changed before it settled")

    def drain(self) -> None:
        """Does nothing: a program that fails here is not run again."""

    def ready(self, name: str) -> bool:
        """Whether every rank that takes part has joined the transfer."""
        if name in self.inbox:
            return bool(self.world.mail.get(self.inbox[name][0]))
        if name not in self.pending:
            return True
        axis, index = self.pending[name]
        return all(len(issued) > index for issued in self.world.of_group(self.rank, axis).values())

    def wait(self, name: str) -> None:
        """Fills the target. Raises HazardError if memory of the transfer changed since its start."""
        self._check(name)
        if name in self.inbox:
            key, target = self.inbox.pop(name)
            target.copy_(self.world.mail[key].popleft().read())
            return
        if name in self.outbox:
            self.outbox.pop(name).read()
            return
        if self.moves.get(name):
            source, target = self.moves[name].pop(0)
            target.copy_(source.view(target.shape))
            return
        axis, index = self.pending.pop(name)
        parts = {rank: issued[index] for rank, issued in self.world.of_group(self.rank, axis).items()}
        if parts[self.rank].result is None:
            _complete(list(parts.values()))
        own = parts[self.rank]
        assert own.result is not None
        target, *scratch = own.tensors[len(own.op.reads) :]
        target.view(-1).copy_(own.result.view(-1))
        for room in scratch if self.world.poison else ():
            spoil(room)
        if self.world.poison:
            lent = [own.tensors[0], *([target] if own.op.row.scattered else [])]
            self.lent[name] = [(tensor, tensor.clone()) for tensor in lent]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bytes_of(a), bytes_of(b))


def _complete(transfers: Sequence[_Transfer]) -> None:
    """Writes the result of every rank's part, from all parts. Raises DeadlockError if kinds, reductions or sizes do not
    match."""
    kinds = {
        (transfer.op.kind, transfer.op.axis, transfer.op.attrs, transfer.tensors[0].numel() * len(transfers))
        for transfer in transfers
    }
    if len({(k, a) for k, a, *_ in kinds}) > 1 or len({transfer.op.reduction for transfer in transfers}) > 1:
        raise DeadlockError(f"ranks meet in different collectives: {sorted(str(k[:3]) for k in kinds)}")
    sources = [transfer.tensors[0].reshape(-1) for transfer in transfers]
    first = transfers[0].op
    assert first.row.collective is not None
    results = first.row.collective.reference(sources, first.reduction, first.divisor)
    for transfer, result in zip(transfers, results, strict=True):
        target = transfer.tensors[len(transfer.op.reads)]
        if target.numel() != result.numel():
            raise DeadlockError(
                f"{transfer.op.kind} into {transfer.op.writes[0]}: {result.numel()} elements for {target.numel()}"
            )
        transfer.result = result


def interpret(
    programs: Mapping[int, Program], memory: Sequence[Mapping[str, torch.Tensor]], *, poison: bool = False
) -> list[Rank]:
    """Runs `{rank: program}` from each rank's buffers (inputs by name; the state is written in place).

    Returns the ranks with their memory at the end. Raises DeadlockError if they cannot go on.
    """
    mailbox = Mailbox(programs[0].mesh, poison)
    ranks = [
        Rank(programs[r], r, LocalComm(mailbox, r), memory[r], device=_device(memory[r]), poison=poison)
        for r in range(len(programs))
    ]
    running = {rank.rank: steps(rank) for rank in ranks}
    waiting: dict[int, int] = {}
    while running:
        stuck = dict(waiting)
        for rank_number in list(running):
            position = next(running[rank_number], None)
            if position is None:
                del running[rank_number]
                waiting.pop(rank_number, None)
            else:
                waiting[rank_number] = position
        if running and waiting == stuck and len(stuck) == len(running):
            where = "; ".join(f"rank {r} at op {i}: {programs[r].ops[i].reads[0]}" for r, i in waiting.items())
            raise DeadlockError(f"every rank waits for another: {where}")
    for rank in ranks:
        for name in rank.on_disk.keys() & memory[rank.rank].keys():
            memory[rank.rank][name].copy_(rank.memory[name])
    return ranks


def _device(memory: Mapping[str, torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in memory.values()), torch.device("cpu"))
