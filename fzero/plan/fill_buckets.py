"""fill_buckets: the buckets that leaves are packed into, layer by layer, in an order that all stages share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from fzero.ir.code_ops import OPS
from fzero.ir.records import ALIGN, Bucket, Slot, buffer_name
from fzero.plan import whole_leaves
from fzero.plan.leaf_classes import LeafClass
from fzero.plan.pipeline_cut import layer_of
from fzero.plan.stages import BucketLayout, Columns, row_of
from fzero.shard.layouts import Layout

SMALL_BYTES = 64 << 10  # layers without a number below this share a bucket


def filled(
    classes: Sequence[LeafClass],
    leaves: Sequence[torch.Tensor],
    homes: Sequence[str],
    bucket_bytes: int,
    world_size: int,
    batch: Layout,
) -> Iterator[tuple[Bucket, BucketLayout, list[LeafClass]]]:
    """(bucket, how its values lie, the classes of its slots): those packed whole onto ranks, then the others.

    leaves: of each, one rank's part by dims. homes: of each leaf. batch: how its leaves lie.
    """
    lead = [leaf_class.lead for leaf_class in classes]
    ordinary, packed = whole_leaves.separate(
        _groups(classes, leaves, homes),
        whole=lambda c: any(whole_leaves.asks(prefix) for prefix, _ in classes[c].members),
        size=lambda c: lead[c].numel(),
        fill=bucket_bytes // max((x.dtype.itemsize for x in lead), default=1),
        world_size=world_size,
    )
    for number, (name, layer, members) in enumerate(_named([*packed, *_cut(ordinary, lead, bucket_bytes)])):
        sizes = [lead[c].numel() for c in members]
        starts, length = whole_leaves.pack(sizes, world_size) if number < len(packed) else _in_a_row(sizes, world_size)
        placed = sorted(zip(starts, members, strict=True))
        slots = [Slot(classes[c].path, start, start + lead[c].numel(), tuple(lead[c].shape)) for start, c in placed]
        row = _row(classes[members[0]], batch)
        bucket = Bucket(
            name, length, tuple(slots), row.cut.axes, updates_slices=bool(row.rest), keeps_gathered=not row.params,
            reduce_when=row.reduce_when, copy=row.copy.axes or None,
            layer=layer if layer != name else "", numbered=layer_of(classes[members[0]].path)[1],
        )  # fmt: skip
        yield bucket, row, [classes[c] for _, c in placed]


def _row(leaf_class: LeafClass, batch: Layout) -> BucketLayout:
    """How the values of a bucket of such leaves lie, and how its gradients travel."""
    row = row_of(leaf_class.stage, batch)
    return row if leaf_class.coding.reduce is None else replace(row, wire=OPS[leaf_class.coding.reduce])


def _groups(
    classes: Sequence[LeafClass], leaves: Sequence[torch.Tensor], homes: Sequence[str]
) -> dict[tuple[object, ...], list[int]]:
    """Class indices by (layer, stage, chunk, cast, codecs, columns and their homes), in canonical order: the tree's,
    matrices before vectors in a layer."""
    sizes: dict[str, int] = {}
    layers: list[tuple[str, bool]] = []
    for leaf_class in classes:
        layers.append(layer_of(leaf_class.path))
        sizes[layers[-1][0]] = sizes.get(layers[-1][0], 0) + leaf_class.nbytes
    groups: dict[tuple[object, ...], list[int]] = {}
    for c, (leaf_class, (layer, numbered)) in enumerate(zip(classes, layers, strict=True)):
        layer = layer if numbered or sizes[layer] >= SMALL_BYTES else "small"
        columns = tuple((prefix, leaves[i].dtype, homes[i]) for prefix, i in leaf_class.members)
        key = (layer, leaf_class.stage, leaf_class.chunk, leaf_class.cast, leaf_class.coding, columns)
        groups.setdefault(key, []).append(c)
    for members in groups.values():
        members.sort(key=lambda c: (classes[c].lead.ndim < 2, c))
    return groups


def _cut(
    groups: Mapping[tuple[object, ...], list[int]], lead: Sequence[torch.Tensor], cap: int
) -> list[whole_leaves.Run]:
    """(layer, stage, classes): each group cut where the bucket is full; a larger leaf has one to itself. `lead` is a
    leaf of each class."""
    result: list[whole_leaves.Run] = []
    for (layer, stage, *_), members in groups.items():
        runs: list[list[int]] = [[]]
        filled = 0
        for c in members:
            size = round_up(lead[c].numel(), ALIGN) * lead[c].dtype.itemsize
            if runs[-1] and filled + size > cap:
                runs.append([])
                filled = 0
            runs[-1].append(c)
            filled += size
        assert isinstance(stage, int | Columns)
        result += [(layer, stage, run) for run in runs]
    return result


def _named(runs: Sequence[whole_leaves.Run]) -> list[tuple[str, str, list[int]]]:
    """(bucket name, layer, classes): the layer's name, and a number where it has several buckets."""
    result: list[tuple[str, str, list[int]]] = []
    taken: set[str] = set()
    for layer, _, run in runs:
        name = unused(buffer_name(str(layer)), taken)
        taken.add(name)
        result.append((name, str(layer), run))
    return result


def _in_a_row(sizes: Sequence[int], world_size: int) -> tuple[list[int], int]:
    """(each leaf's start, the bucket's length): one after another, on aligned places."""
    ends = list(accumulate((round_up(size, ALIGN) for size in sizes), initial=0))
    return ends[:-1], round_up(ends[-1], world_size * ALIGN)


def unused(name: str, taken: Collection[str]) -> str:
    """The name, or with a number the next that is free: `a b` and `a_b` are different leaves."""
    names = (name, *(f"{name}~{count}" for count in range(2, len(taken) + 3)))
    return next(candidate for candidate in names if candidate not in taken)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
