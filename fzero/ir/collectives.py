"""collectives: one record for each kind of transfer among all ranks of an axis: who sends what, and what becomes of it.

Every rank has a source of one size, seen in 1-D. `sends` says which elements of it go from one rank to another. What
arrives keeps a place of its own in the target, in rank order, or is added up in rank order (`combines`). An all-reduce
has a second half: the sums are slices (`scattered`), and an all-gather brings them together.

Messages, shared memory and the interpreter do what the record says. NCCL has a call for each kind
(`fzero.comm.transfers.Nccl.calls`). `fzero.verify`, the bytes and the costs read the record too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Span = tuple[int, int]
Sends = Callable[[int, int, int, int], Span | None]
Part = Literal["slice", "whole", "value"]


def everything(numel: int, sender: int, receiver: int, world: int) -> Span:
    """Every rank sends all of its source to every rank."""
    return 0, numel


def own_part(numel: int, sender: int, receiver: int, world: int) -> Span:
    """Rank r gets the r-th of equal parts. Raises ValueError where there are no equal parts."""
    if numel % world:
        raise ValueError(f"{numel} elements have no equal parts for {world} ranks")
    return receiver * numel // world, (receiver + 1) * numel // world


@dataclass(frozen=True, slots=True)
class Collective:
    """What a transfer does among the ranks of an axis.

    source, target: "slice", one of N equal slices; "whole", N of them; "value", what has no slices.
    sends: `sends(numel, sender, receiver, world)` are the elements [start, stop) of the sender's source that the
    receiver gets; None: nothing.
    combines: the parts that arrive are added (or the largest is taken) in rank order, and divided once. Else each has
    a place of its own in the target.
    scattered: the kind that does the first half alone, where an all-gather of its results is the second; "": one half.
    rate: the measured kind that its cost is read from (`fzero.cost.rates`).
    """

    source: Part
    target: Part
    sends: Sends
    rate: str
    combines: bool = False
    scattered: str = ""

    @property
    def term(self) -> str:
        """What `fzero.verify` takes a transfer of a bucket for: own slices are "gathered", values "reduced", or those
        of all ranks "exchanged". "": it has no meaning on a bucket, and is a term of its own on a value."""
        if self.combines:
            return "reduced"
        terms = {"slice": "gathered", "whole": "exchanged", "value": "exchanged"}
        return terms[self.source] if self.target == "whole" else ""

    def senders(self, numel: int, rank: int, world: int) -> list[int]:
        """The ranks that send to a rank, itself included, from sources of so many elements."""
        return [other for other in range(world) if self.sends(numel, other, rank, world) is not None]

    def part(self, source: torch.Tensor, sender: int, receiver: int, world: int) -> torch.Tensor | None:
        """What the sender sends to the receiver, a view of its source (1-D); None: nothing."""
        span = self.sends(source.numel(), sender, receiver, world)
        return None if span is None else source[span[0] : span[1]]

    def places(self, target: torch.Tensor, numel: int, rank: int, world: int) -> dict[int, torch.Tensor]:
        """By sender, where its part goes in a rank's target (1-D), if parts are not combined."""
        senders = self.senders(numel, rank, world)
        return dict(zip(senders, target.view(len(senders), -1), strict=True))

    def whole_bytes(self, source: int, target: int) -> int:
        """Bytes of the whole, of which ranks have slices, from those of one rank's source and target."""
        return target if self.source == "slice" else source

    def wire_bytes(self, whole: int, world: int) -> int:
        """Bytes that one rank sends: slices of 1/N to N - 1 others, in one or two halves, or all of a value to each."""
        halves = 2 if self.scattered else 1
        return whole * (world - 1) if self.source == "value" else halves * whole * (world - 1) // world

    def scratch(self, transport: str, numel: int, world: int) -> tuple[int, int] | None:
        """The shape of the receive buffer for a source of so many elements; None where the transport uses none.

        Messages arrive before they are combined. In shared memory a rank adds what it reads of the others. NCCL has
        memory of its own.
        """
        if not self.combines or transport != "p2p":
            return None
        return world - 1, max(numel if self.source == "value" else numel // world, 1)

    def reference(self, sources: Sequence[torch.Tensor], how: str = "sum", divisor: int = 1) -> list[torch.Tensor]:
        """The targets of all ranks (1-D), from their sources (1-D, in rank order). Equal targets are one tensor.

        >>> from fzero.ir.kinds import of
        >>> sources = [torch.tensor([0, 1]), torch.tensor([10, 11])]
        >>> [target.tolist() for target in of("all_to_all").collective.reference(sources)]
        [[0, 10], [1, 11]]
        >>> [target.tolist() for target in of("reduce_scatter").collective.reference(sources)]
        [[10], [12]]
        """
        world, numel = len(sources), sources[0].numel()
        made: dict[tuple[Span | None, ...], torch.Tensor] = {}
        targets = []
        for rank in range(world):
            spans = tuple(self.sends(numel, sender, rank, world) for sender in range(world))
            if spans not in made:
                parts = [x[span[0] : span[1]] for x, span in zip(sources, spans, strict=True) if span is not None]
                made[spans] = combine(parts, how, divisor) if self.combines else torch.cat(parts)
            targets.append(made[spans])
        return [torch.cat(targets)] * world if self.scattered else targets


ALL_GATHER = Collective("slice", "whole", everything, rate="all_gather")  # the second half of an all-reduce too


def combine(parts: Sequence[torch.Tensor], how: str, divisor: int, into: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of the parts of ranks 0..N-1 in this order (or the largest, if `how` is "max"), divided once; written to
    `into`, or to a new tensor."""
    join = torch.maximum if how == "max" else torch.add
    total, *others = parts
    dest = torch.empty_like(total) if into is None else into
    if not others:
        dest.copy_(total)
    for other in others:
        total = join(total, other, out=dest)
    return dest.div_(divisor) if divisor != 1 else dest
