"""by_axis: the transfers of a mesh with several axes, each over the ranks of its op's axis."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero.comm.protocol import Comm
from fzero.ir.records import Op
from fzero.ir.wire import op_bytes


class ByAxis:
    """`Comm` from one comm for each axis.

    sizes: the ranks along each axis. `by_name` holds the comm of each transfer that was started, by the buffer that it
    writes. `sent_bytes` counts by axis what this rank has sent. Only the methods here write these two, on the thread
    that runs the program.
    """

    def __init__(self, comms: Mapping[str, Comm], sizes: Mapping[str, int]) -> None:
        self.comms, self.sizes = dict(comms), dict(sizes)
        self.by_name: dict[str, Comm] = {}
        self.sent_bytes = dict.fromkeys(comms, 0)

    @property
    def number(self) -> int:
        """The transfers that were started on all axes."""
        return sum(comm.number for comm in self.comms.values())

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a transfer over the op's axis; settles an earlier transfer into the same buffer first."""
        self.settle(name)
        axis = op.axis or ""
        self.by_name[name] = self.comms[axis]
        self.sent_bytes[axis] += sent(op, tensors, self.sizes[axis])
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


def sent(op: Op, tensors: list[torch.Tensor], size: int) -> int:
    """Bytes that one of `size` ranks sends for a transfer of these tensors.

    >>> from fzero.ir.records import Ref, make_op
    >>> whole, own = torch.zeros(8), torch.zeros(4)
    >>> sent(make_op("send", [Ref("a")]), [own], 2), sent(make_op("recv", writes=[Ref("a")]), [own], 2)
    (16, 0)
    >>> sent(make_op("all_gather", [Ref("a")], [Ref("b")]), [own, whole], 2)
    16
    """
    nbytes = [tensor.nbytes for tensor in tensors]
    return op_bytes(op, nbytes[: len(op.reads)], nbytes[len(op.reads) :], size)
