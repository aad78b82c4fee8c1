"""by_axis: the transfers of a mesh with several axes, each over the ranks of its op's axis."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero.comm.protocol import Comm
from fzero.ir.records import Op


class ByAxis:
    """`Comm` from one comm for each axis.

    `by_name` holds the comm of each transfer that was started, by the buffer that it writes. Only the methods here
    write it, on the thread that runs the program.
    """

    def __init__(self, comms: Mapping[str, Comm]) -> None:
        self.comms = dict(comms)
        self.by_name: dict[str, Comm] = {}

    @property
    def number(self) -> int:
        """The transfers that were started on all axes."""
        return sum(comm.number for comm in self.comms.values())

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a transfer over the op's axis; settles an earlier transfer into the same buffer first."""
        self.settle(name)
        self.by_name[name] = self.comms[op.axis or ""]
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
        """Drains every axis."""
        for comm in self.comms.values():
            comm.drain()
