"""outer_order: which nodes of an outer run work on one bucket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir import fx_nodes
from fzero.ir.recorder import record
from fzero.ir.records import SlotKey
from fzero.passes.common.outer_order import by_bucket


def work(count: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """A step's number, work on each of two leaves, and on both."""
    return [count + 1, (a * 2).sin(), b * 3, a.sum() + b]


@pytest.fixture
def run() -> Any:
    with FakeTensorMode():
        gm = record(work, [torch.zeros(()), torch.zeros(4), torch.zeros(8)])
    _, a, b = fx_nodes.placeholders(gm.graph)
    sizes = {"small": (0, 4, (4,)), "large": (0, 8, (8,))}
    buckets = {name: SimpleNamespace(place=lambda slot, name=name: sizes[name]) for name in sizes}
    keys = {a: SlotKey("small", 0), b: SlotKey("large", 0)}
    return SimpleNamespace(
        gm=gm, dest={}, cut={}, slot_key=keys, slot_key_of=lambda ref: None, program=SimpleNamespace(buckets=buckets)
    )


def groups(run: Any) -> list[list[str]]:
    nodes: list[fx.Node] = [n for n in run.gm.graph.nodes if fx_nodes.is_compute(n)]
    return [[n.name for n in group] for group in by_bucket(run, nodes)]


def test_scalars_come_first_and_work_on_two_leaves_is_with_the_larger(run: Any) -> None:
    """`sum` needs the small leaf alone, but its user is in the large one's group, and so is it."""
    assert groups(run) == [["add"], ["mul", "sin"], ["mul_1", "sum_1", "add_1"]]


def test_what_is_written_into_a_leaf_is_of_its_bucket(run: Any) -> None:
    """And so a scalar that is, is none of those that come first."""
    add = next(n for n in run.gm.graph.nodes if n.name == "add")
    run.dest[add], run.slot_key_of = "of large", lambda ref: SlotKey("large", 0)
    assert groups(run) == [["add", "mul_1", "sum_1", "add_1"], ["mul", "sin"]]
