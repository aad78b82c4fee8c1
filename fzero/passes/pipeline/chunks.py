"""chunks: which chunk of the model each op of a region belongs to, and whether it is forward or backward work.

A segment that uses a leaf of a numbered layer belongs to that layer's chunk, or to a later one whose forward values it
reads too: a penalty on weights in the loss is lent them. Any other follows the data. Forward work
belongs where its latest input was made. Backward work belongs where the forward values that it reads were made, or else
where its gradient came from. So an embedding runs on the first chunk and a head on the last, whoever keeps the leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fzero.errors import SpecError
from fzero.ir.program import Program
from fzero.ir.records import Op
from fzero.passes.recompute import phases


@dataclass(frozen=True, slots=True)
class Piece:
    """The chunk of an op of a region, and whether it is forward work (else it belongs to the backward)."""

    chunk: int
    forward: bool


def pieces(program: Program, chunk_of: Mapping[str, int]) -> dict[int, Piece]:
    """By op number, the piece of every op of a region. `chunk_of`: of each bucket of a numbered layer, its chunk.

    Raises SpecError where layers do not follow one another as the cut says.
    """
    made: dict[str, Piece] = {}
    found: dict[int, Piece] = {}
    last = max(chunk_of.values(), default=0)
    for number, op in enumerate(program.ops):
        if op.phase != "region":
            continue
        piece = found[number] = _piece(program, op, chunk_of, made, last)
        for ref in op.reads:
            source = made.get(ref.name)
            if source is not None:
                _check(program, op, piece, source)
        made.update({ref.name: piece for ref in op.writes})
    return found


def crossing(program: Program, chunk_of: Mapping[str, int]) -> frozenset[str]:
    """The forward values that the backward of another chunk reads: `recompute` keeps them, for they are sent when they
    are made first. Without chunks there are none."""
    if not chunk_of:
        return frozenset()
    found = pieces(program, chunk_of)
    made = {ref.name: found[i] for i, op in enumerate(program.ops) if i in found for ref in op.writes}
    read = [(made[ref.name], piece, ref.name) for i, piece in found.items() for ref in program.ops[i].reads
            if ref.name in made]  # fmt: skip
    return frozenset(name for source, reader, name in read if source.forward and source.chunk != reader.chunk)


def _piece(program: Program, op: Op, chunk_of: Mapping[str, int], made: Mapping[str, Piece], last: int) -> Piece:
    work = phases(program, op)
    again = any(ref.name.endswith(".again") for ref in op.writes)  # recompute: forward work, in the backward
    forward = work == {"forward"} and not again
    buckets = [program.buffers[ref.name].bucket for ref in (*op.reads, *op.writes)]
    own = [chunk_of[name] for name in buckets if name is not None and name in chunk_of]
    inputs = [made[ref.name] for ref in op.reads if ref.name in made]
    before = [piece.chunk for piece in inputs if piece.forward]
    if own:
        return Piece(max(own + before), forward)
    after = [piece.chunk for piece in inputs if not piece.forward]
    if forward:
        return Piece(max(before, default=0), True)
    if before:
        return Piece(max(before), False)
    return Piece(min(after, default=last), False)


def _check(program: Program, op: Op, piece: Piece, source: Piece) -> None:
    """Values go up the chunks in the forward and down in the backward: else roles would wait for one another."""
    up = source.forward and source.chunk > piece.chunk
    down = not source.forward and (piece.forward or source.chunk < piece.chunk)
    if up or down:
        way = "forward" if source.forward else "backward"
        raise SpecError(
            f"the pipeline's cut does not follow the step: `{op.why}` on chunk {piece.chunk} needs a {way} value of "
            f"chunk {source.chunk}. Say where chunks begin, in the order of the forward: Pipeline(cut=[...])"
        )
