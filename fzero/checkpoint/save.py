"""save: a state to a directory; each rank writes its part once.

`snapshot` takes the part that this rank writes. Of a bucket of length L it is the slice [r L/N, (r+1) L/N), whether the
bucket is sharded or replicated. So a replicated state is written once, by all ranks in parallel. Whole leaves are
written by rank 0, per-rank leaves by each rank. Of a leaf that is cut by its dims each place writes its part; what
several places hold alike is written by the first. Padding is left out. `write` is the protocol
(`fzero.checkpoint.commit`) in four rounds:

    1. the ranks agree on the save           step, layout, extra
    2. rank 0 prepares the directory
    3. every rank writes, hashes and syncs its shard; the hashes go to rank 0
    4. rank 0 commits

A rank that fails reports it in its round, and all ranks raise. Cost: each byte of the state is written once and hashed
once.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fzero import backend, progress
from fzero._version import __version__
from fzero.capture import ambient
from fzero.capture.short_tracebacks import short_tracebacks
from fzero.checkpoint import commit, shards, structure
from fzero.checkpoint.manifest import LeafRecord, Manifest, Piece, ShardRecord, shard_name
from fzero.checkpoint.ranks import Ranks
from fzero.checkpoint.shards import Part
from fzero.checkpoint.strict import Invalid, check_json, check_text, dump, parse
from fzero.comm import heartbeat
from fzero.comm.agree import agree
from fzero.disk.calls import Disk
from fzero.errors import CheckpointError, DonatedError, TreeError
from fzero.plan.state_plan import Leaf, Plan
from fzero.planner.chosen import chosen_of
from fzero.session.session import session_of, turn_of
from fzero.state import storage
from fzero.state.order import cuts
from fzero.state.state import State


@dataclass(frozen=True)
class Snapshot:
    """The part of a state that one rank saves, in host memory.

    parts: its pieces as 1-D tensors. manifest: complete but for the shards. block: the memory of the parts, if they
    were copied. A copied snapshot owns its memory, so steps may go on while it is written.
    """

    rank: int
    manifest: Manifest
    parts: tuple[Part, ...]
    block: torch.Tensor

    @property
    def step(self) -> int:
        """The step of the state."""
        return self.manifest.step

    @property
    def nbytes(self) -> int:
        """The bytes that this rank writes, without the header."""
        return sum(part.data.numel() * part.data.dtype.itemsize for part in self.parts)


@short_tracebacks
def save(
    state: State,
    directory: str | os.PathLike[str],
    *,
    extra: Any = None,
    keep: int | None = None,
    disk: Disk | None = None,
) -> Path:
    """Writes a checkpoint of `state` into a new directory, `directory/step-00000120`, and returns its path. Collective.

    state: of a step; it can be used afterwards.

    directory: of the run, on a file system that all ranks share.

    extra: any JSON (dict, list, str, int, float, bool, None), such as the position in the data; the same on every rank.

    keep: how many checkpoints to keep, this one and the newest of the others. None: all of them.

    disk: the calls that write files, for tests.

    Every rank calls it. Older checkpoints stay as they
    are until this one is committed. The same step with the same contents again is no error.

    Raises CheckpointError on every rank if one of them fails. Raises DonatedError for a state that a step consumed,
    DisagreementError if other ranks do something else, HangError if a rank does not come.

    >>> import fzero, tempfile
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.sgd(0.1))
    >>> state = fzero.init({"w": torch.ones(2)}, spec)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(state, folder, extra={"epoch": 3})
    ...     path.name, fzero.checkpoint.manifest(folder).extra
    ('step-00000000', {'epoch': 3})
    """
    if not isinstance(state, State):
        raise TreeError(f"fzero.save needs a State, got {type(state).__name__}: call fzero.save(state, directory)")
    runtime = session_of(state)
    on_host = backend.of(runtime.device).on_host
    ambient.check_outside("fzero.save")
    with turn_of(state):  # and no thread of this rank steps meanwhile
        agree(runtime.rank, runtime.world_size, "save", "", runtime.group)  # and none of the others
        try:
            return _write(
                runtime.rank,
                runtime.world_size,
                lambda: _of(state, extra, copy=not on_host, reuse=None),
                Path(directory),
                keep,
                runtime.group,
                disk or Disk(),
            )
        finally:
            heartbeat.of(runtime.group).leave()


def snapshot(state: State, *, extra: Any = None, reuse: Snapshot | None = None) -> Snapshot:
    """Returns this rank's parts of a state, copied to host memory, for `write` to write while training goes on.

    It is no collective: a rank that fails raises alone. state: of a step. extra: as in `save`. reuse: an earlier
    snapshot that is not needed any more. Its memory is taken, since touching new memory costs more than copying. Raises
    DonatedError, and CheckpointError for an `extra` that is no JSON.
    """
    if not isinstance(state, State):
        raise TreeError(f"fzero.checkpoint.snapshot needs a State, got {type(state).__name__}")
    with turn_of(state):
        return _of(state, extra, copy=True, reuse=reuse)


def write(
    snapshot: Snapshot,
    directory: str | os.PathLike[str],
    *,
    keep: int | None = None,
    group: Any = None,
    disk: Disk | None = None,
) -> Path:
    """Writes a snapshot, as `fzero.save` does, and returns the checkpoint's directory. Collective.

    It may run in any thread. snapshot: of this rank. directory, keep, disk: as in `save`. group: a gloo group that
    nothing else uses meanwhile; None: the default group.
    """
    world_size = len(snapshot.manifest.shards)
    return _write(snapshot.rank, world_size, lambda: snapshot, Path(directory), keep, group, disk or Disk())


# --- a rank's part ----------------------------------------------------------------------------------------------------


def _of(state: State, extra: Any, *, copy: bool, reuse: Snapshot | None) -> Snapshot:
    runtime = session_of(state)
    if state.life.ended:
        raise DonatedError(f"this state cannot be saved: it {state.life.ended}")
    state.check_leaves()
    program = runtime.last_program.digest if runtime.last_program is not None else None
    taken = take(
        runtime.plan, runtime.memory, runtime.rank, treedef=runtime.treedef, step=state.step, zero=runtime.spec.zero,
        program=program, extra=extra, chosen=chosen_of(runtime.spec) if runtime.spec.planned else None,
    )  # fmt: skip
    return _copied(taken, reuse) if copy else taken


def take(
    plan: Plan,
    memory: Mapping[str, torch.Tensor],
    rank: int,
    *,
    treedef: Any,
    step: int,
    zero: int | str | Mapping[str, Any] = 0,
    program: str | None = None,
    extra: Any = None,
    chosen: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Returns a rank's snapshot from its buffers, without a copy: its parts are views of `memory`. chosen: what
    `fzero.plan` chose, as data.

    Raises CheckpointError if `extra` is no JSON, or a path is no text.
    """
    try:
        check_json("extra", extra)
        for leaf in plan.leaves:
            check_text(leaf.path, "a leaf's path")
        extra_copy = parse(dump(extra))  # a copy: later changes of the caller's objects are not saved
        tree, met = structure.describe(treedef)
    except Invalid as error:
        raise CheckpointError("the state to save", str(error)) from None
    versions = {"fzero": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    empty = (ShardRecord(0, "", ()),) * plan.world_size
    leaves = tuple(_record(plan, plan.leaves[number]) for number in met)
    rules = (
        {rule: stage if type(stage) is int else list(stage) for rule, stage in zero.items()}
        if isinstance(zero, Mapping)
        else zero
    )
    mesh, stages = dict(plan.mesh), rules
    manifest = Manifest(step, mesh, stages, versions, program, extra_copy, tree, leaves, empty, chosen)
    parts = [part_of(plan, memory, leaf, rank) for leaf in plan.leaves]
    return Snapshot(rank, manifest, tuple(shards.in_order(parts)), torch.empty(0, dtype=torch.uint8))


def span(plan: Plan, leaf: Leaf, rank: int) -> tuple[int, int]:
    """Returns the elements [start, stop) of a leaf, in its `storage.order`, that a rank writes: none where another role
    keeps the leaf. What several roles or places keep alike is written by the first."""
    numel, place = torch.Size(leaf.shape).numel(), plan.mesh.data_rank(rank)
    buffer = plan.buffers[leaf.buffer]
    if plan.mesh.role(rank) != (plan.role_of(buffer) or 0):
        return 0, 0
    cut = {cut.axis for cut in leaf.layout.cuts}
    if any(plan.mesh.coordinate(rank, axis) for axis, _ in plan.mesh.model_axes if axis not in cut):
        return 0, 0
    if leaf.per_rank:
        return place * numel, (place + 1) * numel
    if leaf.slot is None:
        return (0, numel) if place == 0 else (0, 0)
    bucket = plan.buckets[buffer.bucket or ""]
    first, last, _ = bucket.place(leaf.slot, buffer.per)
    part = bucket.length // plan.data_ranks
    place = plan.mesh.coordinate(rank, plan.finest)
    start, stop = (min(max(edge, first), last) for edge in (place * part, (place + 1) * part))
    before = storage.first(plan, leaf, rank)
    return before + (start - first) // buffer.per, before + (stop - first) // buffer.per


def part_of(plan: Plan, memory: Mapping[str, torch.Tensor], leaf: Leaf, rank: int) -> Part:
    """Returns those elements: a view of the rank's buffer, or what reads them from its file."""
    first, last = places(plan, leaf, rank)
    if storage.is_on_disk(memory, leaf.buffer) and first < last:
        form = torch.empty(last - first, dtype=leaf.dtype, device="meta")
        read = partial(storage.elements, memory, leaf.buffer)
        return Part(leaf.path, form, lambda start, stop: read(first + start, first + stop))
    return Part(leaf.path, held(plan, memory, leaf, rank))


def held(plan: Plan, memory: Mapping[str, torch.Tensor], leaf: Leaf, rank: int) -> torch.Tensor:
    """Returns those elements, 1-D: a view of the rank's buffer."""
    first, last = places(plan, leaf, rank)
    return memory[leaf.buffer].reshape(-1)[first:last] if first < last else torch.empty(0, dtype=leaf.dtype)


def places(plan: Plan, leaf: Leaf, rank: int) -> tuple[int, int]:
    """Returns where those elements lie in the rank's buffer."""
    start, stop = span(plan, leaf, rank)
    if start == stop:
        return 0, 0
    if leaf.slot is None:
        return 0, stop - start
    buffer = plan.buffers[leaf.buffer]
    bucket = plan.buckets[buffer.bucket or ""]
    begin = 0  # of this buffer, in the bucket
    if buffer.sharded:
        begin = plan.mesh.coordinate(rank, buffer.sharded) * (bucket.length // plan.mesh.size(buffer.sharded))
    zero = (bucket.place(leaf.slot, buffer.per)[0] - begin) // buffer.per  # where the leaf's element 0 lies, or would
    zero -= storage.first(plan, leaf, rank)
    return zero + start, zero + stop


def _record(plan: Plan, leaf: Leaf) -> LeafRecord:
    spans = [span(plan, leaf, rank) for rank in range(plan.world_size)]
    parts = [Piece(rank, start, stop) for rank, (start, stop) in enumerate(spans) if stop > start]
    pieces = tuple(sorted(parts, key=lambda piece: piece.start))
    shape = (plan.data_ranks, *leaf.shape) if leaf.per_rank else leaf.shape
    kind, lies = plan.buffers[leaf.buffer].kind, cuts(leaf.layout)
    return LeafRecord(
        leaf.path, tuple(shape), leaf.dtype, storage.placement(plan, leaf), kind, leaf.per_rank, pieces, lies
    )


def _copied(taken: Snapshot, reuse: Snapshot | None) -> Snapshot:
    """Returns the snapshot with its parts copied, one after the other, into one block of host memory."""
    block = torch.empty(0) if reuse is None else reuse.block
    devices = {part.data.device for part in taken.parts if part.read is None}
    source = devices.pop() if devices else torch.device("cpu")
    if block.numel() != taken.nbytes or block.dtype != torch.uint8:
        block = torch.empty(taken.nbytes, dtype=torch.uint8, pin_memory=backend.of(source).locks_pages)
    parts, place = [], 0
    for part in taken.parts:
        size = part.data.numel() * part.data.dtype.itemsize
        to = block[place : place + size].view(part.data.dtype)
        end = 0
        for value in part.values():
            to[end : end + value.numel()].copy_(value, non_blocking=True)
            end += value.numel()
        parts.append(Part(part.path, to))
        place += size
    backend.of(source).calls.finish(source)
    return replace(taken, parts=tuple(parts), block=block)


# --- the protocol -----------------------------------------------------------------------------------------------------


def _write(
    rank: int,
    world_size: int,
    make: Callable[[], Snapshot],
    run: Path,
    keep: int | None,
    group: Any,
    disk: Disk,
) -> Path:
    """The four rounds of a save (see the module's docstring). Returns the checkpoint's directory. Collective.

    If a round fails, rank 0 removes the files of this save, and every rank raises.
    """
    ranks = Ranks(rank, world_size, group, str(run))
    taken = _agreed(ranks, make, run, keep)
    release: Callable[[], None] = lambda: None  # noqa: E731

    def prepared() -> str:
        nonlocal release
        if rank != 0:
            return ""
        temporary, release = commit.prepare(run, taken.step, taken.manifest.nbytes, os.urandom(4).hex(), disk)
        return temporary.name

    def written() -> list[Any]:
        if rank != 0 and disk.names(temporary) is None:
            raise CheckpointError(
                temporary,
                "rank 0 has made this directory, and it is not here: save to a directory on a file system "
                "that all machines share",
            )
        record = shards.write(disk, temporary / shard_name(rank), taken.parts)
        return [record.bytes, record.sha256, list(record.blocks)]

    def committed() -> str:
        if rank != 0:
            return ""
        manifest = replace(taken.manifest, shards=tuple(ShardRecord(n, h, tuple(b)) for n, h, b in shard_rows))
        final = commit.commit(run, temporary, manifest, disk)
        commit.finish(run, final, keep, disk)
        return final.name

    try:
        with progress.shown(f"saving step {taken.step} to {run}"):
            temporary = run / ranks.round("preparing a save", prepared)[0]
            try:
                shard_rows = ranks.round("writing its shard", written)
                return run / ranks.round("committing", committed)[0]
            except BaseException:
                if rank == 0:
                    commit.undo(run, taken.step, temporary, disk)
                raise
    finally:
        release()


def _agreed(ranks: Ranks, make: Callable[[], Snapshot], run: Path, keep: int | None) -> Snapshot:
    """The first round: this rank's snapshot, once all ranks save the same step, layout and extra with one `keep`."""
    snapshots: list[Snapshot] = []

    def facts() -> dict[str, str]:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise CheckpointError(run, f"keep={keep!r}: needed a positive int, or None to keep all")
        snapshots.append(make())
        manifest = snapshots[0].manifest
        leaves = tuple(sorted(manifest.leaves, key=lambda leaf: leaf.path))  # each rank met them in its own order
        alike = replace(manifest, extra=None, step=0, program=None, structure=None, leaves=leaves)
        layout = _digest(alike.to_bytes())
        return {
            "step": str(manifest.step),
            "the layout": layout,
            "extra": _digest(dump(manifest.extra)),
            "keep": f"{keep}",
        }

    ranks.same("beginning a save", facts)
    return snapshots[0]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
