"""interpreter: every rank of a program in one process, without a process group, one op at a time.

Ranks take turns: each runs until it waits for a transfer that another rank has not joined. Collectives meet by their
order of issue per axis, as they do on a network; when nobody can go on the ranks and what they wait for are named.

Results are those of `execute` bit for bit: reductions add ranks 0..N-1 in order and divide once. With `poison=True`
memory is NaN before it is written, after it is freed, and while a transfer into it has not been waited for; sources are
read as late as a network might read them. Whatever a transfer reads, writes or receives into must not change from its
start to its wait, and its sources until it settles. That makes it the oracle for programs that are wrong only in their
timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fzero.errors import FzeroError
from fzero.ir.program import Program
from fzero.ir.records import Op
from fzero.runtime.handlers import Rank, spoil, steps


class DeadlockError(FzeroError, RuntimeError):
    """No rank can go on; names each rank's op. Also raised where ranks issue collectives that do not match."""


class HazardError(FzeroError, RuntimeError):
    """Found by `poison=True`: memory of a transfer was touched while it was in flight."""


@dataclass
class _Letter:
    """A sent tensor, read by the receiver's wait or the sender's, whichever is first."""

    tensor: torch.Tensor
    content: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        if self.content is None:
            self.content = self.tensor.clone()
        return self.content


@dataclass
class _Transfer:
    """One rank's part in a collective: its op and tensors, then its result."""

    one: Op
    tensors: list[torch.Tensor]
    result: torch.Tensor | None = None


@dataclass
class Mailbox:
    """What the ranks of one process share: per axis and rank the collectives issued, and messages in flight."""

    size: int
    poison: bool = False
    issued: dict[str, list[list[_Transfer]]] = field(default_factory=dict)
    mail: dict[tuple[object, ...], deque[_Letter]] = field(default_factory=dict)

    def of_axis(self, axis: str) -> list[list[_Transfer]]:
        """By rank, the collectives that it has issued over an axis."""
        return self.issued.setdefault(axis, [[] for _ in range(self.size)])


class LocalComm:
    """`Comm` among ranks of one process."""

    number = 0

    def __init__(self, world: Mailbox, rank: int) -> None:
        self.world, self.rank = world, rank
        self.pending: dict[str, tuple[str, int]] = {}
        self.inbox: dict[str, tuple[tuple[object, ...], torch.Tensor]] = {}
        self.outbox: dict[str, _Letter] = {}
        self.before: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.lent: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # what other ranks may still read

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Joins a transfer: nothing moves before the wait."""
        axis = op.axis or ""
        if self.world.poison:
            self._poison(op, tensors)
            self.before[name] = [(tensor, tensor.clone()) for tensor in tensors]
        if op.is_send:
            key = (axis, self.rank, op.peer, op.tag)
            self.outbox[name] = _Letter(tensors[0])
            self.world.mail.setdefault(key, deque()).append(self.outbox[name])
        elif op.is_recv:
            self.inbox[name] = ((axis, op.peer, self.rank, op.tag), tensors[len(op.reads)])
        else:
            issued = self.world.of_axis(axis)[self.rank]
            issued.append(_Transfer(op, tensors))
            self.pending[name] = (axis, len(issued) - 1)

    def _poison(self, op: Op, tensors: list[torch.Tensor]) -> None:
        """The target holds NaN until the wait; scratch holds zeros, which a free of it would spoil."""
        source, targets = tensors[0], tensors[len(op.reads) :]
        for target in targets[:1]:
            inside = op.gathers and source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
            kept = source.clone() if inside else None
            spoil(target)
            if kept is not None:
                source.copy_(kept)
        for scratch in targets[1:]:
            scratch.zero_()

    def _check(self, name: str) -> None:
        for tensor, was in self.before.pop(name, ()):
            if not _same_bits(tensor, was):
                raise HazardError(f"rank {self.rank}: memory of the transfer into {name} changed before its wait")

    def settle(self, name: str) -> None:
        """Raises HazardError where a source changed since the wait."""
        for tensor, was in self.lent.pop(name, ()):
            if not _same_bits(tensor, was):
                raise HazardError(f"rank {self.rank}: a source of the transfer into {name} changed before it settled")

    def drain(self) -> None:
        """A program that fails here is not run again."""

    def ready(self, name: str) -> bool:
        """Whether every rank that takes part has joined the transfer."""
        if name in self.inbox:
            return bool(self.world.mail.get(self.inbox[name][0]))
        if name not in self.pending:
            return True
        axis, index = self.pending[name]
        return all(len(issued) > index for issued in self.world.of_axis(axis))

    def wait(self, name: str) -> None:
        """Fills the target. Raises HazardError where memory of the transfer changed since its start."""
        self._check(name)
        if name in self.inbox:
            key, target = self.inbox.pop(name)
            target.copy_(self.world.mail[key].popleft().read())
            return
        if name in self.outbox:
            self.outbox.pop(name).read()
            return
        axis, index = self.pending.pop(name)
        parts = [issued[index] for issued in self.world.of_axis(axis)]
        if parts[self.rank].result is None:
            _complete(parts)
        mine = parts[self.rank]
        assert mine.result is not None
        target, *scratch = mine.tensors[len(mine.one.reads) :]
        target.view(-1).copy_(mine.result.view(-1))
        for room in scratch if self.world.poison else ():
            spoil(room)
        if self.world.poison:
            lent = [mine.tensors[0], *([target] if mine.one.row.changes_target else [])]
            self.lent[name] = [(tensor, tensor.clone()) for tensor in lent]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _complete(parts: Sequence[_Transfer]) -> None:
    kinds = {(p.one.kind, p.one.axis, p.one.attrs, p.tensors[0].numel() * len(parts)) for p in parts}
    if len({(k, a) for k, a, *_ in kinds}) > 1 or len({p.one.reduction for p in parts}) > 1:
        raise DeadlockError(f"ranks meet in different collectives: {sorted(str(k[:3]) for k in kinds)}")
    sources = [p.tensors[0].reshape(-1) for p in parts]
    first = parts[0].one
    if first.gathers:
        whole = torch.cat(sources)
        results = [whole] * len(parts)
    else:
        total = sources[0].clone()
        for source in sources[1:]:
            total = torch.maximum(total, source) if first.reduction == "max" else total.add_(source)
        if first.divisor != 1:
            total.div_(first.divisor)
        scatter = first.row.scatters
        results = list(total.chunk(len(parts))) if scatter else [total] * len(parts)
    for p, result in zip(parts, results, strict=True):
        target = p.tensors[len(p.one.reads)]
        if target.numel() != result.numel():
            raise DeadlockError(f"{p.one.kind} into {p.one.writes[0]}: {result.numel()} elements for {target.numel()}")
        p.result = result


def interpret(
    programs: Mapping[int, Program], memory: Sequence[Mapping[str, torch.Tensor]], *, poison: bool = False
) -> list[Rank]:
    """Runs `{rank: program}` from each rank's buffers (inputs by name; state is written in place).

    Returns the ranks with what they hold at the end. Raises DeadlockError where they cannot go on.
    """
    world = Mailbox(len(programs), poison)
    ranks = [
        Rank(programs[r], r, LocalComm(world, r), memory[r], device=_device(memory[r]), poison=poison)
        for r in range(len(programs))
    ]
    running = {rank.rank: steps(rank) for rank in ranks}
    at: dict[int, int] = {}
    while running:
        stuck = dict(at)
        for number in list(running):
            position = next(running[number], None)
            if position is None:
                del running[number]
                at.pop(number, None)
            else:
                at[number] = position
        if running and at == stuck and len(stuck) == len(running):
            where = "; ".join(f"rank {r} at op {i}: {programs[r].ops[i].reads[0]}" for r, i in at.items())
            raise DeadlockError(f"every rank waits for another: {where}")
    return ranks


def _device(memory: Mapping[str, torch.Tensor]) -> torch.device:
    return next((tensor.device for tensor in memory.values()), torch.device("cpu"))
