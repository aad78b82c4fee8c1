"""protocol: the interface of an object that moves bytes between ranks, as the executor and the interpreter use it."""

from __future__ import annotations

from typing import Protocol

import torch

from fzero.ir.op import Op


class Comm(Protocol):
    """Moves bytes between ranks. `name`, the buffer that a transfer writes, identifies the transfer."""

    @property
    def number(self) -> int:
        """Grows with the transfers that were started. Ranks of one role whose numbers differ are not at the same place
        of the program."""

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a gather, reduce, send or recv, and returns at once. `tensors`: the op's reads, then its writes."""

    def ready(self, name: str) -> bool:
        """Whether `wait` would return without the help of another rank."""

    def wait(self, name: str) -> None:
        """Returns when the transfer that writes `name` is done. Raises KeyError if none was started."""

    def settle(self, name: str) -> None:
        """Returns when every other rank has read the sources of the transfer as far as it needs them.

        The transfer was waited for before. From then on the sources may be overwritten and freed. Over messages this
        returns at once; over shared memory it can be later than the wait.
        """

    def drain(self) -> None:
        """Ends every transfer in flight and drops its result. Collective, like the step that failed."""
