"""by_axis: a transfer goes over the axis of its op, and what this rank sends there is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.comm.by_axis import ByAxis, sent
from fzero.ir.op import Op, make_op
from fzero.ir.records import Ref

GATHER = make_op("all_gather", [Ref("a")], [Ref("b")], axis="dp")


class Noted:
    """A comm that notes its calls."""

    def __init__(self, number: int = 3) -> None:
        self.calls: list[Any] = []
        self.number, self.there = number, True

    def start(self, name: str, op: Op, tensors: list[Tensor]) -> None:
        self.calls.append(("start", name))

    def ready(self, name: str) -> bool:
        return self.there

    def __getattr__(self, call: str) -> Any:
        return lambda *given: self.calls.append((call, *given))


def test_a_transfer_goes_over_the_axis_of_its_op() -> None:
    dp, tp = Noted(), Noted(4)
    comm = ByAxis({"dp": dp, "tp": tp}, {"dp": 4, "tp": 2})
    own, whole = torch.zeros(4), torch.zeros(16)
    assert comm.ready("b")
    comm.start("b", GATHER, [own, whole])
    assert (comm.sent_bytes, comm.number) == ({"dp": 3 * 16, "tp": 0}, 7)
    dp.there = False
    assert not comm.ready("b")
    comm.wait("b")
    comm.start("b", make_op("all_gather", [Ref("a")], [Ref("b")], axis="tp"), [own, whole[:8]])
    comm.settle("b")
    comm.settle("x")
    comm.drain()
    assert dp.calls == [("start", "b"), ("wait", "b"), ("settle", "b"), ("drain",)]
    assert tp.calls == [("start", "b"), ("settle", "b"), ("drain",)]
    assert comm.ready("b")
    comm.start("c", GATHER, [own, whole])
    assert comm.sent_bytes == {"dp": 2 * 3 * 16, "tp": 1 * 16}, "in all"


@pytest.mark.parametrize(
    ("kind", "shapes", "nbytes"),
    [
        ("all_gather", [(3,), (12,)], 3 * 12),
        ("reduce_scatter", [(12,), (3,)], 3 * 12),
        ("all_reduce", [(12,), (12,)], 2 * 3 * 12),
        ("all_to_all", [(12,), (12,)], 3 * 12),
    ],
)
def test_bytes_are_those_of_messages(kind: str, shapes: list[tuple[int, ...]], nbytes: int) -> None:
    """Among 4 ranks: a slice of 12 bytes to each other one; of an all-reduce, each slice goes out and comes back."""
    assert sent(make_op(kind, [Ref("a")], [Ref("b")], axis="dp"), [torch.zeros(s) for s in shapes], 4) == nbytes
