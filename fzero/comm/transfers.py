"""transfers: how one rank's transfers run on torch.distributed.

p2p (gloo). Every transfer is built from `isend` and `irecv`. All-gather: each rank sends its slice to every other,
straight into place. Reduction: each rank sends slice r to rank r, which adds the slices of ranks 0..N-1 in that order
and divides once; "all" then gathers the slices. gloo's own reductions do not add in rank order, and cutting a buffer in
two changes their bits; here no world, bucket size or order of issue does, and it is faster. (N-1)/N of the buffer
travels per rank and direction. `all_reduce_small`, for scalars, sends everything to everyone.

shared (`fzero.comm.shared_memory`). The ranks of one machine read one another's memory; the same sums in the same
order.

nccl (CUDA). The library's collectives; bits are equal for the same algorithm and layout, no more.

Ranks issue the same transfers in the same order (verify sees to it), so a running number is the tag of each.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fzero.comm import heartbeat, launcher, store_prefix
from fzero.errors import DisagreementError, FzeroError, PeerError, SpecError
from fzero.ir.records import Op

TIMEOUT_SECONDS = 600.0  # what torch gives nccl


def open_world(device: str, timeout_seconds: float | None = None) -> tuple[int, int]:
    """(rank, world size). Under torchrun this starts gloo (CPU) or nccl (CUDA), with a timeout (None: TIMEOUT_SECONDS),
    unless a default group exists. Raises SpecError where a launcher started several tasks and none has a rank."""
    if dist.is_available() and dist.is_initialized():
        backend, needed = (
            str(dist.get_backend()),
            {"cuda": "nccl", "cpu": "gloo"}.get(torch.device(device).type, "gloo"),
        )
        if backend in ("nccl", "gloo") and backend != needed:
            raise SpecError(f"the default process group is {backend}, a state on {device} needs {needed}")
        return _here()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        if not dist.is_available():
            raise SpecError("WORLD_SIZE is set, but this torch was built without torch.distributed")
        backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        _start(backend, timeout_seconds or TIMEOUT_SECONDS)
        return _here()
    launcher.check(os.environ)
    return 0, 1


def _start(backend: str, seconds: float) -> None:
    """The default process group; under torchrun in a part of its store that no earlier start has used."""
    timeout = timedelta(seconds=seconds)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store = store_prefix.fresh(store, rank, world_size, seconds)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)


def _here() -> tuple[int, int]:
    if dist.get_backend() == "gloo":
        heartbeat.of()
    return dist.get_rank(), dist.get_world_size()


@dataclass
class Transfer:
    requests: list[Any]
    finish: Callable[[], None] = lambda: None
    keep: list[torch.Tensor] = field(default_factory=list)


# its name in 2.13.0, and in 2.11.0
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class P2P:
    """`handlers.Comm` from point-to-point messages on a process group. A wait that ends badly is a PeerError."""

    def __init__(self, rank: int, world_size: int, group: Any = None, here: heartbeat.Presence | None = None) -> None:
        self.rank, self.world, self.group, self.number = rank, world_size, group, 0
        self.presence = here or heartbeat.of(group)
        self.pending: dict[str, Transfer] = {}

    def ready(self, name: str) -> bool:
        return True

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        self.number += 2  # an all_reduce uses two tags
        read, written = tensors[: len(op.reads)], tensors[len(op.reads) :]
        if op.gathers:
            self.pending[name] = Transfer(self._gather(read[0].view(-1), written[0].view(-1), self.number))
        elif op.reduces:
            self.pending[name] = self._reduce(op, read[0].reshape(-1), written[0].view(-1), written[1])
        elif op.is_send:
            self.pending[name] = Transfer([self._send(read[0], op.peer, op.tag)])
        else:
            self.pending[name] = Transfer([self._recv(written[0], op.peer, op.tag)])

    def wait(self, name: str) -> None:
        transfer = self.pending.pop(name)
        self.presence.waits = True
        try:
            for request in transfer.requests:
                request.wait()
            transfer.finish()
        except FzeroError:
            raise
        except RuntimeError as error:
            raise PeerError(str(error)) from error
        finally:
            self.presence.waits = False

    def settle(self, name: str) -> None:
        """Nothing is left to do: when `wait` returned, the source had been sent."""

    def drain(self) -> None:
        """Ends what a step that failed has started, so that nothing arrives in memory of the next one."""
        for name in list(self.pending):
            self.wait(name)
            self.settle(name)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return dist.isend(tensor, peer, group=self.group, tag=tag)

    def _recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return dist.irecv(tensor, peer, group=self.group, tag=tag)

    def _others(self) -> list[int]:
        """The other ranks, the next one first, so that not everyone sends to rank 0 at once."""
        return [(self.rank + i) % self.world for i in range(1, self.world)]

    def _gather(self, own: torch.Tensor, whole: torch.Tensor, tag: int) -> list[Any]:
        parts = whole.view(self.world, -1)
        requests = [self._recv(parts[peer], peer, tag) for peer in self._others()]
        requests += [self._send(own, peer, tag) for peer in self._others()]
        if parts[self.rank].data_ptr() != own.data_ptr():
            parts[self.rank].copy_(own)
        return requests

    def _reduce(self, op: Op, source: torch.Tensor, dest: torch.Tensor, scratch: torch.Tensor) -> Transfer:
        """Phase 1 moves the parts; `finish` adds them in rank order, and for an all_reduce gathers the slices."""
        kind, tag = op.row, self.number
        others = self._others()
        parts = [source] * self.world if kind.small else list(source.view(self.world, -1))
        place = {peer: scratch[i].view(-1)[: parts[0].numel()] for i, peer in enumerate(others)}
        requests = [self._recv(place[peer], peer, tag) for peer in others]
        requests += [self._send(parts[peer], peer, tag) for peer in others]

        def finish() -> None:
            mine = dest.view(self.world, -1)[self.rank] if kind.changes_target else dest
            found = [parts[self.rank] if peer == self.rank else place[peer] for peer in range(self.world)]
            combine(op, found, mine)
            if kind.changes_target:
                for request in self._gather(mine, dest, tag + 1):
                    request.wait()

        return Transfer(requests, finish, [source, scratch])


def combine(op: Op, parts: Sequence[torch.Tensor], dest: torch.Tensor) -> None:
    """`dest` becomes the parts of ranks 0..N-1 added (or the largest taken) in this order, divided once."""
    join = torch.maximum if op.reduction == "max" else torch.add
    total, *others = parts
    for other in others:
        total = join(total, other, out=dest)
    if op.divisor != 1:
        dest.div_(op.divisor)


class Gloo(P2P):
    """The same, with gloo's own all-gather."""

    def _gather(self, own: torch.Tensor, whole: torch.Tensor, tag: int) -> list[Any]:
        whole, own = whole.view(torch.uint8), own.view(torch.uint8)  # gloo does not know every dtype
        return [all_gather_single(whole, own, group=self.group, async_op=True)]


class Nccl(P2P):
    """The same program on NCCL's collectives. Waiting puts an event on the compute stream; the host goes on."""

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        read, written = tensors[: len(op.reads)], tensors[len(op.reads) :]
        if op.gathers:
            work = all_gather_single(written[0].view(-1), read[0].view(-1), group=self.group, async_op=True)
            self.pending[name] = Transfer([work], keep=read)
        elif op.reduces:
            how = dist.ReduceOp.MAX if op.reduction == "max" else dist.ReduceOp.SUM
            dest = written[0]
            if op.row.scatters:
                work = dist.reduce_scatter_tensor(dest, read[0], op=how, group=self.group, async_op=True)
            else:
                dest.view(-1).copy_(read[0].reshape(-1))
                work = dist.all_reduce(dest, op=how, group=self.group, async_op=True)
            divisor = op.divisor

            def finish() -> None:
                if divisor != 1:
                    dest.div_(divisor)

            self.pending[name] = Transfer([work], finish, keep=read)
        else:
            super().start(name, op, tensors)


class Alone:
    """The comm of a world of one: a program for it has no transfers."""

    number = 0

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        raise DisagreementError(f"{op.kind} into {name} in a world of one")

    def ready(self, name: str) -> bool:
        return True

    def wait(self, name: str) -> None:
        raise KeyError(name)

    def settle(self, name: str) -> None:
        raise KeyError(name)

    def drain(self) -> None:
        """Nothing is ever in flight."""


NOTE_BYTES = 512


def tell(note: bytes, world_size: int, group: Any) -> list[bytes]:
    """Every rank's note, by rank, cut at NOTE_BYTES: one small all-gather over gloo."""
    mine = torch.zeros(NOTE_BYTES, dtype=torch.uint8, device="cpu")
    note = note[:NOTE_BYTES]
    mine[: len(note)] = torch.tensor(list(note), dtype=torch.uint8)
    return [bytes(t.tolist()).rstrip(b"\0") for t in gathered(mine, world_size, group)]


def gathered(mine: torch.Tensor, world_size: int, group: Any) -> list[torch.Tensor]:
    """Every rank's small tensor, by rank, over gloo. Raises HangError where one does not come."""
    here = heartbeat.of(group)
    theirs = [torch.empty_like(mine) for _ in range(world_size)]
    here.waits = True
    try:
        dist.all_gather(theirs, mine, group=group)
    except RuntimeError as error:
        raise here.lost(error) from error
    finally:
        here.waits = False
    return theirs


def agree(
    rank: int,
    world_size: int,
    what: str,
    digest: str,
    group: Any,
    failure: BaseException | None = None,
    says: int = 0,
    given: Callable[[], Mapping[str, str]] = dict,
) -> int:
    """One small fixed-size all-gather of (what, digest, failure, says), before any data moves.

    Returns the bits that any rank says. Raises DisagreementError on every rank where digests differ or another rank
    failed; re-raises `failure` on its own. Where digests differ, the error says first what differs of `given`.
    A collective call begins here: the caller ends it with `presence.of(group).leave()`, or it ends with the next.
    """
    here, heard = heartbeat.of(group), says
    try:
        if world_size > 1:
            here.enter(what)
            text = f"{type(failure).__name__}: {failure}" if failure is not None else ""
            note = f"{'!' if failure is not None else '='}{int(says)}\n{what}\n{digest}\n{text}"
            notes = tell(note.encode(), world_size, group)
            here.agreed = what
            if failure is None:
                parts = [note.decode(errors="replace").split("\n", 3) for note in notes]
                if len({part[1] for part in parts}) == 1 < len({part[2] for part in parts}) and not any(
                    part[0].startswith("!") for part in parts
                ):
                    _compare_given([_table(note) for note in tell(_text(given()), world_size, group)])
                _compare(rank, parts)
                heard = functools.reduce(operator.or_, (int(part[0][1:]) for part in parts))
        if failure is not None:
            raise failure
    except BaseException:
        here.leave()
        raise
    return heard


def _text(given: Mapping[str, str]) -> bytes:
    return "".join(f"{name}\t{value}\n" for name, value in given.items()).encode()


def _table(note: bytes) -> dict[str, str]:
    """What `_text` wrote, but for a last line that was cut."""
    lines = note.decode(errors="replace").split("\n")[:-1]
    return dict(line.split("\t", 1) for line in lines)


def _compare_given(tables: list[dict[str, str]]) -> None:
    for name, first in tables[0].items():
        for rank, table in enumerate(tables):
            other = table.get(name, first)
            if other == first:
                continue
            remedy = "Pad to a multiple that holds them all, or to the longest of all ranks (an all_reduce of the "
            remedy += (
                "length with MAX, before the step), and leave the padding out of the loss: fzero.Mean(total, count)"
            )
            shapes = first.partition("[")[0] == other.partition("[")[0] and "[" in first
            raise DisagreementError(
                f"{name} is {first} on rank 0, {other} on rank {rank}: a step needs batches of the same shapes, dtypes "
                f"and static values on all ranks{f'. {remedy}' if shapes else ''}"
            )


def _compare(rank: int, notes: list[list[str]]) -> None:
    failed = [(r, note[-1]) for r, note in enumerate(notes) if note[0].startswith("!")]
    if failed:
        raise DisagreementError("; ".join(f"rank {r} failed before {notes[rank][1]}: {text}" for r, text in failed))
    if len({(note[1], note[2]) for note in notes}) > 1:
        shown = "; ".join(f"rank {r}: {note[1]} of {note[2]}" for r, note in enumerate(notes))
        raise DisagreementError(
            f"the ranks do not run the same program ({shown}): give every rank the same spec, the same params and "
            "batches of one shape, as many threads (OMP_NUM_THREADS: sums round by them), and make the same calls on "
            "all of them (no .full() inside `if rank == 0`)"
        )
