"""ranks: what the ranks of a save tell one another. Bytes over gloo; every round ends alike on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fzero.checkpoint.strict import dump, parse
from fzero.errors import CheckpointError, DisagreementError


@dataclass(frozen=True)
class Ranks:
    """This rank among those of `group` (gloo; None: the default one). `place` is the directory that errors name when
    they know no better."""

    rank: int
    world_size: int
    group: Any
    place: str

    def round(self, doing: str, call: Callable[[], Any]) -> list[Any]:
        """What `call` returned (JSON) on every rank, by rank; it runs on this one.

        Where it failed on some rank, every rank raises CheckpointError naming the ranks and the file; the failing one
        raises its own error if that is another.
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
            text = "; ".join(f"rank {rank} failed while {doing}: {said}" for rank, _, said in failed)
            raise CheckpointError(failed[0][1], text, getattr(failure, "errno", None)) from failure
        return [result for _, result in notes]

    def _tell_of(self, failure: BaseException, doing: str, note: list[Any]) -> None:
        """Tells the others, and raises an error that is not the checkpoint's as it is."""
        try:
            self.exchange(doing, dump(note))
        except CheckpointError:
            raise failure from None
        raise failure

    def same(self, doing: str, call: Callable[[], dict[str, str]]) -> None:
        """Raises DisagreementError on every rank where the values of `call` differ, naming the ranks."""
        notes = self.round(doing, call)
        for name in notes[0]:
            if len({note[name] for note in notes}) > 1:
                shown = "; ".join(f"rank {rank}: {note[name]}" for rank, note in enumerate(notes))
                raise DisagreementError(
                    f"{self.place}: the ranks save different things: {name} is not the same ({shown}). Call fzero.save "
                    "on all of them after the same step, with the same arguments"
                )

    def exchange(self, doing: str, local: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([len(local)]), group=self.group)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(local)] = torch.frombuffer(bytearray(local), dtype=torch.uint8)
            rows = [torch.empty_like(padded) for _ in range(self.world_size)]
            dist.all_gather(rows, padded, group=self.group)
        except RuntimeError as error:
            said = str(error).split("\n", 1)[0]
            raise CheckpointError(self.place, f"a rank was lost while {doing}: {said}") from error
        return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
