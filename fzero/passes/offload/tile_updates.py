"""tile_updates: elementwise work on what is held off the device is cut into tiles: little of it is there at once.

The ops that work on one bucket, one after the other, do the first stretch of the rank's slice, then the next. Every
element sees the same ops in the same order, so the bits are the same. Where tiles begin does not depend on the rank.

    update g[0:L:mine] mu.in[0:L:mine] -> p[0:L:mine]
    becomes   update g[0:L:mine:0*T] mu.in[0:L:mine:0*T] -> p[0:L:mine:0*T];  update g[0:L:mine:1*T] ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import forms, fx_nodes, rewrite, segments
from fzero.ir.offset_assignment import PAGE_BYTES
from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import ALIGN, DISK, Buffer, Ref
from fzero.passes.offload.to_spaces import copies_of

ELEMENT = 4  # bytes, of the widest columns
Cut = tuple[str, str | None]  # a bucket, and the axis along which a rank's slice of it is cut
_Form = tuple[str, tuple[tuple[int, ...], ...]]  # a segment, and the shapes of its inputs


def tile_updates(program: Program, tile_bytes: int) -> Program:
    """The program with tiles of up to `tile_bytes` of each column, for work on what is held off the device; itself
    where nothing is."""
    home = copies_of(program)
    if not home:
        return program
    made: dict[_Form, fx.GraphModule] = {}
    ops: list[Op] = []
    for group in _groups(program):
        held = {home[ref.name] for op in group for ref in (*op.reads, *op.writes) if ref.name in home}
        parts, size = 1, 0
        if held:
            block = max(_block(program.buffers[name]) for name in held)
            parts, size = _parts(program, group[0], tile_bytes // ELEMENT, block)
        for number in range(parts):
            ops += [_tile(program, op, (number, size), made) for op in group] if parts > 1 else group
    pool = {segments.digest(gm): gm for gm in made.values()}
    return rewrite.finish(program, "tile_updates", ops=ops, new_segments=pool)


def _block(buffer: Buffer) -> int:
    """The elements that a tile is a multiple of: whole pages of what lies on disk."""
    return PAGE_BYTES * buffer.per // buffer.dtype.itemsize if buffer.space == DISK else ALIGN


def _groups(program: Program) -> Iterator[list[Op]]:
    """The ops in order: those that follow one another and may be cut alike together, any other alone."""
    group: list[Op] = []
    last: Cut | None = None
    for op in program.ops:
        cut = _cut(program, op)
        if group and (cut is None or cut != last):
            yield group
            group = []
        last = cut
        group.append(op)
    if group:
        yield group


def _cut(program: Program, op: Op) -> Cut | None:
    """What ops that are cut alike have in common, the bucket and whose slice; None where an op cannot be cut."""
    refs = [ref for ref in (*op.reads, *op.writes) if program.buffers[ref.name].bucket is not None]
    if (
        not (op.computes and op.is_flat and refs)
        or op.num_outputs
        or any(ref.start is None or ref.shape is not None for ref in refs)
    ):
        return None
    cuts = {(str(program.buffers[ref.name].bucket), program.cut(ref)) for ref in refs}
    return cuts.pop() if len(cuts) == 1 and not any(ref.tile for ref in refs) else None


def _parts(program: Program, op: Op, most: int, block: int) -> tuple[int, int]:
    """(how many tiles, the elements of one) for ops that are cut as `op` is: equal ones of whole blocks, of about
    `most` elements. One where it cannot be cut."""
    if (cut := _cut(program, op)) is None:
        return 1, 0
    bucket, axis = program.buckets[cut[0]], cut[1]
    length = program.slice_length(bucket, axis) if axis else bucket.length
    size = -(-length // (max(-(-length // most), 1) * block)) * block
    return -(-length // size), size


def _tile(program: Program, op: Op, tile: tuple[int, int], made: dict[_Form, fx.GraphModule]) -> Op:
    """The op on one tile of all its ranges. made: the segments of tiles so far."""

    def cut(ref: Ref) -> Ref:
        return replace(ref, tile=tile) if program.buffers[ref.name].bucket is not None else ref

    whole = program.segments[op.segment]
    refs = [*op.reads, *op.writes[op.num_outputs :]]
    shapes = []
    for ref, holder in zip(refs, fx_nodes.placeholders(whole.graph), strict=True):
        value, buffer = holder.meta["val"], program.buffers[ref.name]
        of_tile = buffer.bucket is not None
        shapes.append((min(value.numel(), tile[1] // buffer.per),) if of_tile else tuple(value.shape))
    form = op.segment, tuple(shapes)
    if form not in made:
        made[form] = _on_a_tile(whole, shapes)
    done = rewrite.run_op(rewrite.renamed(op, cut), made[form], map(cut, op.reads), map(cut, op.writes), flat=1)
    return replace(done, kind=op.kind, why=f"{op.why} tile {tile[0]}")


def _on_a_tile(whole: fx.GraphModule, shapes: Sequence[tuple[int, ...]]) -> fx.GraphModule:
    """The segment for inputs of these shapes: it is planned for no more elements than a tile has."""
    gm = segments.module(segments.copied(whole.graph))
    with FakeTensorMode():
        values = [holder.meta["val"] for holder in fx_nodes.placeholders(gm.graph)]
        fakes = [torch.empty(s, dtype=x.dtype, device=x.device) for s, x in zip(shapes, values, strict=True)]
    return forms.propagate(gm, fakes)
