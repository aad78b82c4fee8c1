"""group: the process group of a run.

`lines` makes a smaller group for each axis of a mesh.

`open_world` joins the default process group. Under torchrun it starts the group: gloo for states on the CPU, nccl for
states on CUDA. A torchrun agent keeps one store over all restarts of a job. So each start uses a part of that store
that no earlier start has used (`fzero.comm.store_prefix`). Ranks that do not come are found in the store, and named.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fzero import backend
from fzero.comm import heartbeat, launcher, store_prefix
from fzero.comm.hang_report import not_come
from fzero.errors import HangError, LimitError, SpecError
from fzero.ir.mesh import PIPELINE, Mesh

TIMEOUT_SECONDS = 600.0  # torch's default for nccl
FILES = 48  # what a rank opens beside a socket to each other rank: the store, listeners, modules of torch
AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun's variable: its agent holds the store


def open_world(device: str, timeout_seconds: float | None = None) -> tuple[int, int]:
    """Returns (rank, world size) of this process. Collective if there are several ranks.

    An existing default process group is used as it is. Otherwise, under torchrun, this starts one: nccl if `device` is
    CUDA, else gloo. `timeout_seconds` is the timeout of the new group; None means TIMEOUT_SECONDS.

    Raises SpecError in three cases: the existing group has the wrong backend for `device`; this torch was built without
    torch.distributed; or a launcher started several tasks and did not give each a RANK (`fzero.comm.launcher`). Raises
    HangError, which names the missing, if not all ranks come.
    """
    if dist.is_available() and dist.is_initialized():
        given, needed = str(dist.get_backend()), backend.of(device).group
        if given in ("nccl", "gloo") and given != needed:
            raise SpecError(f"the default process group is {given}, a state on {device} needs {needed}")
        return _here()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        if not dist.is_available():
            raise SpecError("WORLD_SIZE is set, but this torch was built without torch.distributed")
        _start(backend.of(device).group, timeout_seconds or TIMEOUT_SECONDS)
        return _here()
    launcher.check(os.environ)
    return 0, 1


@dataclass(frozen=True)
class Line:
    """The ranks that differ from this one on one axis of a mesh alone.

    place: this rank's coordinate on the axis. ranks: the ranks of the world by coordinate. group: their process group
    (None: the default group). back: on CUDA, a second one for messages to lower coordinates: NCCL runs what one
    communicator carries in order, and so a message up would wait for one down.
    """

    place: int = 0
    ranks: tuple[int, ...] = (0,)
    group: Any = None
    back: Any = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @staticmethod
    def whole(rank: int, world_size: int) -> Line:
        """The line of a mesh with one axis, over the default group."""
        return Line(rank, tuple(range(world_size)))


def lines(mesh: Mesh, rank: int, device: torch.device, presence: heartbeat.Presence) -> dict[str, Line]:
    """The lines of a rank, by axis, of the axes with several ranks, and of all data axes as one. Collective: all ranks
    make the groups of all lines.

    A wait in one of the groups is a wait of `presence`.
    """
    patience = timedelta(seconds=presence.timeout_seconds)
    library = backend.of(device).group
    found: dict[str, Line] = {}
    axes = dict.fromkeys([*mesh.names, mesh.data_axes])
    for axis, size in ((axis, mesh.size(axis)) for axis in axes):
        wanted = (size < mesh.world_size, library == "nccl" and axis == PIPELINE)
        for first in (r for r in range(mesh.world_size) if size > 1 and not mesh.coordinate(r, axis)):
            ranks = mesh.peers(first, axis)
            group, back = (dist.new_group(ranks, backend=library, timeout=patience) if new else None for new in wanted)
            if rank in ranks:
                found[axis] = Line(mesh.coordinate(rank, axis), tuple(ranks), group, back)
                for made in filter(None, (group, back)):
                    presence.joins(made)
    return found


def _start(library: str, seconds: float) -> None:
    """Starts the default process group, in a fresh part of the store. Raises HangError for ranks that do not come."""
    _check_files(int(os.environ["WORLD_SIZE"]))
    timeout, rank, world_size = timedelta(seconds=seconds), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    holder = [] if os.environ.get(AGENT) == "True" else [0]
    store = None
    try:
        store = store_prefix.prefixed(_store(rank, world_size, timeout), rank, world_size, seconds)
        dist.init_process_group(library, timeout=timeout, store=store, rank=rank, world_size=world_size)
        store.set(f"came/{rank}", "")
    except HangError:
        raise
    except RuntimeError as error:  # torch names an address or a key, and no rank
        cause = heartbeat.SOURCE.sub("", str(error).strip()).partition("\n")[0].rstrip(".")
        missing = holder if store is None else _missing(store, rank, world_size, holder)
        raise not_come(rank, world_size, missing, seconds, cause) from error


def _check_files(world_size: int) -> None:
    """Raises LimitError if this process may not open the files and sockets that a world of this size takes at least."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = FILES + world_size
    if limit == resource.RLIM_INFINITY or not os.path.isdir("/proc/self/fd"):
        return
    held = len(os.listdir("/proc/self/fd"))
    if limit - held < needed:
        raise LimitError(
            f"this process may have {limit:,} files and sockets open and has {held:,}; {world_size} ranks need "
            f"{needed:,} more at least: raise the limit, as by `ulimit -n {max(4096, 4 * (held + needed))}` before the "
            "ranks start"
        )


def _store(rank: int, world_size: int, timeout: timedelta) -> Any:
    """torchrun's store, or that of rank 0. It waits for nobody but its holder: who is missing is found in it."""
    if os.environ.get(AGENT) == "True":
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    lacks = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if lacks:
        raise SpecError(f"RANK and WORLD_SIZE are set, {' and '.join(lacks)} not: start the ranks with torchrun")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, world_size, rank == 0, timeout, wait_for_workers=False, multi_tenant=True)


def _missing(store: Any, rank: int, world_size: int, holder: list[int]) -> list[int]:
    """The ranks without a word soon after this one could not start the process group; the store's holder, if it does
    not answer. Rank 0, which may be that, lets the others read."""
    seconds = heartbeat.ANSWER_SECONDS
    try:
        store.set(f"came/{rank}", "")
        keys = {f"came/{r}": r for r in range(world_size)}
        missing = [keys[key] for key in store_prefix.wait_for_keys(store, [*keys], seconds)]
        store.set(f"told/{rank}", "")
        if rank == 0:
            told = [f"told/{r}" for r in range(world_size) if r not in missing]
            store_prefix.wait_for_keys(store, told, seconds)
        return missing
    except RuntimeError:
        return holder


def _here() -> tuple[int, int]:
    """Returns (rank, world size) in the default group. With gloo, the presence is made here, at the same call on all
    ranks."""
    if dist.get_backend() == "gloo":
        heartbeat.of()
    return dist.get_rank(), dist.get_world_size()
