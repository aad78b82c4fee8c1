"""layout: which bucket holds a leaf, and who holds the bucket.

A floating leaf of one or more dimensions is *flat*: it lies in a bucket. Leaves that mirror one another (a parameter,
its moments, its EMA: same shape, and a path that ends alike) form a class and take the same place in buckets of one
geometry, so that everything pointwise over them runs on flat slices. An 8-bit leaf may mirror too (the codes of a
quantised moment), and the fp32 scales of its blocks of 64 elements go with it. Each column of a bucket has one home:
device, host, or a range of the rank's file on disk. Matrices that an optimizer needs whole
(`fzero.plan.whole_leaves`) are packed so that none lies on two ranks. Other integer leaves, 0-d and per-rank ones are
kept whole.

A bucket belongs to one layer, cut where `bucket_bytes` is full: identical layers get identical buckets. The layer of a
leaf is its path up to the first number (`blocks/3`), else its first component; small layers without a number share one.

The ZeRO stages are rows of one table (`fzero.plan.stages`). Parameters that are computed in fewer bits than they are
held in (fp32 masters of a bf16 loss) are sharded from stage 1 on: stages 1 and 2 gather the narrow copy once a step and
keep it, as ZeRO does. Leaves of one bucket are cast alike. The layout is a function of the tree, the world and the
options alone: every rank, and every stage, computes the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from fzero import tree
from fzero.errors import SpecError
from fzero.ir.mesh import Mesh
from fzero.ir.offset_assignment import PAGE_BYTES
from fzero.ir.records import ALIGN, DEVICE, DISK, Bucket, Buffer, buffer_name
from fzero.kernels.codecs import EXACT, Coding
from fzero.plan.block_scales import CODES, scales, with_scales
from fzero.plan.fill_buckets import filled, round_up, unused
from fzero.plan.followers import Follows, followers
from fzero.plan.leaf_classes import LeafClass, leaf_classes, stages_of
from fzero.plan.pipeline_cut import FIRST, Cut, CutLayers, layer_of, tied_heads
from fzero.plan.sharded_leaves import layouts
from fzero.plan.stages import BucketLayout, Stage, batch_layout
from fzero.plan.state_plan import Leaf, Plan
from fzero.shard.layouts import Layout
from fzero.shard.partition import P

BUCKET_BYTES = 32 << 20  # where nothing was measured


def layout(
    paths: Sequence[str],
    leaves: Sequence[torch.Tensor],
    *,
    mesh: Mesh,
    pipeline: CutLayers | None = None,
    zero: Stage | Mapping[str, Stage] = 0,
    bucket_bytes: int = BUCKET_BYTES,
    params: Sequence[str] = ("params/**",),
    per_rank: Sequence[str] = (),
    compute: Callable[[str, torch.Tensor], torch.dtype] = lambda path, leaf: leaf.dtype,
    coding: Callable[[str, torch.Tensor], Coding] = lambda path, leaf: EXACT,
    shard: Mapping[str, P] | None = None,
    home: Callable[[str], str] = lambda path: DEVICE,
) -> Plan:
    """The plan for these leaves.

    pipeline: `pipeline_cut.cut_layers`, given the elements of each numbered layer and of the leaves after them, and
    which embeddings are among these.
    compute: the narrowest dtype that a leaf may be gathered in, from its path below its entry and the leaf. coding: the
    codecs of its messages, from the same. shard: path
    rules to the axes that cut the dims; the first match wins. home: the space in which a leaf of a bucket is held, from
    its path; leaves in no bucket stay on the device.

    Raises SpecError for a rule that matches nothing or leaves a leaf without a stage, and as `pipeline` does.
    """
    batch = batch_layout(mesh)
    codes_of = scales(paths, leaves, per_rank)
    is_param = [any(tree.matches(p, path) for p in params) for path in paths]
    flat = [i for i, x in enumerate(leaves) if paths[i] not in per_rank and i not in codes_of and _may_be_cut(x)]
    classes, follows = _laid_out(flat, codes_of, paths, leaves, is_param, shard or {}, mesh)
    parts, stages = _parts(classes, leaves), stages_of(classes, paths, zero)
    if batch.parts > 1 and not any(is_param[i] for i in flat):
        _check_params(stages, zero, params)
    classes = _formed(classes, parts, stages, compute, coding)
    cut = pipeline(*_layers(classes, follows)) if pipeline is not None else None
    classes = _chunked(classes, follows, cut)
    buckets: dict[str, Bucket] = {}
    bucket_layouts: dict[str, BucketLayout] = {}
    buffers: dict[str, Buffer] = {}
    places: dict[int, Leaf] = {}
    for bucket, row, members in filled(classes, parts, [*map(home, paths)], bucket_bytes, batch.parts, batch):
        bucket = replace(bucket, role=None if cut is None else cut.role_of[members[0].chunk])
        buckets[bucket.name], bucket_layouts[bucket.name] = bucket, row
        for column, (prefix, first) in enumerate(members[0].members):
            name = unused(buffer_name(f"{prefix}:{bucket.name}" if prefix else bucket.name), buffers)
            kind, dtype = "param" if is_param[first] else "optimizer", leaves[first].dtype
            sharded = _column(row, members[0], dtype, is_param[first], batch).axes or None
            per, length = ALIGN if first in codes_of else 1, bucket.length // (mesh.size(sharded) if sharded else 1)
            buffers[name] = Buffer(
                name, dtype, (length // per,), kind, bucket.name, sharded, per=per, space=home(paths[first]),
                entry=prefix,
            )  # fmt: skip
            for index, member in enumerate(members):
                i = member.members[column][1]
                places[i] = Leaf(paths[i], tuple(leaves[i].shape), leaves[i].dtype, name, index, layout=member.layout)
    for i in [i for i in range(len(paths)) if i not in places]:
        places[i], buffer = _alone(paths[i], leaves[i], paths[i] in per_rank, buffers)
        buffers[buffer.name] = buffer
    return Plan(batch, mesh, buckets, _on_disk(buffers), tuple(places[i] for i in sorted(places)), cut, bucket_layouts)


def _formed(
    classes: list[LeafClass],
    parts: Sequence[torch.Tensor],
    stages: Sequence[Stage],
    compute: Callable[[str, torch.Tensor], torch.dtype],
    coding: Callable[[str, torch.Tensor], Coding],
) -> list[LeafClass]:
    """The classes, each with one rank's part of its first leaf, its stage, and the forms in which it travels."""
    formed = []
    for leaf_class, stage in zip(classes, stages, strict=True):
        path, lead = leaf_class.path, parts[leaf_class.members[0][1]]
        formed.append(replace(leaf_class, lead=lead, stage=stage, cast=compute(path, lead), coding=coding(path, lead)))
    return formed


def _laid_out(
    flat: list[int],
    codes_of: Mapping[int, int],
    paths: Sequence[str],
    leaves: Sequence[torch.Tensor],
    is_param: Sequence[bool],
    shard: Mapping[str, P],
    mesh: Mesh,
) -> tuple[list[LeafClass], Sequence[Follows | None]]:
    """(the classes of flat leaves, each with its layout over the model axes; whom each follows)."""
    classes = with_scales(leaf_classes(flat, paths, leaves, is_param), codes_of, paths, leaves)
    follows = followers(classes, leaves, is_param)
    lies = layouts(classes, follows, paths, leaves, shard, mesh)
    return [replace(c, layout=layout) for c, layout in zip(classes, lies, strict=True)], follows


def _chunked(classes: list[LeafClass], follows: Sequence[Follows | None], cut: Cut | None) -> list[LeafClass]:
    """The classes, each in the chunk of the pipeline of the class that it follows."""
    if cut is None:
        return classes
    led = [c if of is None else classes[of.leader] for c, of in zip(classes, follows, strict=True)]
    return [replace(c, chunk=cut.chunk(leader.path)) for c, leader in zip(classes, led, strict=True)]


def _alone(path: str, leaf: torch.Tensor, per_rank: bool, buffers: Mapping[str, Buffer]) -> tuple[Leaf, Buffer]:
    """A leaf in no bucket, and the buffer that is its own."""
    name = unused(buffer_name(path or "state"), buffers)
    place = Leaf(path, tuple(leaf.shape), leaf.dtype, name, None, per_rank)
    return place, Buffer(name, place.dtype, place.shape, "state", per_rank=per_rank)


def _column(row: BucketLayout, leaf_class: LeafClass, dtype: torch.dtype, is_param: bool, batch: Layout) -> Layout:
    """How a column of this dtype lies. Parameters that are gathered in fewer bits are held as what updates them is."""
    if batch.parts == 1:
        return Layout()
    narrow = leaf_class.cast.itemsize < dtype.itemsize or leaf_class.coding.gather is not None
    return row.rest if not is_param or (narrow and not row.params) else row.params


def _on_disk(buffers: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """The buffers, those on disk one behind the other in the rank's file, each from the start of a page."""
    placed, end = {}, 0
    for name, buffer in buffers.items():
        placed[name] = buffer
        if buffer.space == DISK:
            placed[name] = replace(buffer, at=end)
            end += round_up(buffer.nbytes, PAGE_BYTES)
    return placed


def _parts(classes: Sequence[LeafClass], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves, those that are cut by a dim as one rank's part of them (on the meta device)."""
    parts = list(leaves)
    for leaf_class in classes:
        for _, i in leaf_class.members if leaf_class.layout else ():
            shape = leaf_class.layout.local_shape(leaves[i].shape)
            parts[i] = torch.empty(shape, dtype=leaves[i].dtype, device="meta")
    return parts


def _may_be_cut(leaf: torch.Tensor) -> bool:
    return (leaf.dtype.is_floating_point or leaf.dtype in CODES) and leaf.ndim > 0 and leaf.numel() > 0


def _layers(
    classes: Sequence[LeafClass], follows: Sequence[Follows | None]
) -> tuple[dict[str, int], int, frozenset[str]]:
    """(the elements of each numbered layer, the elements of leaves without a number that come after them, the
    embeddings among these), without what follows another leaf."""
    sizes: dict[str, int] = {}
    others: dict[str, torch.Tensor] = {}
    for leaf_class, of in zip(classes, follows, strict=True):
        if of is not None:
            continue
        layer, numbered = layer_of(leaf_class.path)
        if numbered:
            sizes[layer] = sizes.get(layer, 0) + leaf_class.lead.numel()
        else:
            others[leaf_class.path] = leaf_class.lead
    heads = tied_heads({path: lead.shape for path, lead in others.items()})
    return sizes, sum(x.numel() for path, x in others.items() if path in heads or not FIRST.search(path)), heads


def _check_params(stages: Sequence[Stage], zero: object, params: Sequence[str]) -> None:
    """Without a leaf that is a parameter stages 1 and 2 have nothing to keep whole."""
    if any(stage in (1, 2) for stage in stages):
        raise SpecError(
            f"zero={zero!r} keeps parameters whole and shards the rest, but no leaf of the state matches "
            f"params={list(params)!r}. Say which leaves are parameters, as in Spec(params='model/**')"
        )
