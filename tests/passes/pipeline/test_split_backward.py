"""split_backward: what other segments wait for is made first; gradients of parameters are made by the second half."""

from __future__ import annotations

from typing import Any

import torch
from recorded import calls
from short_programs import segment, shown, written
from torch import Tensor

from fzero.ir import fx_nodes, segments
from fzero.passes.pipeline.split_backward import Halves, Split, halves, split_backward

SQUARE = (4, 4)
RECORDS = """
    bucket b length=64 w[0:16:4x4]
    buffer p f32[64] param bucket=b
    buffer grad f32[64] grad bucket=b
    buffer g f32[4x4] activation
    buffer a f32[4x4] activation
    buffer g2 f32[4x4] activation
    buffer g3 f32[4x4] activation
"""
RUN = "run g a p[0:16:4x4] -> g2 grad[0:16:4x4]  region=r0  chunk=0  fresh=1  segment=s"


def split(body: Any, run: str = RUN, inputs: int = 3, known: dict[str, Halves] | None = None) -> Split:
    """The halves of a run; in a row they write what the run writes."""
    gm = segment(body, *[SQUARE] * (inputs + 1))
    program = written(RECORDS + run, segments={"s": gm})
    (op,) = program.ops
    found = split_backward(program, op, {} if known is None else known)
    given = dict(zip((ref.name for ref in op.reads), (torch.randn(SQUARE) for _ in op.reads), strict=True))
    wanted, into = torch.zeros(SQUARE), torch.zeros(SQUARE)
    outs = gm(*given.values(), wanted) if op.num_outputs else (gm(*given.values(), wanted), [])[1]
    memory = dict(given)
    for half in (found.first, found.second):
        if half is not None:
            last = {} if half is found.second else {}
            fresh = _executed(found, half, memory, into)
            memory |= dict(zip((ref.name for ref in half.writes), fresh, strict=False)) | last
    assert torch.equal(into, wanted)
    assert all(torch.equal(memory[ref.name], out) for ref, out in zip(op.writes, outs, strict=False))
    return found
