"""routed: each transfer goes to one of several comms, which also has its wait, its settling and its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fzero.comm.routed import Routed
from fzero.ir.op import Op, make_op
from fzero.ir.records import Ref

GATHER = make_op("all_gather", [Ref("a")], [Ref("b")])


class Noted:
    """A comm that notes its calls in a list that all share."""

    number = 0

    def __init__(self, name: str, calls: list[tuple[str, ...]]) -> None:
        self.name, self.calls, self.there = name, calls, False

    def ready(self, name: str) -> bool:
        return self.there

    def __getattr__(self, call: str) -> Any:
        return lambda *given: self.calls.append((self.name, call, *given[:1]))


class BySize(Routed):
    """Large tensors go one way, small ones the other."""

    number = 0

    def way(self, op: Op, tensors: list[Tensor]) -> str:
        return "large" if tensors[0].numel() > 2 else "small"


def routed() -> tuple[BySize, list[tuple[str, ...]]]:
    calls: list[tuple[str, ...]] = []
    return BySize({name: Noted(name, calls) for name in ("small", "large")}), calls


def test_a_transfer_stays_with_the_comm_that_started_it() -> None:
    comm, calls = routed()
    comm.start("b", GATHER, [torch.zeros(1)])
    comm.start("c", GATHER, [torch.zeros(9)])
    for name in ("c", "b"):
        comm.wait(name)
        comm.settle(name)
    assert calls == [
        ("small", "start", "b"), ("large", "start", "c"), ("large", "wait", "c"), ("large", "settle", "c"),
        ("small", "wait", "b"), ("small", "settle", "b"),
    ]  # fmt: skip
    comm.comms["large"].there = True  # type: ignore[attr-defined]
    assert (comm.ready("b"), comm.ready("c")) == (False, True)


def test_what_wrote_a_buffer_before_is_settled_where_it_was_started() -> None:
    comm, calls = routed()
    comm.start("b", GATHER, [torch.zeros(1)])
    comm.start("b", GATHER, [torch.zeros(9)])
    comm.wait("b")
    assert calls == [("small", "start", "b"), ("small", "settle", "b"), ("large", "start", "b"), ("large", "wait", "b")]


def test_what_was_not_started_is_ready_and_settled_and_cannot_be_waited_for() -> None:
    comm, calls = routed()
    assert comm.ready("b")
    comm.settle("b")
    assert calls == []
    with pytest.raises(KeyError):
        comm.wait("b")


def test_at_the_end_of_a_failed_step_all_are_drained() -> None:
    comm, calls = routed()
    comm.start("b", GATHER, [torch.zeros(1)])
    comm.drain()
    assert calls[1:] == [("small", "drain"), ("large", "drain")]
