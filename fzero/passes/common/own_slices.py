"""own_slices: columns of which a rank writes and reads its own slice alone are no longer than that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fzero.ir.op import Op
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref


def own_slices(
    program: Program, buffers: Mapping[str, Buffer], columns: Iterable[str], ops: Sequence[Op]
) -> dict[str, Buffer]:
    """Of these columns of buckets, those of which `ops` write and read the own slice alone, as long as that."""
    refs: dict[str, list[Ref]] = {name: [] for name in columns}
    for ref in (r for op in ops for r in (*op.reads, *op.writes) if r.name in refs):
        refs[ref.name].append(ref)
    found = {}
    for name in (name for name, column_refs in refs.items() if all(ref.mine for ref in column_refs)):
        buffer = buffers[name]
        bucket = program.buckets[buffer.bucket or ""]
        shape = (program.slice_length(bucket) // buffer.per,)
        found[name] = replace(buffer, sharded=bucket.axis, shape=shape)
    return found
