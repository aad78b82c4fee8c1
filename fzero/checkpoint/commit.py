"""commit: how a directory of shards becomes a checkpoint. All of it runs on rank 0.

    prepare   the run's directory, its lock, no leftovers, room for the bytes, a fresh `.tmp-step-00000120-<token>`
    (every rank writes and syncs its shard there)
    commit    1. every shard is there, and as long as its rank said
              2. manifest.json, synced; the directory, synced
              3. rename to step-00000120; the run's directory, synced
              4. COMMITTED, written and synced under another name, renamed; the directory, synced      <- the commit
              5. `latest`, in the same way; a hint only
    prune     of all but the last `keep`: the marker first, synced, then the files

A process may die between any two of these. Before 4 there is no checkpoint; after 4 there is one. The leftovers of dead
saves and dead prunes have no marker. The next save removes them, if every file in them is one that a save makes. The
lock (flock, which dies with its process) keeps a second job from taking a living save for a dead one.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from fzero.checkpoint import manifest as records
from fzero.checkpoint.manifest import LATEST, MANIFEST, MARKER, MARKER_BYTES, Manifest
from fzero.disk.calls import Disk
from fzero.errors import CheckpointError, CorruptError

log = logging.getLogger("fzero")
LOCK = ".lock"
TEMPORARY = re.compile(r"\.tmp-step-[0-9]{8,19}-[0-9a-f]{8}")
OURS = re.compile(rf"shard-[0-9]{{5,7}}\.safetensors|{re.escape(MANIFEST)}|{MARKER}|\.{MARKER}")


# --- finding --------------------------------------------------------------------------------------------------------


def committed(run: Path, disk: Disk | None = None) -> Iterator[tuple[int, Path]]:
    """Yields (step, directory) of every committed checkpoint of a run, the newest first.

    run: its directory. disk: the calls that read files, for tests. A checkpoint is committed if its marker fits its
    manifest. Others with a marker are logged and passed over.
    """
    disk = disk or Disk()
    for step, path in sorted(_steps(run, disk, links=True), reverse=True):
        if disk.size(path / MARKER) is None:
            continue
        try:
            data = disk.read(path / MANIFEST, limit=records.MAX_MANIFEST)
            marker = disk.read(path / MARKER, limit=MARKER_BYTES)
        except CorruptError as error:
            log.warning("fzero: %s: this checkpoint is passed over", error)
            continue
        if marker == records.marker_of(data):
            yield step, path
        else:
            log.warning("fzero: %s: its marker is not that of its %s: it is passed over", path, MANIFEST)


def begun(run: Path, disk: Disk) -> bool:
    """Whether a run has a checkpoint to resume from. Raises CorruptError if it had some, and all are damaged."""
    if any(committed(run, disk)):
        return True
    for _, path in _steps(run, disk, links=True):
        if disk.size(path / MARKER) is not None:
            raise CorruptError(
                path, "is damaged, and no other checkpoint is left: mend it, or move it away to begin a new run"
            )
    return False


def _steps(run: Path, disk: Disk, *, links: bool = False) -> Iterator[tuple[int, Path]]:
    """Yields (step, path) of the directories with the name of a step. links: also of links to some, which are read (a
    user has moved a step to another disk) and never removed."""
    for name in disk.names(run) or []:
        step = records.step_of(name)
        if step is not None and disk.is_directory(run / name, links=links):
            yield step, run / name


def locate(directory: str | os.PathLike[str], disk: Disk | None = None) -> Path:
    """Returns the checkpoint that a directory stands for: itself if it holds a manifest, or the newest committed one of
    a run.

    directory: of a run or of a step. disk: the calls that read files, for tests. Raises CheckpointError if there is
    none.
    """
    disk = disk or Disk()
    path = Path(directory)
    if path.is_file():
        raise CheckpointError(path, "is a file: give the directory of a step or of a run, which fzero.save makes")
    names = disk.names(path)
    if names is None:
        raise CheckpointError(path, "there is no such directory")
    if MANIFEST in names or MARKER in names:
        return path
    newest = next(committed(path, disk), None)
    if newest is None:
        started = [name for name in names if records.step_of(name) is not None or TEMPORARY.fullmatch(name)]
        more = f" ({', '.join(started[:3])} began and did not end)" if started else _other_format(names)
        raise CheckpointError(path, f"holds no committed checkpoint{more}")
    return newest[1]


def _other_format(names: Collection[str]) -> str:
    """What to do with a folder of these names, if others wrote it."""
    if "fzero" in names and "trainer_state.json" in names:
        return ": a Trainer wrote it. Give its folder 'fzero', or resume_from_checkpoint= to the Trainer"
    if ".metadata" in names:
        return ": torch.distributed.checkpoint wrote it. Give fzero.init(fzero.interop.dcp(folder, like=params), spec)"
    if any(name.endswith(".safetensors") for name in names):
        return ", but safetensors. Give fzero.init(fzero.interop.safetensors(folder, like=params), spec)"
    if any(name.startswith(("zero_pp_rank_", "mp_rank_", "global_step")) for name in names):
        return ": DeepSpeed wrote it. Import it first: fzero import-deepspeed FOLDER RUN"
    return ""


# --- writing --------------------------------------------------------------------------------------------------------


def prepare(run: Path, step: int, nbytes: int, token: str, disk: Disk) -> tuple[Path, Callable[[], None]]:
    """Returns (the empty directory for the shards, the function that releases the lock). Raises CheckpointError."""
    make_directories(run, disk)
    release = disk.lock(run / LOCK)
    if release is None:
        raise CheckpointError(
            run,
            "another save into this directory is at work: give every run a directory of its own. Is it this run's "
            "Checkpointer, save by saver.save(state), which waits for it",
        )
    try:
        clean(run, disk)
        final = run / records.step_name(step)
        if final.name in (disk.names(run) or []) and disk.size(final / MARKER) is None:
            raise CheckpointError(final, "is there already and is no checkpoint of fzero: move it away")
        room = disk.free(run)
        if room is not None and room < nbytes:
            raise CheckpointError(
                run,
                f"needs {nbytes:,} bytes and the disk has {room:,}: free some space, keep fewer (keep=), or save "
                "to another directory",
            )
        temporary = run / f".tmp-{records.step_name(step)}-{token}"
        disk.mkdir(temporary)
    except BaseException:
        release()
        raise
    return temporary, release


def make_directories(path: Path, disk: Disk) -> None:
    """Makes a directory and those above it, as far as they are missing."""
    missing = []
    for folder in (path, *path.parents):
        if disk.names(folder) is not None:
            break
        missing.append(folder)
    for folder in reversed(missing):
        try:
            disk.mkdir(folder)
        except CheckpointError as error:
            if disk.names(folder) is None:  # else somebody else has just made it
                raise error
        disk.sync_directory(folder.parent)


def clean(run: Path, disk: Disk) -> None:
    """Removes the leftovers of dead saves: temporary directories, and steps without a marker.

    A leftover that cannot be removed is logged.
    """
    dead = [run / name for name in disk.names(run) or [] if TEMPORARY.fullmatch(name) and disk.is_directory(run / name)]
    dead += [path for _, path in _steps(run, disk) if disk.size(path / MARKER) is None]
    for path in dead:
        try:
            remove(path, disk)
        except CheckpointError as error:
            log.warning("fzero: what a dead save left stays: %s", error)
    if disk.size(run / f".{LATEST}") is not None:
        disk.unlink(run / f".{LATEST}")


def remove(directory: Path, disk: Disk) -> None:
    """Removes a checkpoint's directory, its marker first. A directory with a file that no save makes is left alone, and
    so is a link."""
    names = disk.names(directory) or []
    if not disk.is_directory(directory) or not all(OURS.fullmatch(name) for name in names):
        return
    if MARKER in names:
        disk.unlink(directory / MARKER)
        disk.sync_directory(directory)
    for name in names:
        if name != MARKER:
            disk.unlink(directory / name)
    disk.rmdir(directory)


def commit(run: Path, temporary: Path, manifest: Manifest, disk: Disk) -> Path:
    """Makes the shards in `temporary` the checkpoint of `manifest`. Returns its directory; raises CheckpointError.

    A step that is there already is left as it is: the same contents are the same checkpoint, others are an error. A
    damaged step is moved out of the way.
    """
    check_shards(temporary, manifest, disk)
    data = manifest.to_bytes()
    final = run / records.step_name(manifest.step)
    if len(data) > records.MAX_MANIFEST:  # nobody would read it
        raise CheckpointError(
            final,
            f"needs a manifest of {len(data):,} bytes, at most {records.MAX_MANIFEST:,} are allowed: save less extra",
        )
    if disk.size(final / MARKER) is not None:
        if _is_whole(final, disk):
            _check_same(final, manifest, disk)
            remove(temporary, disk)
            return final
        aside = run / f"{final.name}.damaged-{os.urandom(4).hex()}"
        log.warning("fzero: %s is damaged: it is saved again, and what was there is now %s", final, aside)
        disk.rename(final, aside)
    disk.write(temporary / MANIFEST, data)
    disk.sync_directory(temporary)
    disk.rename(temporary, final)
    disk.sync_directory(run)
    replace(final, MARKER, records.marker_of(data), disk)
    return final


def check_shards(directory: Path, manifest: Manifest, disk: Disk) -> None:
    """Raises CheckpointError unless every shard is visible here, and as long as the rank that wrote it said."""
    for number, shard in enumerate(manifest.shards):
        file = directory / records.shard_name(number)
        size = disk.size(file)
        if size is None:
            raise CheckpointError(
                file,
                f"rank {number} has written it, and rank 0 does not see it: save to a directory on a file system "
                "that all machines share",
            )
        if size != shard.bytes:
            raise CheckpointError(file, f"rank {number} has written {shard.bytes:,} bytes, the file has {size:,}")


def _is_whole(directory: Path, disk: Disk) -> bool:
    """Whether a step is complete, as far as can be seen without reading its tensors."""
    try:
        shards = records.read(directory, disk).shards
    except CorruptError:
        return False
    return all(disk.size(directory / records.shard_name(i)) == shard.bytes for i, shard in enumerate(shards))


def _check_same(final: Path, manifest: Manifest, disk: Disk) -> None:
    """Raises CheckpointError unless the step that is there holds the same: by which program and releases, and where
    leaves lay between two saves, is no content. Slices of other ranks are not compared."""
    saved = records.read(final, disk)
    if _content(saved) == _content(manifest):
        return
    what = "with other contents"
    if _slices(saved) != _slices(manifest):
        what = f"over the mesh {dict(saved.mesh)}, in other slices, so that the two were not compared"
    raise CheckpointError(
        final,
        f"this step is saved here already, {what}: it is kept as it is. After going back to an "
        "earlier step, save to a new directory, or remove the later steps first",
    )


def _slices(manifest: Manifest) -> tuple[object, ...]:
    return dict(manifest.mesh), [leaf.pieces for leaf in manifest.leaves]


def _content(manifest: Manifest) -> Manifest:
    leaves = tuple(dataclasses.replace(leaf, placement="") for leaf in manifest.leaves)
    return dataclasses.replace(manifest, program=None, versions={}, zero=0, leaves=leaves)


def replace(directory: Path, name: str, data: bytes, disk: Disk) -> None:
    """Writes a file of this name and content, atomically: it is as it was, or whole and on the disk."""
    disk.write(directory / f".{name}", data)
    disk.rename(directory / f".{name}", directory / name)
    disk.sync_directory(directory)


def finish(run: Path, final: Path, keep: int | None, disk: Disk) -> None:
    """Writes `latest`, and removes all but the newest `keep` checkpoints; this one always stays.

    The checkpoint is safe by now. So a failure here is logged, and the next save tries again.
    """
    try:
        replace(run, LATEST, f"{final.name}\n".encode(), disk)
        newest = next(committed(run, disk), (0, final))[1]  # of an earlier run in the same directory?
        if newest.name > final.name:
            log.warning("fzero: %s is saved, but %s is newer: it is what a load of this run takes", final, newest)
        if keep is not None:
            others = [path for _, path in committed(run, disk) if path != final]
            for path in reversed(others[keep - 1 :]):
                remove(path, disk)
    except CheckpointError as error:
        log.warning("fzero: %s is committed, but clearing up after it failed: %s", final, error)


def undo(run: Path, step: int, temporary: Path, disk: Disk) -> None:
    """Frees the space after a failure that all ranks know of, as far as the disk still works."""
    for path in (temporary, run / records.step_name(step)):
        try:
            if disk.names(path) is not None and disk.size(path / MARKER) is None:
                remove(path, disk)
        except CheckpointError as error:
            log.warning("fzero: leftovers of a failed save stay until the next one: %s", error)
