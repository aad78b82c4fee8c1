"""wire: the bytes that an op puts on the wire. Programs, comms and the choice of shardings all ask here.

The formula of a kind of transfer is in its record (`fzero.ir.collectives`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fzero.ir import kinds
from fzero.ir.op import Op


def op_bytes(op: Op, read: Sequence[int], written: Sequence[int], ranks: int) -> int:
    """Bytes that one of `ranks` ranks sends for an op; 0 where it sends none.

    read, written: bytes of what the op names, in order.

    >>> from fzero.ir.op import make_op
    >>> from fzero.ir.records import Ref
    >>> op_bytes(make_op("all_gather", [Ref("a")], [Ref("b")]), [256], [1024], 4)
    768
    """
    if op.is_send:
        return sum(read)
    record = op.row.collective
    if record is None or not (read and written):
        return 0
    return record.wire_bytes(record.whole_bytes(read[0], written[0]), ranks)


def kind_bytes(kind: str, whole: int, ranks: int) -> int:
    """The same for a kind of transfer by its name, of a whole buffer; 0 for a name that is none.

    >>> kind_bytes("all_reduce", 1024, 4), kind_bytes("own_part", 1024, 4)
    (1536, 0)
    """
    record = kinds.of(kind).collective
    return 0 if record is None else record.wire_bytes(whole, ranks)
