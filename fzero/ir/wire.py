"""wire: the bytes that an op puts on the wire. Programs, comms and the choice of shardings all ask here.

The formula of a kind of transfer is in its row (`fzero.ir.kinds`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fzero.ir import kinds
from fzero.ir.records import Op


def op_bytes(op: Op, read: Sequence[int], written: Sequence[int], ranks: int) -> int:
    """Bytes that one of `ranks` ranks sends for an op; 0 where it sends none.

    read, written: bytes of what the op names, in order.

    >>> from fzero.ir.records import Ref, make_op
    >>> op_bytes(make_op("all_gather", [Ref("a")], [Ref("b")]), [256], [1024], 4)
    768
    """
    if op.is_send:
        return sum(read)
    whole = (written if op.gathers else read)[:1]
    return op.row.wire_bytes(whole[0], ranks) if op.is_collective and whole else 0


def kind_bytes(kind: str, whole: int, ranks: int) -> int:
    """The same for a kind of transfer by its name, of a whole buffer; 0 for a name that is none.

    >>> kind_bytes("all_reduce", 1024, 4), kind_bytes("own_part", 1024, 4)
    (1536, 0)
    """
    return kinds.of(kind).wire_bytes(whole, ranks)
