"""whole_leaves: leaves that lie whole on one rank, for work that needs all of a matrix.

Muon orthogonalises a matrix at a time. Where a rank boundary cuts the matrix, every rank must gather it and do the same
work; where it lies in one rank's slice, that rank works alone and nothing travels. So such leaves are packed: a bucket
is as many equal slices as there are ranks, and each leaf goes, the largest first, into the slice with the least in it
(a greedy packing is at most a third longer than the best one). The rest at the ends of slices is padding.

Which leaves: those that a leaf below a component `matrices` mirrors, as the momentum in `opt_state/matrices/<param>`.
The tree alone decides it. So `init` knows the layout before any step is traced, and a user's own step may ask for it by
a name in its state. Chains and masks need not pass anything on.

Padding of more than a quarter of a bucket is too much (a layer with fewer matrices than ranks, or one far larger than
the rest): the state grows by a third, and what a step under stage 3 moves for padding, two gathers and a reduction,
outweighs the one gather that it saves. Then, in this order:

1. The bucket takes in the layer's other matrices, even beyond `bucket_bytes`.
2. Layers share buckets, under stages 0 to 2, where no layer's parameters are gathered on their own. Under stage 3 a
   layer gathers a whole bucket. There such leaves are cut as all others and gathered for the work, and every rank does
   the work of all. The bits of the results are those of the other stages (but a global norm adds its parts in another
   order, so with clipping the last bits may differ).
3. The largest matrix is left out, to be cut as all others: a vocabulary beside small layers.

Source: R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969), for the packing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fzero.ir.records import ALIGN, Bucket
from fzero.plan.stages import Columns, Stage, shards_params

WHOLE = "matrices"  # the component of a path
MOST_PADDING = 0.25  # of a bucket

Key = tuple[object, ...]  # of a group: its layer, its stage, its columns
Run = tuple[object, Stage, list[int]]  # a bucket to be: its layer, its stage, its classes
Groups = Mapping[Key, list[int]]


def asks(prefix: str) -> bool:
    """Whether a column of this prefix wants its leaves whole.

    >>> asks("opt_state/matrices"), asks("opt_state/others/mu")
    (True, False)
    """
    return WHOLE in prefix.split("/")


def is_whole(bucket: Bucket, index: int, world_size: int) -> bool:
    """Whether a leaf of a bucket lies in one of the `world_size` equal slices."""
    slot, size = bucket.slots[index], bucket.length // world_size
    return slot.start // size == (slot.stop - 1) // size


def pack(sizes: Sequence[int], world_size: int) -> tuple[list[int], int]:
    """(each leaf's start, the bucket's length) in elements, no leaf across a boundary of the `world_size` slices.

    >>> pack([640, 64, 128, 500], 2)
    ([0, 640, 1216, 704], 1408)
    """
    rounded = [-(-size // ALIGN) * ALIGN for size in sizes]
    loads = [0] * world_size
    places: dict[int, tuple[int, int]] = {}
    for i in sorted(range(len(sizes)), key=lambda i: (-rounded[i], i)):
        rank = loads.index(min(loads))
        places[i] = rank, loads[rank]
        loads[rank] += rounded[i]
    most = max(max(loads), ALIGN)
    return [rank * most + offset for rank, offset in map(places.__getitem__, range(len(sizes)))], most * world_size


def fits(sizes: Sequence[int], world_size: int) -> bool:
    """Whether the packing leaves no more padding than is allowed."""
    return sum(sizes) >= (1 - MOST_PADDING) * pack(sizes, world_size)[1]


def separate(
    groups: Groups, whole: Callable[[int], bool], size: Callable[[int], int], fill: int, world_size: int
) -> tuple[dict[Key, list[int]], list[Run]]:
    """(the groups without the classes that are to be packed, the runs of those).

    `whole` says of a class whether its leaves are wanted whole, `size` how many elements one has; `fill` is how many
    elements make a bucket full.
    """
    rest: dict[Key, list[int]] = {}
    pools: dict[Key, list[int]] = {}
    runs: list[Run] = []
    for key, members in groups.items():
        layer, stage = key[0], key[1]
        assert isinstance(stage, int | Columns)
        if world_size == 1 or not all(whole(c) for c in members):
            rest[key] = members
        elif (packed := _runs(members, size, fill, world_size)) is not None:
            runs += [(layer, stage, run) for run in packed]
        elif shards_params(stage):
            rest[key] = members
        else:
            pools.setdefault(key[1:], []).extend(members)
    for pool, members in pools.items():
        kept = list(members)
        while kept and (packed := _runs(kept, size, fill, world_size)) is None:
            kept.remove(max(kept, key=size))
        runs += [(WHOLE, pool[0], run) for run in packed] if kept and packed else []  # type: ignore[misc]
        left = set(members) - set(kept)
        for key, own in groups.items():
            if key[1:] == pool and left & set(own):
                rest[key] = [c for c in own if c in left]
    return {key: rest[key] for key in groups if key in rest}, runs


def _runs(members: Sequence[int], size: Callable[[int], int], fill: int, world_size: int) -> list[list[int]] | None:
    """Neighbours that make a bucket: at least full and within the padding that is allowed; None where that fails."""
    runs: list[list[int]] = [[]]
    for c in members:
        sizes = [size(x) for x in runs[-1]]
        if runs[-1] and sum(sizes) + size(c) > fill and fits(sizes, world_size):
            runs.append([])
        runs[-1].append(c)
    if len(runs) > 1 and not fits([size(c) for c in runs[-1]], world_size):
        runs[-2:] = [runs[-2] + runs[-1]]
    return runs if all(fits([size(c) for c in run], world_size) for run in runs) else None
