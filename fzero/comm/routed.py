"""routed: `Comm` from several comms, of which one takes each transfer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from fzero.comm.protocol import Comm
from fzero.ir.op import Op


class Routed(ABC):
    """`Comm` that gives each transfer to one of `comms`, by a name. A subclass has the `number` too.

    `by_name` holds the comm of each transfer that was started, by the buffer that it writes. Only the methods here
    write it, on the thread that runs the program.
    """

    def __init__(self, comms: Mapping[str, Comm]) -> None:
        self.comms = dict(comms)
        self.by_name: dict[str, Comm] = {}

    @abstractmethod
    def way(self, op: Op, tensors: list[torch.Tensor]) -> str:
        """The name of the comm for this transfer."""

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a transfer on its comm; settles an earlier transfer into the same buffer first."""
        self.settle(name)
        self.by_name[name] = self.comms[self.way(op, tensors)]
        self.by_name[name].start(name, op, tensors)

    def ready(self, name: str) -> bool:
        """See `Comm.ready`."""
        return name not in self.by_name or self.by_name[name].ready(name)

    def wait(self, name: str) -> None:
        """See `Comm.wait`."""
        self.by_name[name].wait(name)

    def settle(self, name: str) -> None:
        """See `Comm.settle`."""
        if name in self.by_name:
            self.by_name[name].settle(name)

    def drain(self) -> None:
        """Drains every comm."""
        for comm in self.comms.values():
            comm.drain()
