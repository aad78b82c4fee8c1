"""manifest: the description of a checkpoint, in JSON, and the strict way to read it.

    run/
      latest                                  "step-00000120\\n": a hint, never more
      step-00000120/
        COMMITTED                             the SHA-256 of manifest.json, in hex, and a newline; written last
        manifest.json
        shard-00000.safetensors               written by rank 0; file names are numbers, never names of leaves

Every leaf is cut into *pieces*: elements [start, stop) of the flattened logical leaf. They lie 1-D in a shard under the
leaf's path. The pieces of a leaf are in order and cover it exactly. A leaf with a `cut` lay over the ranks of an axis
by a dim: its elements are counted part by part (`fzero.state.order`). A shard is hashed in blocks of 4 MiB. Its
`sha256` is that of the digests of its blocks, one after the other (a hash tree of depth one). So a reader verifies
exactly the blocks it reads.

Nothing read is believed before it is checked: sizes and types, duplicate and unknown keys, the partition of every leaf,
bytes against shards. A manifest that cannot be believed is a CorruptError that names it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint import structure
from fzero.checkpoint.strict import MAX_INT, Invalid, Reader, check_json, dump, parse
from fzero.disk.calls import Disk
from fzero.errors import CheckpointError, CorruptError
from fzero.ir.records import DTYPE_NAMES, DTYPES
from fzero.state.order import DimCut, Order

# What older versions of fzero read too where that does: 1 without a cut, 2 with one a leaf, 3 without a plan
FORMAT, VERSION = "fzero", 4
MANIFEST, MARKER, LATEST = "manifest.json", "COMMITTED", "latest"
BLOCK = 4 << 20  # bytes that are hashed together
MAX_MANIFEST = 64 << 20  # bytes
MARKER_BYTES = 65
CUT = ("dim", "groups", "ranks")
MAX_SHARD = 1 << 50  # bytes
STEP = re.compile(r"step-([0-9]{8,19})")


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a leaf, in its order, in shard number `shard`."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LeafRecord:
    """A leaf of the saved state.

    shape: the logical shape; a per-rank leaf has the ranks as first dimension. placement: how the leaf lay when it was
    saved, for people. pieces: in order; they cover the leaf exactly. cuts: over which ranks it lay by its dims, if it
    did, the outer one first; its pieces are counted part by part.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str
    kind: str
    per_rank: bool
    pieces: tuple[Piece, ...]
    cuts: tuple[DimCut, ...] = ()

    @property
    def order(self) -> Order:
        """The order in which the pieces count the elements."""
        return Order.of(self.shape, self.cuts)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A file: its bytes, the SHA-256 of these digests, and the SHA-256 digest of each block of 4 MiB (`blocks`)."""

    bytes: int
    sha256: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint. Most users need `step`, `extra` (saved along by the user) and `leaves`. plan:
    the fields of the Spec that `fzero.plan` chose, as data; None where it was not asked.

    Invariant: `leaves` fill the places of `structure` in order, and their pieces fit into `shards`.
    """

    step: int
    mesh: Mapping[str, int]
    zero: int | str | Mapping[str, Any]
    versions: Mapping[str, str]
    program: str | None
    extra: Any
    structure: Any
    leaves: tuple[LeafRecord, ...]
    shards: tuple[ShardRecord, ...]
    plan: Mapping[str, Any] | None = None

    @cached_property
    def by_path(self) -> dict[str, LeafRecord]:
        """The leaves by path."""
        return {leaf.path: leaf for leaf in self.leaves}

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def tree(self, values: Sequence[Any]) -> Any:
        """Returns `values`, in the order of `leaves`, as a pytree of dicts, lists, tuples and None.

        A named tuple or another container comes back as a dict by field.
        """
        return structure.build(self.structure, values)

    def to_bytes(self) -> bytes:
        """Returns the text of manifest.json."""
        cuts = min(max((len(leaf.cuts) for leaf in self.leaves), default=0), 2)
        version = VERSION if self.plan is not None else 1 + cuts
        leaves = [
            {
                "path": leaf.path,
                "shape": list(leaf.shape),
                "dtype": DTYPE_NAMES[leaf.dtype],
                "placement": leaf.placement,
                "kind": leaf.kind,
                "per_rank": leaf.per_rank,
                "pieces": [{"shard": p.shard, "start": p.start, "stop": p.stop} for p in leaf.pieces],
                **({"cut": _text_of(leaf.cuts)} if version > 1 else {}),
            }
            for leaf in self.leaves
        ]
        shards = [
            {"file": shard_name(i), "bytes": s.bytes, "sha256": s.sha256, "blocks": list(s.blocks)}
            for i, s in enumerate(self.shards)
        ]
        rows = {
            "format": FORMAT,
            "version": version,
            "step": self.step,
            "mesh": dict(self.mesh),
            "zero": dict(self.zero) if isinstance(self.zero, Mapping) else self.zero,
            "versions": dict(self.versions),
            "program": self.program,
            "extra": self.extra,
            "structure": self.structure,
            "leaves": leaves,
            "shards": shards,
            **({"plan": dict(self.plan)} if self.plan is not None else {}),
        }
        return b"{\n" + b",\n".join(dump(name) + b":" + dump(value) for name, value in rows.items()) + b"\n}\n"

    @staticmethod
    def from_bytes(data: bytes, file: Path | str = MANIFEST) -> Manifest:
        """Returns the manifest in `data`.

        Raises CorruptError, which names `file`, and CheckpointError for a format that this version does not know.
        """
        try:
            if len(data) > MAX_MANIFEST:
                raise Invalid(f"it has {len(data):,} bytes: at most {MAX_MANIFEST:,} are allowed")
            value = parse(data)
            _check_version(value, file)
            return _manifest(value)
        except Invalid as error:
            raise CorruptError(file, f"is damaged, or no manifest of fzero: {error}") from None


def root(blocks: Sequence[bytes]) -> str:
    """Returns the `sha256` of a shard, from the digests of its blocks."""
    return hashlib.sha256(b"".join(blocks)).hexdigest()


def shard_name(number: int) -> str:
    """Returns the file name of a shard."""
    return f"shard-{number:05d}.safetensors"


def step_name(step: int) -> str:
    """Returns the name of a step's directory."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Returns the step of a directory of this name; None for any other name."""
    match = STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def read(directory: Path, disk: Disk | None = None) -> Manifest:
    """Returns the manifest of a committed step directory, after checking its marker. Raises CorruptError."""
    disk = disk or Disk()
    file = directory / MANIFEST
    data = disk.read(file, limit=MAX_MANIFEST)
    marker = disk.read(directory / MARKER, limit=MARKER_BYTES)
    if marker != marker_of(data):
        raise CorruptError(
            directory / MARKER, f"does not belong to {MANIFEST}: one of them is damaged or of another save"
        )
    manifest = Manifest.from_bytes(data, file)
    named = step_of(directory.name)
    if named is not None and named != manifest.step:
        raise CorruptError(file, f"is of step {manifest.step}, and its directory is {directory.name}")
    return manifest


def marker_of(manifest: bytes) -> bytes:
    """Returns the content of COMMITTED."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


# --- reading --------------------------------------------------------------------------------------------------------

HEX = "[0-9a-f]{64}"


def _is_stage(value: Any) -> bool:
    """Whether it is a ZeRO stage, by number or by name, or the mesh axes of a column."""
    if type(value) is list:
        return all(type(axis) is str for axis in value)
    return value in ("hsdp", "hpz") if type(value) is str else type(value) is int and 0 <= value <= 3


def _manifest(value: Any) -> Manifest:
    """The manifest of a parsed JSON. Raises Invalid for a wrong field, with its place."""
    names = ("format", "version", "step", "mesh", "zero", "versions", "program", "extra", "structure", "leaves")
    planned = type(value) is dict and value.get("version") == VERSION
    top = Reader("it", value, (*names, "shards", *(["plan"] if planned else [])))
    top.text("format", FORMAT)
    version = top.integer("version", 1, VERSION)
    plan = dict(top.table("plan")) if planned else None
    check_json("it.plan", plan)
    mesh = {axis: _size(top, "mesh", n) for axis, n in top.table("mesh").items()}
    zero = top.value["zero"]
    stages = zero if type(zero) is dict else {"**": zero}
    if not all(_is_stage(stage) for stage in stages.values()):
        top.fail("a stage, path rules to stages, or the axes of each column", zero, "zero")
    versions = top.table("versions")
    if any(type(v) is not str for v in versions.values()):
        top.fail("texts", versions, "versions")
    program = None if top.value["program"] is None else top.text("program", "[0-9a-f]{1,128}")
    check_json("it.extra", top.value["extra"])
    shards = tuple(_shard(i, s) for i, s in enumerate(top.objects("shards", ("file", "bytes", "sha256", "blocks"))))
    if len(shards) != math.prod(mesh.values()):
        raise Invalid(f"it has {len(shards)} shards for the mesh {mesh}")
    fields = ("path", "shape", "dtype", "placement", "kind", "per_rank", "pieces", *(("cut",) if version > 1 else ()))
    leaves = tuple(_leaf(leaf, len(shards)) for leaf in top.objects("leaves", fields))
    _check_bytes(leaves, shards)
    if structure.count(top.value["structure"]) != len(leaves):
        raise Invalid(f"it.structure does not have a place for each of {len(leaves)} leaves")
    return Manifest(
        top.integer("step"), mesh, zero, versions, program, top.value["extra"], top.value["structure"], leaves, shards,
        plan,
    )  # fmt: skip


def _check_version(value: Any, file: Path | str) -> None:
    """Raises CheckpointError for a newer format, which is no damage."""
    version = value.get("version") if type(value) is dict and value.get("format") == FORMAT else None
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            file, f"is of format version {version:.6g}, this fzero reads up to {VERSION}: install a newer fzero"
        )


def _size(top: Reader, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 20:
        top.fail("a size from 1 to 1048576", value, name)
    return int(value)


def _shard(number: int, shard: Reader) -> ShardRecord:
    shard.text("file", re.escape(shard_name(number)))
    size = shard.integer("bytes", 8, MAX_SHARD)
    blocks = shard.items("blocks")
    if len(blocks) != -(-size // BLOCK):
        shard.fail(f"{-(-size // BLOCK)} digests for {size:,} bytes", blocks, "blocks")
    if not all(type(block) is str and re.fullmatch(HEX, block) for block in blocks):
        shard.fail("SHA-256 digests in hex", blocks, "blocks")
    if shard.text("sha256", HEX) != root([bytes.fromhex(block) for block in blocks]):
        shard.fail("the SHA-256 of its blocks' digests", shard.value["sha256"], "sha256")
    return ShardRecord(size, shard.value["sha256"], tuple(blocks))


def _leaf(leaf: Reader, num_shards: int) -> LeafRecord:
    """One leaf's record. Raises Invalid if its pieces do not cover it once, in order."""
    shape = leaf.items("shape")
    if len(shape) > 64 or any(type(d) is not int or not 0 <= d < 1 << 48 for d in shape):
        leaf.fail("at most 64 sizes below 2**48", shape, "shape")
    name = leaf.text("dtype")
    if name not in DTYPES:
        leaf.fail(f"one of {', '.join(DTYPES)}", name, "dtype")
    if math.prod(max(d, 1) for d in shape) * DTYPES[name].itemsize >= MAX_INT:
        leaf.fail("a tensor below 2**63 bytes", shape, "shape")
    numel, end, pieces, used = math.prod(shape), 0, [], set()
    for row in leaf.objects("pieces", ("shard", "start", "stop")):
        piece = Piece(row.integer("shard", 0, num_shards - 1), row.integer("start"), row.integer("stop"))
        if piece.start != end or not piece.start < piece.stop <= numel:
            raise Invalid(f"{row.where} holds [{piece.start}, {piece.stop}): needed a part from {end} to {numel} on")
        if piece.shard in used:
            raise Invalid(f"{row.where} is the second piece in shard {piece.shard}")
        end = piece.stop
        used.add(piece.shard)
        pieces.append(piece)
    if end != numel:
        raise Invalid(f"{leaf.where}.pieces end at element {end} of {numel}")
    return LeafRecord(
        leaf.text("path"),
        tuple(shape),
        DTYPES[name],
        leaf.text("placement"),
        leaf.text("kind"),
        leaf.boolean("per_rank"),
        tuple(pieces),
        _cuts(leaf, shape),
    )


def _text_of(cuts: Sequence[DimCut]) -> Any:
    """How cuts are written: one by itself, as version 2 has it, several as a list."""
    rows = [asdict(cut) for cut in cuts]
    return rows if len(rows) > 1 else rows[0] if rows else None


def _cuts(leaf: Reader, shape: Sequence[int]) -> tuple[DimCut, ...]:
    """A leaf's cuts. Raises Invalid if the ranks would not have equal parts of it."""
    value = leaf.value.get("cut")
    if value is None:
        return ()
    if type(value) is dict:
        rows = [Reader(f"{leaf.where}.cut", value, CUT)]
    else:
        rows = list(Reader(leaf.where, {"cut": value}, ("cut",)).objects("cut", CUT))
        if not 2 <= len(rows) <= 8:
            leaf.fail("two to eight cuts", value, "cut")
    sizes = list(shape)
    found: list[DimCut] = []
    for row in rows:
        cut = DimCut(row.integer("dim"), row.integer("groups", 1), row.integer("ranks", 2, 1 << 20))
        alike = all(cut.groups == other.groups for other in found if other.dim == cut.dim)
        if (
            cut.dim >= len(shape)
            or not sizes[cut.dim]
            or sizes[cut.dim] % (cut.groups * cut.ranks)
            or not alike
            or leaf.value["per_rank"]
        ):
            raise Invalid(
                f"{row.where} cuts dim {cut.dim} of {sizes} into {cut.groups} x {cut.ranks} parts: needed equal ones"
            )
        sizes[cut.dim] //= cut.ranks
        found.append(cut)
    return tuple(found)


def _check_bytes(leaves: Sequence[LeafRecord], shards: Sequence[ShardRecord]) -> None:
    """Raises Invalid unless paths are distinct and no shard is too short for its pieces."""
    if len({leaf.path for leaf in leaves}) != len(leaves):
        raise Invalid("it.leaves has a path twice")
    needed = [0] * len(shards)
    for leaf in leaves:
        for piece in leaf.pieces:
            needed[piece.shard] += (piece.stop - piece.start) * leaf.dtype.itemsize
    for number, (size, shard) in enumerate(zip(needed, shards, strict=True)):
        if size > shard.bytes - 8:
            raise Invalid(f"it.shards[{number}] has {shard.bytes:,} bytes, its pieces have {size:,}")
