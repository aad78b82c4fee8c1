"""protocol: what the executor and the interpreter ask of whatever moves bytes."""

from __future__ import annotations

from typing import Protocol

import torch

from fzero.ir.records import Op


class Comm(Protocol):
    """How bytes move between ranks. `start` returns at once; `name` (the buffer written) identifies the transfer.

    `number` counts what was started: ranks that differ in it are not at one place.
    """

    number: int

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a gather, reduce, send or recv; `tensors` are the op's reads, then its writes."""

    def ready(self, name: str) -> bool:
        """Whether `wait` would return without another rank's help."""

    def wait(self, name: str) -> None:
        """Returns when the transfer that writes `name` is done. Raises KeyError where none was started."""

    def settle(self, name: str) -> None:
        """Returns when every other rank has read what it needs of the waited-for transfer's sources: they may be
        overwritten and freed. Only where ranks read one another's memory is that later than the wait."""

    def drain(self) -> None:
        """Ends every transfer that is in flight, whatever it brings. Collective, like the step that failed."""
