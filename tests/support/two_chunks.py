"""two_chunks: a step of two layers, each a chunk of a pipeline, before it is cut by role: a few lines, by hand."""

from __future__ import annotations

from typing import Any

import short_programs
from torch import Tensor

from fzero.ir.program import Program

SQUARE = (8, 8)
RECORDS = """
    bucket b0 length=64 role=0 w[0:64:8x8]
    bucket b1 length=64 role=1 v[0:64:8x8]
    buffer w0 f32[64] param bucket=b0
    buffer w1 f32[64] param bucket=b1
    buffer g0 f32[64] grad bucket=b0
    buffer g1 f32[64] grad bucket=b1
    buffer x f32[8x8] batch
"""
UPDATES = """
    update w0[0:64:mine] g0[0:64:mine] -> w0[0:64:mine]  flat=1  segment=less  # update w0
    update w1[0:64:mine] g1[0:64:mine] -> w1[0:64:mine]  flat=1  segment=less  # update w1
"""


def microbatch(m: int) -> str:
    """The forward and the backward of both chunks."""
    at = f"region=r0  microbatch={m}"
    return f"""
        run x w0[0:64:8x8] -> h{m}  phase=forward  chunk=0  fresh=1  segment=low  {at}  # low
        run h{m} w1[0:64:8x8] -> y{m} l{m}  phase=forward  chunk=1  fresh=2  segment=high  {at}  # high
        run y{m} h{m} w1[0:64:8x8] -> d{m} g1[0:64:8x8]  phase=backward  chunk=1  fresh=1  segment=back  {at}  # back
        run d{m} x -> g0[0:64:8x8]  phase=backward  chunk=0  segment=end  {at}  # end
    """


def low(x: Tensor, w: Tensor) -> list[Tensor]:
    return [x.mm(w)]


def high(h: Tensor, w: Tensor) -> list[Tensor]:
    y = h.mm(w)
    return [y, y.sum()]


def back(y: Tensor, h: Tensor, w: Tensor, into: Tensor) -> list[Tensor]:
    into.copy_(h.t().mm(y))
    return [y.mm(w.t())]


def end(d: Tensor, x: Tensor, into: Tensor) -> None:
    into.copy_(x.t().mm(d))


def less(w: Tensor, g: Tensor, into: Tensor) -> None:
    into.copy_(w - g)


SEGMENTS = {
    "low": short_programs.segment(low, SQUARE, SQUARE),
    "high": short_programs.segment(high, SQUARE, SQUARE),
    "back": short_programs.segment(back, SQUARE, SQUARE, SQUARE, SQUARE),
    "end": short_programs.segment(end, SQUARE, SQUARE, SQUARE),
    "less": short_programs.segment(less, 64, 64, 64),
}


def step(
    *, records: str = "", before: str = "", regions: str | None = None, after: str = "", microbatches: int = 2,
    segments: dict[str, Any] | None = None, mesh: str = "pp=2 dp=1",
) -> Program:  # fmt: skip
    """The step, with more records, and ops before the region, between it and the updates, or in its place."""
    values = [f"buffer {name}{m} f32[8x8] activation" for m in range(microbatches) for name in "hyd"]
    values += [f"buffer l{m} f32[] activation" for m in range(microbatches)]
    inner = "".join(map(microbatch, range(microbatches))) if regions is None else regions
    text = "\n".join([RECORDS, *values, records, before, inner, after, UPDATES])
    return short_programs.written(text, mesh=mesh, segments={**SEGMENTS, **(segments or {})})
