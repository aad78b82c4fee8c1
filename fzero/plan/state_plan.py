"""state_plan: `Plan` and `Leaf`: where every leaf of a state lies, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fzero.ir.decisions import IDLE, Choice
from fzero.ir.mesh import PIPELINE, Mesh, parts_of
from fzero.ir.records import Bucket, Buffer, Ref
from fzero.plan.pipeline_cut import Cut, layer_of
from fzero.plan.stages import BucketLayout
from fzero.shard.layouts import WHOLE, Layout
from fzero.shard.placements import Flat

NO_SIZE = Choice(0, "no bucket was cut by its size", IDLE)


@dataclass(frozen=True)
class Leaf:
    """A leaf's place: in slot `slot` of the bucket of buffer `buffer`, or (slot None) all of that buffer.

    shape: the logical one. layout: over the axes that cut its dims; the slot holds this rank's part.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    buffer: str
    slot: int | None = None
    per_rank: bool = False
    layout: Layout = WHOLE

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of one rank's part by dims; ZeRO's slices are cut from that."""
        return self.layout.local_shape(self.shape)


@dataclass(frozen=True)
class Plan:
    """Where every leaf of a state lives: the mesh, the buckets, the state's buffers, and a place for each leaf.

    batch: how its leaves lie. cut: the chunks of a pipeline, if any. bucket_layouts: how the values of each bucket lie.
    bucket_bytes: the size at which buckets were cut, and why.
    """

    batch: Layout
    mesh: Mesh
    buckets: Mapping[str, Bucket]
    buffers: Mapping[str, Buffer]
    leaves: tuple[Leaf, ...]
    cut: Cut | None = None
    bucket_layouts: Mapping[str, BucketLayout] = field(default_factory=dict)
    bucket_bytes: Choice[int] = NO_SIZE

    @property
    def axis(self) -> str:
        """The axes that the batch is split over, as one."""
        return self.batch.axes

    @property
    def world_size(self) -> int:
        """All ranks of the mesh."""
        return self.mesh.world_size

    @property
    def data_ranks(self) -> int:
        """Among how many ranks the batch is split."""
        return self.batch.parts

    @property
    def finest(self) -> str:
        """The data axes as one, the innermost first: a rank's slice along them lies within all its slices."""
        return ".".join(reversed(parts_of(self.axis)))

    def owners(self, buffer: Buffer) -> list[int]:
        """The ranks that together hold a buffer once, in the order of its slices; of equal ranks the first."""
        role = self.role_of(buffer)
        first = 0 if role is None else self.mesh.peers(0, PIPELINE)[role]
        return self.mesh.peers(first, self.column(buffer).axes)

    def column(self, buffer: Buffer) -> Layout:
        """How all of a buffer of the state lies: in slices of its bucket, or one of each rank's own of all, stacked."""
        return self.batch if buffer.per_rank else Layout.over(self.mesh, buffer.sharded, Flat())

    def held_by(self, rank: int) -> dict[str, Buffer]:
        """The state's buffers on a rank: all of them, or those of its role in a pipeline and those in no bucket."""
        return {name: b for name, b in self.buffers.items() if self.role_of(b) in (None, self.mesh.role(rank))}

    def role_of(self, buffer: Buffer) -> int | None:
        """The role of a pipeline that holds a buffer of the state. None: every rank does."""
        return None if self.cut is None or buffer.bucket is None else self.buckets[buffer.bucket].role

    def chunk_of(self) -> dict[str, int]:
        """Of each bucket of a numbered layer, its chunk."""
        chunks = self.cut.chunk_of if self.cut is not None else {}
        layers = {name: layer_of(bucket.slots[0].path)[0] for name, bucket in self.buckets.items() if bucket.slots}
        return {name: chunks[layer] for name, layer in layers.items() if layer in chunks}

    def ref(self, leaf: Leaf) -> Ref:
        """The reference to a leaf within its own buffer (whole leaves: the buffer)."""
        if leaf.slot is None:
            return Ref(leaf.buffer)
        buffer = self.buffers[leaf.buffer]
        return Ref(leaf.buffer, *self.buckets[buffer.bucket or ""].place(leaf.slot, buffer.per))

    @property
    def state_bytes(self) -> int:
        """Bytes of state that a rank holds, padding included; in a pipeline, a rank of the role that holds most."""
        of_roles = [0] * self.mesh.roles
        for buffer in self.buffers.values():
            role = self.role_of(buffer)
            for holder in range(self.mesh.roles) if role is None else (role,):
                of_roles[holder] += buffer.nbytes
        return max(of_roles)

    def padding_bytes(self) -> dict[str, int]:
        """Per buffer, the bytes (of the whole bucket) that no leaf uses."""
        pads: dict[str, int] = {}
        for b in self.buffers.values():
            if b.bucket:
                bucket = self.buckets[b.bucket]
                used = sum(math.prod(bucket.place(i, b.per)[2]) for i in range(len(bucket.slots)))
                pads[b.name] = (bucket.length // b.per - used) * b.dtype.itemsize
        return {name: size for name, size in pads.items() if size}
