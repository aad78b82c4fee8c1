"""ranks: how the ranks of a save exchange notes. Bytes over gloo; every round ends in the same way on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fzero.checkpoint.strict import dump, parse
from fzero.comm import heartbeat
from fzero.errors import CheckpointError, DisagreementError


@dataclass(frozen=True)
class Ranks:
    """This rank among those of `group` (gloo; None: the default group).

    place: the directory that errors name if they know no other.
    """

    rank: int
    world_size: int
    group: Any
    place: str

    def round(self, doing: str, call: Callable[[], Any]) -> list[Any]:
        """Runs `call` on this rank, and returns its results (JSON) on all ranks, by rank. Collective.

        If it failed on some rank, every rank raises CheckpointError that names the ranks and the file. A rank whose own
        error is not a CheckpointError raises that error.
        """
        failure: BaseException | None = None
        try:
            note = [True, call()]
        except BaseException as error:  # sent to the others before it is raised here
            failure = error
            known = isinstance(error, CheckpointError)
            file, text = (error.file, error.text) if known else (self.place, f"{type(error).__name__}: {error}")  # type: ignore[attr-defined]
            note = [False, file.encode(errors="replace").decode(), text.encode(errors="replace").decode()]
        if self.world_size == 1:
            if failure is not None:
                raise failure
            return [note[1]]
        if failure is not None and not isinstance(failure, CheckpointError):
            self._tell_of(failure, doing, note)
        notes = [parse(data) for data in self.exchange(doing, dump(note))]
        failed = [(rank, other[1], other[2]) for rank, other in enumerate(notes) if not other[0]]
        if failed:
            text = "; ".join(f"rank {rank} failed while {doing}: {reason}" for rank, _, reason in failed)
            raise CheckpointError(failed[0][1], text, getattr(failure, "errno", None)) from failure
        return [result for _, result in notes]

    def _tell_of(self, failure: BaseException, doing: str, note: list[Any]) -> None:
        """Sends a failure to the others, and raises it as it is: it is no CheckpointError."""
        try:
            self.exchange(doing, dump(note))
        except CheckpointError:
            raise failure from None
        raise failure

    def same(self, doing: str, call: Callable[[], dict[str, str]]) -> None:
        """Raises DisagreementError on every rank if the values of `call` differ; it names the ranks. Collective."""
        notes = self.round(doing, call)
        for name in notes[0]:
            if len({note[name] for note in notes}) > 1:
                shown = "; ".join(f"rank {rank}: {note[name]}" for rank, note in enumerate(notes))
                raise DisagreementError(
                    f"{self.place}: the ranks save different things: {name} is not the same ({shown}). Call fzero.save "
                    "on all of them after the same step, with the same arguments"
                )

    def exchange(self, doing: str, local: bytes) -> list[bytes]:
        """Returns the bytes of all ranks, by rank. Collective. Raises CheckpointError if a rank is lost."""
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([len(local)]), group=self.group)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(local)] = torch.frombuffer(bytearray(local), dtype=torch.uint8)
            rows = [torch.empty_like(padded) for _ in range(self.world_size)]
            dist.all_gather(rows, padded, group=self.group)
        except RuntimeError as error:
            presence = heartbeat.made(self.group)
            reason = str(error).split("\n", 1)[0] if presence is heartbeat.ALONE else presence.lost(error)
            raise CheckpointError(self.place, f"a rank was lost while {doing}: {reason}") from error
        return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
