"""message_order: sends and receives of all ranks. A send meets one receive, of its tag, size and dtype, in order.

The order counts because NCCL has no tags: it matches the messages between two ranks by their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from fzero.ir.fx_values import steps
from fzero.ir.messages import forms
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import DTYPE_NAMES
from fzero.verify.form import length

Found = tuple[int, int, str]  # rank, op number, what is wrong


@dataclass(frozen=True)
class _End:
    """One end of a message: where it starts, and what it moves."""

    rank: int
    op: int
    tag: int
    numel: int
    dtype: str
    form: torch.Tensor | None

    @property
    def moves(self) -> str:
        return f"{self.numel} elements of {self.dtype}"


@dataclass
class _Line:
    """The messages over an axis from one rank to another, in the order in which each of the two starts them."""

    sent: list[_End] = field(default_factory=list)
    received: list[_End] = field(default_factory=list)


def unmatched(programs: Mapping[int, Program]) -> Iterator[Found]:
    """Faults of messages, rank by rank, of the ranks that are given."""
    lines: dict[tuple[str, int, int], _Line] = {}
    messages = {id(p): [(i, op) for i, op in enumerate(p.ops) if op.is_message] for p in programs.values()}
    lies = {id(p): forms(p) for p in programs.values()}
    for rank, program in programs.items():
        for i, op in messages[id(program)]:
            peers = program.mesh.peers(rank, str(op.axis))
            if not 0 <= op.peer < len(peers):
                yield rank, i, f"names peer {op.peer} of the {len(peers)} along {op.axis}"
                return
            ends = (rank, peers[op.peer]) if op.is_send else (peers[op.peer], rank)
            line = lines.setdefault((str(op.axis), *ends), _Line())
            (line.sent if op.is_send else line.received).append(_end(program, rank, i, op, lies[id(program)]))
    for (axis, sender, receiver), line in lines.items():
        yield from _alone(line, axis, sender, receiver)
        yield from _unlike(line, axis, sender)


def _end(program: Program, rank: int, number: int, op: Op, lies: Mapping[str, torch.Tensor]) -> _End:
    ref = (op.reads or op.writes)[0]
    dtype = DTYPE_NAMES[program.buffers[ref.name].dtype]
    return _End(rank, number, op.tag, length(program, ref), dtype, lies.get(ref.name))


def _alone(line: _Line, axis: str, sender: int, receiver: int) -> Iterator[Found]:
    """Messages that are only sent, or only received."""
    sent, received = (Counter(end.tag for end in ends) for ends in (line.sent, line.received))
    way = f"over {axis} from rank {sender} to {receiver}"
    for ends, missing, what in (
        (line.sent, sent - received, f"is sent {way} and not received: rank {sender} would wait for ever"),
        (line.received, received - sent, f"is received {way} and not sent: rank {receiver} would wait for ever"),
    ):
        for end in ends:
            if end.tag in missing:
                yield end.rank, end.op, f"a message of {end.moves} (tag {end.tag}) {what}"


def _unlike(line: _Line, axis: str, sender: int) -> Iterator[Found]:
    """Messages whose ends differ in what they move, or in order."""
    for n, (here, there) in enumerate(zip(line.sent, line.received, strict=False)):
        if here.tag != there.tag:
            what = (
                f"message {n} over {axis} from rank {sender} has tag {here.tag} there and tag {there.tag} here: both "
                "ends must start messages in one order, for NCCL has no tags and matches them by number"
            )
            yield there.rank, there.op, what
        elif here.moves != there.moves:
            yield there.rank, there.op, f"receives {there.moves} where rank {sender} sends {here.moves}"
        elif here.form is not None and there.form is not None and steps(here.form) != steps(there.form):
            what = f"strides {list(there.form.stride())} where rank {sender} sends {list(here.form.stride())}"
            yield there.rank, there.op, f"receives {what}: a message moves memory as it lies"
