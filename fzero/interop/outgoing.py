"""outgoing: reads the leaves of a state or a checkpoint, one at a time, to write them to files of other formats.

Of a live state every rank sends its part of the leaf to rank 0, straight into place if it lies together there. Beside
its shards no rank holds more than that leaf, and one part that is scattered in it (`tp` over an inner dim). A
checkpoint's directory, or another `Source`, is read by this process alone. If rank 0 fails (a full disk), all ranks
learn it at the end. Until then rank 0 receives the parts of the others, so that none of them waits for ever.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from fzero import progress, tree
from fzero.checkpoint.commit import locate
from fzero.checkpoint.reader import Checkpoint
from fzero.comm.agree import agree
from fzero.disk.calls import Disk
from fzero.errors import TreeError
from fzero.interop.file_places import directory
from fzero.plan.state_plan import Leaf
from fzero.session.session import session_of
from fzero.state import storage
from fzero.state.order import split_like
from fzero.state.source import Entry, Source
from fzero.state.state import ShardedTensor, State

Given = State | Source | str | Path
Body = Callable[[Path, Callable[[str], torch.Tensor]], None]


class Outgoing(Protocol):
    """Leaves on their way out."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The leaves by path below the part."""
        ...

    def write(self, order: Sequence[str], folder: Path, body: Body, disk: Disk) -> None:
        """On rank 0, `body(directory, take)` fills a directory that then becomes `folder`.

        `take(path)` returns a whole leaf in host memory. Leaves are taken in `order`."""
        ...


def outgoing(given: Given, part: str) -> Outgoing:
    """Returns the leaves of a state, a directory or a source, to be read one at a time. Raises TreeError if `part` has
    no leaves."""
    if isinstance(given, State):
        return Live(given, part)
    if isinstance(given, (str, Path)):
        given = Checkpoint(locate(given))
    if not isinstance(given, Source):
        raise TreeError(
            f"{type(given).__name__} cannot be exported: needed a State, a checkpoint's directory or a Source"
        )
    return Stored(given, part)


class Stored:
    """The leaves of a source, read by this process alone. Nothing in it changes."""

    def __init__(self, source: Source, part: str) -> None:
        self.source, self.paths = source, _below(list(source.leaves), part)
        self.entries = {short: source.leaves[path] for short, path in self.paths.items()}

    def write(self, order: Sequence[str], folder: Path, body: Body, disk: Disk) -> None:
        """See `Outgoing.write`."""
        with directory(folder, disk) as place, progress.shown(f"writing {folder}", _bytes(self, order), "B"):
            body(place, self._whole)

    def _whole(self, path: str) -> torch.Tensor:
        entry = self.entries[path]
        progress.advance(_bytes(self, [path]))
        return self.source.read(self.paths[path], 0, math.prod(entry.shape)).view(entry.shape)


class Live:
    """The leaves of a state. Every method is a collective. Nothing in it changes."""

    def __init__(self, state: State, part: str) -> None:
        self.runtime = session_of(state)
        by_path: dict[str, ShardedTensor] = {
            leaf.leaf.path: leaf for leaf in tree.flatten(state.tree)[1] if isinstance(leaf, ShardedTensor)
        }
        self.leaves = {short: by_path[path] for short, path in _below(list(by_path), part).items()}
        self.entries = {short: Entry(tuple(leaf.shape), leaf.dtype) for short, leaf in self.leaves.items()}

    def write(self, order: Sequence[str], folder: Path, body: Body, disk: Disk) -> None:
        """See `Outgoing.write`. Raises the error of rank 0 on all ranks."""
        failure: Exception | None = None
        try:
            for path in order:
                self.leaves[path].life.check(self.leaves[path].path)
                if self.leaves[path].leaf.per_rank:
                    raise TreeError(f"{path!r} is one per rank (fzero.per_rank): no file of others has a place for it")
        except Exception as error:
            failure = error
        asked = hashlib.blake2b(repr([*order, str(folder)]).encode(), digest_size=8).hexdigest()
        self._agree(f"an export to {folder}", asked, failure)
        left = iter(order)
        if self.runtime.rank == 0:

            def take(path: str) -> torch.Tensor:
                assert path == next(left)
                progress.advance(_bytes(self, [path]))
                return self._whole(self.leaves[path].leaf)

            try:
                with directory(folder, disk) as place, progress.shown(f"writing {folder}", _bytes(self, order), "B"):
                    body(place, take)
            except Exception as error:
                failure = error
        for path in left:
            self._whole(self.leaves[path].leaf)
        self._agree(f"the end of the export to {folder}", asked, failure)

    def _agree(self, call: str, digest: str, failure: Exception | None) -> None:
        agree(self.runtime.rank, self.runtime.world_size, call, digest, self.runtime.group, failure)

    def _whole(self, leaf: Leaf) -> torch.Tensor:
        """On rank 0 the leaf in host memory (no copy if it is whole there). Other ranks send and return their part."""
        here, plan = self.runtime, self.runtime.plan
        own = storage.local(plan, here.memory, leaf, here.rank).detach().cpu()
        holders = storage.holders(plan, leaf)
        if here.rank:
            if here.rank in holders and own.numel():
                dist.send(own.reshape(-1).view(torch.uint8), dst=0, group=here.group)
            return own
        if holders == [0]:
            return own
        whole, order = torch.empty(leaf.shape, dtype=leaf.dtype), storage.order(plan, leaf)
        for rank in holders:
            start, stop = storage.span(plan, leaf, rank)
            views = order.views(whole.view(-1), 0, start, stop)
            straight = len(views) == 1 and views[0].is_contiguous()
            part = views[0].view(-1) if straight else torch.empty(stop - start, dtype=leaf.dtype)
            if rank == 0:
                part.copy_(own.reshape(-1))
            elif part.numel():
                dist.recv(part.view(torch.uint8), src=rank, group=here.group)
            if not straight:
                for view, read in zip(views, split_like(part, views), strict=True):
                    view.copy_(read)
        return whole


def _bytes(leaves: Outgoing, paths: Sequence[str]) -> int:
    return sum(math.prod(leaves.entries[path].shape) * leaves.entries[path].dtype.itemsize for path in paths)


def _below(paths: Sequence[str], part: str) -> dict[str, str]:
    """{path below the part: path}; a part that is one leaf keeps its name."""
    if not part:
        return {path: path for path in paths}
    path_below = {path.removeprefix(part + "/"): path for path in paths if path.startswith(part + "/") or path == part}
    if not path_below:
        tops = sorted({path.split("/")[0] for path in paths})
        raise TreeError(f"part={part!r} has no leaves, the state has {', '.join(map(repr, tops))}: say which to export")
    return path_below
