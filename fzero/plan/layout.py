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

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from fzero import tree
from fzero.errors import SpecError
from fzero.ir.mesh import PIPELINE, Mesh, parts_of
from fzero.ir.offset_assignment import PAGE_BYTES
from fzero.ir.records import ALIGN, DEVICE, DISK, Bucket, Buffer, Ref, Slot, buffer_name
from fzero.plan import whole_leaves
from fzero.plan.block_scales import CODES, Class, scales, with_scales
from fzero.plan.followers import Follows, followers
from fzero.plan.pipeline_cut import FIRST, Cut, layer_of
from fzero.plan.stages import Columns, Stage, row_of
from fzero.shard.layouts import WHOLE, Layout
from fzero.shard.partition import P

BUCKET_BYTES = 32 << 20  # where nothing was measured
SMALL_BYTES = 64 << 10  # layers without a number below this share a bucket


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

    axis: the data axes, over which the batch is split, as one. cut: the chunks of a pipeline, if any.
    """

    axis: str
    mesh: Mesh
    buckets: Mapping[str, Bucket]
    buffers: Mapping[str, Buffer]
    leaves: tuple[Leaf, ...]
    cut: Cut | None = None

    @property
    def world_size(self) -> int:
        """All ranks of the mesh."""
        return self.mesh.world_size

    @property
    def data_ranks(self) -> int:
        """Among how many ranks the batch is split, and a gradient is summed."""
        return self.mesh.data_ranks

    @property
    def sum_axes(self) -> list[str]:
        """The data axes with several ranks, in the order in which a gradient is summed: the innermost first."""
        return sum_axes(self.mesh)

    @property
    def finest(self) -> str:
        """The data axes as one, the innermost first: a rank's slice along them lies within all its slices."""
        return ".".join(reversed(parts_of(self.axis)))

    def owners(self, buffer: Buffer) -> list[int]:
        """The ranks that together hold a buffer once, in the order of its slices; of equal ranks the first."""
        role = self.role_of(buffer)
        first = 0 if role is None else self.mesh.peers(0, PIPELINE)[role]
        axis = self.axis if buffer.per_rank else buffer.sharded
        return self.mesh.peers(first, axis) if axis else [first]

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


def sum_axes(mesh: Mesh) -> list[str]:
    """The data axes with several ranks, in the order in which a gradient is summed: the innermost first."""
    return [axis for axis in reversed(parts_of(mesh.data_axes)) if mesh.size(axis) > 1]


def layout(
    paths: Sequence[str],
    leaves: Sequence[torch.Tensor],
    *,
    mesh: Mesh,
    pipeline: Callable[[Mapping[str, int], int], Cut] | None = None,
    zero: Stage | Mapping[str, Stage] = 0,
    bucket_bytes: int = BUCKET_BYTES,
    params: Sequence[str] = ("params/**",),
    per_rank: Sequence[str] = (),
    compute: Callable[[str, torch.Tensor], torch.dtype] = lambda path, leaf: leaf.dtype,
    shard: Mapping[str, P] | None = None,
    home: Callable[[str], str] = lambda path: DEVICE,
) -> Plan:
    """The plan for these leaves.

    pipeline: `pipeline_cut.cut_layers`, given the elements of each numbered layer and of the leaves after them.
    compute: the narrowest dtype that a leaf may be gathered in, from its path below its entry and the leaf. shard: path
    rules to the axes that cut the dims; the first match wins. home: the space in which a leaf of
    a bucket is held, from its path; leaves in no bucket stay on the device.

    Raises SpecError for a rule that matches nothing or leaves a leaf without a stage, and as `pipeline` does.
    """
    axes, world_size = sum_axes(mesh) or [parts_of(mesh.data_axes)[-1]], mesh.data_ranks
    codes_of = scales(paths, leaves, per_rank)
    apart = {i for i, path in enumerate(paths) if path in per_rank} | set(codes_of)
    flat = [i for i, leaf in enumerate(leaves) if i not in apart and _may_be_cut(leaf)]
    classes = with_scales(_classes(flat, paths, leaves), codes_of, paths, leaves)
    is_param = [any(tree.matches(p, path) for p in params) for path in paths]
    follows = followers(classes, leaves, is_param)
    layouts = _layouts(classes, follows, paths, leaves, shard or {}, mesh)
    whole = leaves
    leaves = _parts(classes, leaves, layouts)
    stages = _stages(classes, paths, zero)
    if world_size > 1 and not any(is_param[i] for i in flat):
        _check_params(stages, zero, params)
    casts = [compute("/".join(leaf_class.key), leaves[leaf_class.members[0][1]]) for leaf_class in classes]
    led = [leaf_class if of is None else classes[of.leader] for leaf_class, of in zip(classes, follows, strict=True)]
    own = [leaf_class for leaf_class, of in zip(classes, follows, strict=True) if of is None]
    cut = pipeline(*_layers(own, leaves)) if pipeline is not None else None
    chunks = [None if cut is None else cut.chunk("/".join(leaf_class.key)) for leaf_class in led]
    homes = [home(path) for path in paths]
    groups = _groups(classes, stages, casts, leaves, chunks, homes)
    buckets: dict[str, Bucket] = {}
    buffers: dict[str, Buffer] = {}
    places: dict[int, Leaf] = {}
    for stage, bucket, members in _buckets(groups, classes, leaves, bucket_bytes, world_size, axes):
        chunk = chunks[members[0]]
        if cut is not None and chunk is not None:
            bucket = replace(bucket, role=cut.role_of[chunk])
        name = bucket.name
        buckets[name] = bucket
        for column, (prefix, first) in enumerate(classes[members[0]].members):
            row = row_of(stage, axes)
            narrow = row.optimizer if casts[members[0]].itemsize < leaves[first].dtype.itemsize else None
            sharded = (row.params or narrow if is_param[first] else row.optimizer) if world_size > 1 else None
            kind = "param" if is_param[first] else "optimizer"
            block_size = ALIGN if first in codes_of else 1
            length = (bucket.length // mesh.size(sharded) if sharded else bucket.length) // block_size
            column_name = _unused(buffer_name(f"{prefix}:{name}" if prefix else name), buffers)
            buffers[column_name] = Buffer(
                column_name, leaves[first].dtype, (length,), kind, name, sharded, per=block_size, space=homes[first]
            )
            for index, c in enumerate(members):
                i = classes[c].members[column][1]
                shape, dtype = tuple(whole[i].shape), whole[i].dtype
                places[i] = Leaf(paths[i], shape, dtype, column_name, index, layout=layouts[c])
    for i in sorted(set(range(len(paths))) - set(places)):
        name = _unused(buffer_name(paths[i] or "state"), buffers)
        places[i] = leaf = Leaf(paths[i], tuple(leaves[i].shape), leaves[i].dtype, name, None, paths[i] in per_rank)
        buffers[name] = Buffer(name, leaf.dtype, leaf.shape, "state", per_rank=leaf.per_rank)
    leaves_in_order = tuple(places[i] for i in range(len(paths)))
    return Plan(mesh.data_axes, mesh, buckets, _on_disk(buffers), leaves_in_order, cut)


def _on_disk(buffers: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """The buffers, those on disk one behind the other in the rank's file, each from the start of a page."""
    placed, end = {}, 0
    for name, buffer in buffers.items():
        placed[name] = buffer
        if buffer.space == DISK:
            placed[name] = replace(buffer, at=end)
            end += _round_up(buffer.nbytes, PAGE_BYTES)
    return placed


def _layouts(
    classes: Sequence[Class],
    follows: Sequence[Follows | None],
    paths: Sequence[str],
    leaves: Sequence[torch.Tensor],
    rules: Mapping[str, P],
    mesh: Mesh,
) -> list[Layout]:
    """Of each class, its layout: leaves that mirror one another lie alike, and one that follows another as that does,
    unless a rule is for it alone."""
    used: set[str] = set()
    found = [WHOLE] * len(classes)
    names = [["/".join(c.key), *(paths[i] for _, i in c.members)] for c in classes]
    for number, leaf_class in sorted(enumerate(classes), key=lambda row: follows[row[0]] is not None):
        of = follows[number]
        rule = next((r for r in rules if any(tree.matches(r, name) for name in names[number])), None)
        if of is not None and (rule is None or any(tree.matches(rule, name) for name in names[of.leader])):
            found[number] = of.layout(found[of.leader])
            continue
        if rule is None:
            continue
        used.add(rule)
        shape = leaves[leaf_class.members[0][1]].shape
        found[number] = rules[rule].layout(_path_of(leaf_class, paths), shape, mesh)
        if found[number]:
            _check_whole(leaf_class, paths, leaves, rule)
    for rule in rules:
        if rule not in used and rule != "**":
            _check_unused(rule, rules, classes, paths, leaves)
    return found


def _check_unused(
    rule: str, rules: Mapping[str, P], classes: Sequence[Class], paths: Sequence[str], leaves: Sequence[torch.Tensor]
) -> None:
    """Raises SpecError for a rule that placed no leaf, with the reason. `P()` for a leaf that is never cut is right."""
    names = [["/".join(c.key), *(paths[i] for _, i in c.members)] for c in classes]
    for leaf_class, own in zip(classes, names, strict=True):
        if any(tree.matches(rule, name) for name in own):
            first = next(r for r in rules if any(tree.matches(r, name) for name in own))
            raise SpecError(
                f"Spec(shard=...): the rule {rule!r} places no leaf: {first!r} comes before it and places "
                f"{_path_of(leaf_class, paths)}, and what mirrors it lies alike. Put {rule!r} first, or leave it out"
            )
    cut = {i for leaf_class in classes for _, i in leaf_class.members}
    for i, path in enumerate(paths):
        below = path.partition("/")[2]
        if i not in cut and (tree.matches(rule, path) or (below and tree.matches(rule, below))):
            if not rules[rule].axes:
                return
            raise SpecError(
                f"Spec(shard=...): the rule {rule!r} is to cut {path}, of shape {tuple(leaves[i].shape)} and "
                f"{leaves[i].dtype}. Leaves of no dim, without elements, per rank or of integers are held whole: leave "
                "the rule out"
            )
    known = {"/".join(c.key) for c in classes}
    raise SpecError(f"Spec(shard=...): the rule {rule!r} matches no leaf.{tree.suggest(rule, known)}")


def _path_of(leaf_class: Class, paths: Sequence[str]) -> str:
    """The path by which a user knows leaves that mirror one another: the parameter's, which is the shortest."""
    return min((paths[i] for _, i in leaf_class.members), key=len)


def _check_whole(leaf_class: Class, paths: Sequence[str], leaves: Sequence[torch.Tensor], rule: str) -> None:
    """Raises SpecError for a sharded leaf whose optimizer needs all of it, or cuts it into blocks of its own."""
    path = _path_of(leaf_class, paths)
    whole = f"shard={{{path!r}: P(), ...}} before {rule!r}"
    fix = f"Take adamw for it (fzero.optim.multi_transform), or keep it whole: {whole}"
    for prefix, i in leaf_class.members:
        if whole_leaves.asks(prefix):
            raise SpecError(f"shard: {path} is stepped as a whole matrix ({prefix}), so no rank may hold a part. {fix}")
        if leaves[i].dtype in CODES:
            raise SpecError(f"shard: {path} has moments in blocks of {ALIGN} elements, which a part would cut. {fix}")


def _parts(classes: Sequence[Class], leaves: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """The leaves, those that are cut by a dim as one rank's part of them (on the meta device)."""
    parts = list(leaves)
    for leaf_class, lies in zip(classes, layouts, strict=True):
        if lies:
            for _, i in leaf_class.members:
                shape = lies.local_shape(leaves[i].shape)
                parts[i] = torch.empty(shape, dtype=leaves[i].dtype, device="meta")
    return parts


def _may_be_cut(leaf: torch.Tensor) -> bool:
    return (leaf.dtype.is_floating_point or leaf.dtype in CODES) and leaf.ndim > 0 and leaf.numel() > 0


def _layers(classes: list[Class], leaves: Sequence[torch.Tensor]) -> tuple[dict[str, int], int]:
    """(the elements of each numbered layer, the elements of leaves without a number that come after them)."""
    sizes: dict[str, int] = {}
    last = 0
    for leaf_class in classes:
        path, numel = "/".join(leaf_class.key), leaves[leaf_class.members[0][1]].numel()
        layer, numbered = layer_of(path)
        if numbered:
            sizes[layer] = sizes.get(layer, 0) + numel
        elif not FIRST.search(path):
            last += numel
    return sizes, last


def _unused(name: str, taken: Collection[str]) -> str:
    """The name, or with a number the next that is free: `a b` and `a_b` are different leaves."""
    names = (name, *(f"{name}~{count}" for count in range(2, len(taken) + 3)))
    return next(candidate for candidate in names if candidate not in taken)


def _check_params(stages: Sequence[Stage], zero: object, params: Sequence[str]) -> None:
    """Without a leaf that is a parameter stages 1 and 2 have nothing to keep whole."""
    if any(stage in (1, 2) for stage in stages):
        raise SpecError(
            f"zero={zero!r} keeps parameters whole and shards the rest, but no leaf of the state matches "
            f"params={list(params)!r}. Say which leaves are parameters, as in Spec(params='model/**')"
        )


def _classes(flat: list[int], paths: Sequence[str], leaves: Sequence[torch.Tensor]) -> list[Class]:
    """Unites a leaf with the leaf of another top-level entry whose path below that entry is the longest to end its
    own."""
    split = {i: tuple(paths[i].split("/")) for i in flat}
    anchors: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    for i in flat:
        anchors.setdefault((split[i][1:], tuple(leaves[i].shape)), []).append(i)
    bare: dict[tuple[int, ...], list[int]] = {}
    for i in flat:
        if len(split[i]) == 1:
            bare.setdefault(tuple(leaves[i].shape), []).append(i)
    parent = {i: i for i in flat}

    def find(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i in flat:
        for cut in range(1, len(split[i]) + 1):
            hits = anchors.get((split[i][cut:], tuple(leaves[i].shape)), [])
            others = [j for j in hits if split[j][0] != split[i][0]]
            whole = [j for j in bare.get(tuple(leaves[i].shape), []) if split[j] == split[i][cut:] and j != i]
            if cut == len(split[i]):  # nothing left to compare: only the one leaf that is an entry by itself
                others = others if len(others) == 1 and cut > 1 else []
            if whole or others:
                low, high = sorted((find((whole or others)[0]), find(i)))
                parent[high] = low
                break
    members: dict[int, list[int]] = {}
    for i in flat:
        members.setdefault(find(i), []).append(i)
    return [_class(group, split) for group in sorted(members.values(), key=min)]


def _class(group: list[int], split: Mapping[int, tuple[str, ...]]) -> Class:
    common = 0
    if len(group) > 1:
        shortest = min(len(split[i]) for i in group)
        while common < shortest and len({split[i][-1 - common] for i in group}) == 1:
            common += 1
    else:
        common = max(len(split[group[0]]) - 1, 0)
    prefixes = tuple(("/".join(split[i][: len(split[i]) - common]), i) for i in group)
    key = split[group[0]][len(split[group[0]]) - common :] or split[group[0]]
    return Class(key, prefixes)


def _stages(classes: list[Class], paths: Sequence[str], zero: Stage | Mapping[str, Stage]) -> list[Stage]:
    rules = zero if isinstance(zero, Mapping) else {"**": zero}
    used: set[str] = set()
    stages = []
    for leaf_class in classes:
        names = ["/".join(leaf_class.key), *(paths[i] for _, i in leaf_class.members)]
        rule = next((r for r in rules if any(tree.matches(r, name) for name in names)), None)
        if rule is None:
            raise SpecError(f"zero has no rule for {names[1]!r}: add a last rule, as in {{..., '**': 1}}")
        used.add(rule)
        stages.append(rules[rule])
    every = {"/".join(c.key) for c in classes} | {*paths} | {path.partition("/")[2] for path in paths}  # 0-d ones too
    for rule in rules:
        if rule not in used and not any(tree.matches(rule, name) for name in every) and rule != "**":
            known = {"/".join(c.key[: n + 1]) + "/**" for c in classes for n in range(len(c.key))}
            raise SpecError(f"the zero rule {rule!r} matches no leaf.{tree.suggest(rule, known)}")
    return stages


def _groups(
    classes: list[Class],
    stages: Sequence[Stage],
    casts: list[torch.dtype],
    leaves: Sequence[torch.Tensor],
    chunks: Sequence[int | None],
    homes: Sequence[str],
) -> dict[tuple[object, ...], list[int]]:
    """Class indices by (layer, stage, chunk, cast, columns and their homes), in canonical order: the tree's, matrices
    before vectors in a layer."""
    sizes: dict[str, int] = {}
    layers: list[tuple[str, bool]] = []
    for leaf_class in classes:
        layers.append(layer_of("/".join(leaf_class.key)))
        leaf = leaves[leaf_class.members[0][1]]
        sizes[layers[-1][0]] = sizes.get(layers[-1][0], 0) + leaf.numel() * leaf.dtype.itemsize
    groups: dict[tuple[object, ...], list[int]] = {}
    for c, (leaf_class, (layer, numbered)) in enumerate(zip(classes, layers, strict=True)):
        layer = layer if numbered or sizes[layer] >= SMALL_BYTES else "small"
        columns = tuple((prefix, leaves[i].dtype, homes[i]) for prefix, i in leaf_class.members)
        groups.setdefault((layer, stages[c], chunks[c], casts[c], columns), []).append(c)
    for members in groups.values():
        members.sort(key=lambda c: (leaves[classes[c].members[0][1]].ndim < 2, c))
    return groups


def _buckets(
    groups: Mapping[tuple[object, ...], list[int]],
    classes: list[Class],
    leaves: Sequence[torch.Tensor],
    bucket_bytes: int,
    world_size: int,
    axes: Sequence[str],
) -> Iterator[tuple[Stage, Bucket, list[int]]]:
    """(stage, bucket, the classes of its slots) of every bucket: those packed whole onto ranks, then the others."""
    lead = [leaves[leaf_class.members[0][1]] for leaf_class in classes]
    ordinary, packed = whole_leaves.separate(
        groups,
        whole=lambda c: any(whole_leaves.asks(prefix) for prefix, _ in classes[c].members),
        size=lambda c: lead[c].numel(),
        fill=bucket_bytes // max((x.dtype.itemsize for x in lead), default=1),
        world_size=world_size,
    )
    for number, (name, stage, members) in enumerate(_named([*packed, *_cut(ordinary, lead, bucket_bytes)])):
        sizes = [lead[c].numel() for c in members]
        starts, length = whole_leaves.pack(sizes, world_size) if number < len(packed) else _in_a_row(sizes, world_size)
        placed = sorted(zip(starts, members, strict=True))
        slots = [
            Slot("/".join(classes[c].key), start, start + lead[c].numel(), tuple(lead[c].shape)) for start, c in placed
        ]
        row = row_of(stage, axes)
        bucket = Bucket(
            name, length, tuple(slots), row.cut, bool(row.optimizer), not row.params, row.reduce_when, copy=row.copy
        )
        yield stage, bucket, [c for _, c in placed]


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
            size = _round_up(lead[c].numel(), ALIGN) * lead[c].dtype.itemsize
            if runs[-1] and filled + size > cap:
                runs.append([])
                filled = 0
            runs[-1].append(c)
            filled += size
        assert isinstance(stage, int | Columns)
        result += [(layer, stage, run) for run in runs]
    return result


def _named(runs: Sequence[whole_leaves.Run]) -> list[tuple[str, Stage, list[int]]]:
    """(bucket name, stage, classes): the layer's name, and a number where it has several buckets."""
    result: list[tuple[str, Stage, list[int]]] = []
    taken: set[str] = set()
    for layer, stage, run in runs:
        name = _unused(buffer_name(str(layer)), taken)
        taken.add(name)
        result.append((name, stage, run))
    return result


def _in_a_row(sizes: Sequence[int], world_size: int) -> tuple[list[int], int]:
    """(each leaf's start, the bucket's length): one after another, on aligned places."""
    ends = list(accumulate((_round_up(size, ALIGN) for size in sizes), initial=0))
    return ends[:-1], _round_up(ends[-1], world_size * ALIGN)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
