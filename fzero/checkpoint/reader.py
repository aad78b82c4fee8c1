"""reader: a committed checkpoint as a source.

The wanted bytes of a shard are sorted by the blocks of 4 MiB in which it is hashed. Each block that is needed is read
once and verified. Its bytes go straight into place if a few wants make up all of it, otherwise by way of 4 MiB of
scratch. A few threads do this at a time, since reading and hashing release the interpreter. So a load takes, beside the
state, 4 MiB for each of them and the header of one shard.

A leaf that lay in other parts by its dims than now is read in batches of 64 MiB and rearranged in memory
(`fzero.state.source.batches`). The parts of the file that cover a batch are read, and the blocks at its edges again by
the next batch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from fzero import backend, progress
from fzero.checkpoint import shards
from fzero.checkpoint.manifest import BLOCK, Manifest, ShardRecord, read, shard_name
from fzero.comm.launcher import usable_cores
from fzero.disk.calls import Disk
from fzero.errors import CorruptError
from fzero.state.source import Batch, Entry, Source, Want, batches

MAX_THREADS = 8
MAX_VIEWS = 8  # reads of one block; more are slower than one read and the copies


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes of a shard from `start` on, and their destination `out`, 1-D uint8."""

    start: int
    out: torch.Tensor

    @property
    def stop(self) -> int:
        """The byte after the last."""
        return self.start + len(self.out)


Need = tuple[str, int, torch.Tensor]  # of one shard: a leaf's path, the first element of its piece there, where to


class Checkpoint(Source):
    """One step's directory as a source. Nothing changes after it is made, but headers that were read are kept.

    Raises CorruptError, which names the file, when it is made or while it is read.
    """

    def __init__(self, directory: Path, disk: Disk | None = None) -> None:
        self.directory, self.disk = directory, disk or Disk()
        self.manifest: Manifest = read(directory, self.disk)
        self._known: dict[int, dict[str, int]] = {}  # by shard, the byte at which each tensor starts, once it was read

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.manifest.step

    @cached_property
    def digest(self) -> str:
        """A text that differs between checkpoints with different content."""
        text = repr((self.manifest.leaves, [shard.sha256 for shard in self.manifest.shards]))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @cached_property
    def leaves(self) -> Mapping[str, Entry]:
        """The leaves by path; see `Source`."""
        return {leaf.path: Entry(leaf.shape, leaf.dtype, leaf.per_rank) for leaf in self.manifest.leaves}

    def read(self, path: str, start: int, stop: int) -> torch.Tensor:
        """Returns elements [start, stop) of a flattened leaf, 1-D."""
        out = torch.empty(stop - start, dtype=self.leaves[path].dtype)
        self.fill([Want(path, start, out)])
        return out

    def check(self, wants: Sequence[Want]) -> None:
        """Raises CorruptError unless every shard that is needed is there, and as long as when it was committed."""
        for number in sorted({number for batch in self._batches(wants) for number in self._needs(batch.wants)}):
            shard, file = self.manifest.shards[number], self.file(number)
            size = self.disk.size(file)
            if size is None:
                raise CorruptError(file, "is missing")
            if size != shard.bytes:
                raise CorruptError(
                    file, f"has {size:,} bytes, {shard.bytes:,} were committed: it is truncated or other"
                )

    def fill(self, wants: Iterable[Want]) -> None:
        """Reads, verifies and writes every wanted range into its tensor. Raises CorruptError."""
        wants = list(wants)
        nbytes = sum(want.out.numel() * want.out.dtype.itemsize for want in wants)
        with progress.shown(f"reading {self.directory}", nbytes, "B") as work:
            for batch in self._batches(wants):
                self._fill(self._needs(batch.wants), work)
                batch.finish()

    def _batches(self, wants: Iterable[Want]) -> Iterator[Batch]:
        """The wants in the order in which each leaf is stored."""
        return batches(wants, lambda path: self.manifest.by_path[path].order)

    def _fill(self, needs: Mapping[int, Sequence[Need]], work: progress.Work) -> None:
        """Reads and verifies ranges of shards."""
        scratch: SimpleQueue[torch.Tensor] = SimpleQueue()
        threads = _num_threads()
        for _ in range(threads):
            scratch.put(torch.empty(BLOCK, dtype=torch.uint8))
        with ThreadPoolExecutor(threads) as pool:
            for number in sorted(needs):
                _run(pool if threads > 1 else None, self._jobs(number, needs[number], scratch, work))

    def file(self, shard: int) -> Path:
        """Returns the path of a shard."""
        return self.directory / shard_name(shard)

    def _needs(self, wants: Iterable[Want]) -> dict[int, list[Need]]:
        """By shard: the wanted ranges of its pieces. The wants are in the order in which the leaf is stored."""
        needs: dict[int, list[Need]] = {}
        for want in wants:
            stop = want.start + len(want.out)
            for piece in self.manifest.by_path[want.path].pieces:
                first, last = max(piece.start, want.start), min(piece.stop, stop)
                if first < last:
                    out = want.out[first - want.start : last - want.start]
                    needs.setdefault(piece.shard, []).append((want.path, first - piece.start, out))
        return needs

    # --- one shard

    def _jobs(
        self, number: int, needs: Sequence[Need], scratch: SimpleQueue[torch.Tensor], work: progress.Work
    ) -> list[Callable[[], None]]:
        """Returns one call for each block that is needed. The ranges in the header's blocks are filled here."""
        file, shard = self.file(number), self.manifest.shards[number]
        head = torch.empty(0, dtype=torch.uint8)
        if number not in self._known:
            head, self._known[number] = self._header(number)
        places = self._known[number]
        parts: list[Wanted] = []
        for path, first, out in needs:
            parts.append(Wanted(places[path] + first * out.dtype.itemsize, out.view(torch.uint8)))
        jobs: list[Callable[[], None]] = []
        for index, inside in sorted(_by_block(parts).items()):
            if index * BLOCK < len(head):
                for part, start, stop in inside:
                    part.out[start - part.start : stop - part.start].copy_(head[start:stop])
            else:
                jobs.append(partial(_block, self.disk, file, shard, index, inside, scratch, work))
        return jobs

    def _header(self, number: int) -> tuple[torch.Tensor, dict[str, int]]:
        """Returns (the blocks that hold the header, the byte at which each tensor starts)."""
        file, shard = self.file(number), self.manifest.shards[number]
        head = _verified(self.disk, file, shard, 0, [torch.empty(min(BLOCK, shard.bytes), dtype=torch.uint8)])
        base = shards.header_bytes(bytes(head[:8].tolist()), shard.bytes, file)
        if base > len(head):
            head = torch.cat(
                [head, torch.empty(min(-(-base // BLOCK) * BLOCK, shard.bytes) - len(head), dtype=torch.uint8)]
            )
            for index in range(1, -(-base // BLOCK)):
                _verified(self.disk, file, shard, index, [head[index * BLOCK : (index + 1) * BLOCK]])
        tensors = shards.places(head[8:base].numpy().tobytes(), shard.bytes, file)
        if len(tensors) != len(self._pieces[number]):
            raise CorruptError(file, f"holds {len(tensors)} tensors, the manifest says {len(self._pieces[number])}")
        starts = {}
        for path, (dtype, numel) in self._pieces[number].items():
            place = tensors.get(shards.key_of(path))
            if (
                place is None
                or place.dtype != shards.NAMES[dtype]
                or place.stop - place.start != numel * dtype.itemsize
            ):
                raise CorruptError(
                    file, f"does not hold {numel:,} elements of {dtype} of {path!r}, as the manifest says"
                )
            starts[path] = place.start
        return head, starts

    @cached_property
    def _pieces(self) -> list[dict[str, tuple[torch.dtype, int]]]:
        """By shard: the dtype and number of elements of every piece that the manifest lists."""
        by_shard: list[dict[str, tuple[torch.dtype, int]]] = [{} for _ in self.manifest.shards]
        for leaf in self.manifest.leaves:
            for piece in leaf.pieces:
                by_shard[piece.shard][leaf.path] = leaf.dtype, piece.stop - piece.start
        return by_shard


def _by_block(parts: Iterable[Wanted]) -> dict[int, list[tuple[Wanted, int, int]]]:
    """By block: the parts that reach into it, with the bytes [start, stop) of the file that each takes from it."""
    by_block: dict[int, list[tuple[Wanted, int, int]]] = {}
    for part in parts:
        for index in range(part.start // BLOCK, -(-part.stop // BLOCK)):
            start, stop = max(part.start, index * BLOCK), min(part.stop, (index + 1) * BLOCK)
            by_block.setdefault(index, []).append((part, start, stop))
    return by_block


def _block(
    disk: Disk,
    file: Path,
    shard: ShardRecord,
    index: int,
    inside: Sequence[tuple[Wanted, int, int]],
    scratch: SimpleQueue[torch.Tensor],
    work: progress.Work,
) -> None:
    """Reads a block and copies its bytes to their destinations."""
    low, high = index * BLOCK, min((index + 1) * BLOCK, shard.bytes)
    inside = sorted(inside, key=lambda row: row[1])
    outs = [part.out[start - part.start : stop - part.start] for part, start, stop in inside]
    work.advance(sum(map(len, outs)))
    if len(outs) <= MAX_VIEWS and sum(map(len, outs)) == high - low and all(backend.of(x.device).on_host for x in outs):
        _verified(disk, file, shard, index, outs)
        return
    room = scratch.get()
    try:
        block = _verified(disk, file, shard, index, [room[: high - low]])
        for out, (_, start, stop) in zip(outs, inside, strict=True):
            out.copy_(block[start - low : stop - low])
    finally:
        scratch.put(room)


def _verified(disk: Disk, file: Path, shard: ShardRecord, index: int, outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reads a block into `outs`, one after the other, and checks its digest. Returns the first of `outs`."""
    digest = hashlib.sha256()
    start = place = index * BLOCK
    for out in outs:
        array: Any = out.numpy()
        view = memoryview(array)
        disk.read_into(file, place, view)
        digest.update(view)
        place += len(view)
    if digest.hexdigest() != shard.blocks[index]:
        raise CorruptError(
            file, f"is damaged: bytes {start:,} to {place:,} are not those that were committed (SHA-256)"
        )
    return outs[0]


def _num_threads() -> int:
    """This process's share of the machine's cores."""
    return max(1, min(MAX_THREADS, usable_cores() // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)))


def _run(pool: ThreadPoolExecutor | None, jobs: Sequence[Callable[[], None]]) -> None:
    """Runs the jobs. The first error stops those that have not begun."""
    if pool is None:
        for job in jobs:
            job()
        return
    futures = [pool.submit(job) for job in jobs]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
    wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
