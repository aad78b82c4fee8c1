"""leaf_gathers: whole leaves on every rank: gathers outside of a program, for `full()` and for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.ir.mesh import PIPELINE, parts_of
from fzero.ir.op import Op, make_op
from fzero.ir.records import Buffer, Ref
from fzero.plan.state_plan import Leaf, Plan
from fzero.shard.layouts import WHOLE, Layout
from fzero.shard.moves import transitions
from fzero.shard.placements import Flat, join
from fzero.state.homes import Homes


@dataclass(frozen=True)
class LeafGathers:
    """Gathers of one state's leaves, on one rank. comm: what starts and ends transfers."""

    plan: Plan
    memory: Homes
    comm: Any
    device: torch.device
    rank: int

    def gathered(self, leaves: Sequence[Leaf], joined: bool) -> list[torch.Tensor]:
        """Whole leaves on every rank. It does one gather for each sharded column among them, and one for each leaf that
        lies in parts by its dims. A column that one role of a pipeline holds goes from there to the others.

        joined: False leaves such a leaf as the part that this rank holds.
        """
        wholes: dict[int, torch.Tensor] = {}
        columns: dict[str, list[int]] = {}
        for i, leaf in enumerate(leaves):
            columns.setdefault(leaf.buffer, []).append(i)
        for name, members in columns.items():
            buffer = self.plan.buffers[name]
            column = self._lent(buffer, self._gathered(buffer))
            for i in members:
                part = self._cut(leaves[i], column)
                wholes[i] = self._whole(leaves[i].buffer, part, leaves[i].layout) if joined else part
        return [wholes[i] for i in range(len(leaves))]

    def _gathered(self, buffer: Buffer) -> torch.Tensor:
        """A whole column of the state, 1-D: uninitialised where this rank's role does not hold it."""
        lies = self.plan.column(buffer)
        if buffer.name not in self.memory:
            return torch.empty(buffer.numel * lies.parts, dtype=buffer.dtype, device=self.device)
        return self._whole(buffer.name, self.memory[buffer.name].reshape(-1).to(self.device), lies)

    def _whole(self, name: str, part: torch.Tensor, lies: Layout) -> torch.Tensor:
        """All of a value that lies in parts so, of which this rank has one; over one axis at a time."""
        for step in transitions(lies, WHOLE):
            for axis in reversed(parts_of(step.axis)):  # the inner cut first
                parts = part.new_empty((self.plan.mesh.size(axis), *part.shape))
                self._move(make_op(step.kind, [Ref(name)], [Ref("unshard")], axis=axis), [part, parts])
                part = parts.view(-1) if isinstance(step.source, Flat) else join(list(parts), step.source)
        return part

    def _lent(self, buffer: Buffer, column: torch.Tensor) -> torch.Tensor:
        """The column on every rank, once the role that holds it has sent it to the others."""
        holder, role = self.plan.role_of(buffer), self.plan.mesh.role(self.rank)
        if holder is None:
            return column
        for other in range(self.plan.mesh.roles):
            if other != holder and role == holder:
                self._move(make_op("send", [Ref("unshard")], axis=PIPELINE, peer=other, tag=other), [column])
            elif other != holder and role == other:
                self._move(make_op("recv", writes=[Ref("unshard")], axis=PIPELINE, peer=holder, tag=other), [column])
        return column

    def _move(self, op: Op, tensors: list[torch.Tensor]) -> None:
        """Runs one transfer."""
        self.comm.start(op.target, op, tensors)
        self.comm.wait(op.target)
        if op.is_collective:
            self.comm.settle(op.target)

    def _cut(self, leaf: Leaf, column: torch.Tensor) -> torch.Tensor:
        """A copy of one leaf of a whole column: its part, where it is cut by its dims."""
        if leaf.per_rank:
            return column.view(self.plan.data_ranks, *leaf.shape).clone()
        if leaf.slot is None:
            return column.view(leaf.shape).clone()
        buffer = self.plan.buffers[leaf.buffer]
        start, stop, _ = self.plan.buckets[buffer.bucket or ""].place(leaf.slot, buffer.per)
        return column[start // buffer.per : stop // buffer.per].view(leaf.local_shape).clone()
