"""by_axis: the transfers of a mesh with several axes, each over the ranks of its op's axis."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero.comm.protocol import Comm
from fzero.comm.routed import Routed
from fzero.ir.op import Op
from fzero.ir.wire import op_bytes


class ByAxis(Routed):
    """`Comm` from one comm for each axis.

    sizes: the ranks along each axis. `sent_bytes` counts by axis what this rank has sent; only `start` writes it.
    """

    def __init__(self, comms: Mapping[str, Comm], sizes: Mapping[str, int]) -> None:
        super().__init__(comms)
        self.sizes = dict(sizes)
        self.sent_bytes = dict.fromkeys(comms, 0)

    @property
    def number(self) -> int:
        """The transfers that were started on all axes."""
        return sum(comm.number for comm in self.comms.values())

    def way(self, op: Op, tensors: list[torch.Tensor]) -> str:
        """The op's axis."""
        return op.axis or ""

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        """Starts a transfer over the op's axis; see `Routed.start`. Counts what this rank sends."""
        axis = self.way(op, tensors)
        self.sent_bytes[axis] += sent(op, tensors, self.sizes[axis])
        super().start(name, op, tensors)


def sent(op: Op, tensors: list[torch.Tensor], size: int) -> int:
    """Bytes that one of `size` ranks sends for a transfer of these tensors.

    >>> from fzero.ir.op import make_op
    >>> from fzero.ir.records import Ref
    >>> whole, own = torch.zeros(8), torch.zeros(4)
    >>> sent(make_op("send", [Ref("a")]), [own], 2), sent(make_op("recv", writes=[Ref("a")]), [own], 2)
    (16, 0)
    >>> sent(make_op("all_gather", [Ref("a")], [Ref("b")]), [own, whole], 2)
    16
    """
    nbytes = [tensor.nbytes for tensor in tensors]
    return op_bytes(op, nbytes[: len(op.reads)], nbytes[len(op.reads) :], size)
