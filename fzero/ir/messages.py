"""messages: in which order of its dims a value lies in memory that a role of a pipeline sends to another.

A message moves memory as it lies. A buffer has a shape and no strides: those are of the values that segments write to
it and read from it. So a receiver looks at the segment that reads the value.
"""

from __future__ import annotations

import torch

from fzero.ir import fx_nodes
from fzero.ir.program import Program


def forms(program: Program) -> dict[str, torch.Tensor]:
    """By buffer that is sent or received whole: a fake value of the strides in which a segment writes or reads it.

    Buffers of a bucket, which are flat, and those that no segment touches are left out.
    """
    moved = {ref.name for op in program.ops if op.is_message for ref in (*op.reads, *op.writes) if ref.start is None}
    moved = {name for name in moved if program.buffers[name].bucket is None}
    found: dict[str, torch.Tensor] = {}
    for op in program.ops if moved else ():
        if not op.computes or moved.isdisjoint(ref.name for ref in (*op.reads, *op.writes)):
            continue
        graph = program.segments[op.segment].graph
        results, inputs = fx_nodes.outputs(graph), fx_nodes.placeholders(graph)
        refs = (*op.writes[: len(results)], *op.reads, *op.writes[len(results) :])
        for ref, node in zip(refs, (*results, *inputs), strict=False):
            if ref.name in moved and ref.start is None:
                found.setdefault(ref.name, node.meta["val"])
    return found


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps in the order of memory, as a view of one dim."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of one dim without gaps, as a view. One element, or none, may have any stride.

    Raises RuntimeError for several that have gaps."""
    return (as_it_lies(tensor) if tensor.numel() <= 1 else tensor).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any shape and strides, in the order of its elements; of a copy where it has gaps."""
    return flat_bytes(tensor.detach().contiguous().reshape(-1))
