"""region_parts: the ops of regions as a schedule has them, and what of their results is bound for a role.

A schedule that splits the backward has the halves of each backward op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref
from fzero.passes.pipeline.chunks import ChunkWork
from fzero.passes.pipeline.last_work import bound_for
from fzero.passes.pipeline.split_backward import Halves, split_backward
from fzero.pipeline import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule


@dataclass
class RegionParts:
    """each: of an op by its number, its parts, each with the kind of its action. bound: values that only the last work
    on a gradient reads, with the role that keeps the leaf. num_reads: of each value, by how many parts of a role."""

    each: dict[int, list[tuple[Op, str]]] = field(default_factory=dict)
    bound: dict[str, int] = field(default_factory=dict)
    num_reads: Counter[tuple[str, int]] = field(default_factory=Counter)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    segments: dict[str, fx.GraphModule] = field(default_factory=dict)


def region_parts(
    program: Program, schedule: Schedule, found: Mapping[int, ChunkWork], keeps: Callable[[Ref], int | None]
) -> RegionParts:
    """found: of each op of a region, by its number, the chunk. keeps: the role that keeps the leaves of a reference."""
    made = RegionParts()
    known: dict[str, Halves] = {}
    rows: list[tuple[Op, int, fx.GraphModule | None]] = []
    for number, op in enumerate(program.ops):
        if number not in found or op.is_wait:
            rows.append((op, 0, None))
            continue
        forward, role = found[number].forward, schedule.role_of[found[number].chunk]
        kind = FORWARD if forward else INPUT if schedule.splits else BACKWARD
        parts = [(op, kind)]  # what an op moves leaves its segment
        if kind == INPUT and op.computes:
            split = split_backward(program, op, known)
            made.buffers |= split.buffers
            made.segments |= split.segments
            parts = [(part, kind) for part, kind in ((split.first, INPUT), (split.second, WEIGHT)) if part is not None]
        made.each[number] = parts
        for part, _ in parts:
            made.num_reads.update({(ref.name, role) for ref in part.reads})
            late = part.computes and not forward
            rows.append(
                (part, role, (made.segments.get(part.segment) or program.segments[part.segment]) if late else None)
            )
    made.bound = bound_for(
        rows, lambda ref: keeps(ref) if ref.name in program.buffers else None, program.metrics.values()
    )
    return made
