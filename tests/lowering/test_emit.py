"""emit: records of a program under construction: names that are free, gathers that are made once, sums of values."""

from __future__ import annotations

import cases
import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fzero.ir import fx_nodes
from fzero.ir.records import Ref
from fzero.lowering.emit import Emitter, line_of


@pytest.fixture
def to() -> Emitter:
    """Of a plan for two nodes of two ranks."""
    plan = cases.captured(cases.spec(zero=3, mesh={"dp_out": 2, "dp": 2}), cases.layers(depth=1), cases.batch(), 4)[1]
    made = Emitter(plan, "p2p")
    made.buffers.update(plan.buffers)
    return made


def fake(*shape: int) -> Tensor:
    with FakeTensorMode():
        return torch.empty(shape)


def test_a_new_buffer_has_the_next_free_name(to: Emitter) -> None:
    one, two, three = (to.new("u x", fake(2, 3), "activation") for _ in range(3))
    assert len({one.name, two.name, three.name}) == 3
    assert two.name == f"{one.name}_"
    buffer = to.buffers[three.name]
    assert (buffer.dtype, buffer.shape, buffer.kind) == (torch.float32, (2, 3), "activation")


def test_the_place_of_a_rank(to: Emitter) -> None:
    assert to.rank("dp") == Ref("rank:dp")
    buffer = to.buffers["rank:dp"]
    assert (buffer.kind, buffer.dtype, buffer.shape, buffer.axis) == ("rank", torch.int64, (), "dp")


def test_a_column_is_gathered_once(to: Emitter) -> None:
    name = next(name for name, b in to.plan.buffers.items() if b.sharded)
    source, bucket = to.plan.buffers[name], to.plan.buckets[to.plan.buffers[name].bucket or ""]
    full = to.whole(name, "gathered", "why not")
    assert to.whole(name, "gathered", "again") == full
    assert [(op.kind, op.axis) for op in to.ops] == [("all_gather", source.sharded), ("wait", None)]
    assert (to.ops[0].reads, to.ops[0].writes, to.ops[0].why) == ((Ref(name),), (Ref(full),), "why not")
    assert to.ops[1].reads == (Ref(full),)
    made = to.buffers[full]
    assert (made.shape, made.kind, made.entry, made.sharded) == ((bucket.length,), "gathered", source.entry, None)


def test_segments_of_elementwise_work_are_shared(to: Emitter) -> None:
    like = next(iter(to.plan.buffers.values()))
    add = to.elementwise(torch.add, arity=2, like=like)
    assert to.elementwise(torch.add, arity=2, like=like) is add
    assert to.elementwise(torch.add, arity=2, like=like, dest=True) is not add
    assert to.elementwise(torch.div, 2, like=like) is not to.elementwise(torch.div, 4, like=like)
    assert len(fx_nodes.placeholders(add.graph)) == 2
    x, y = torch.randn(like.shape), torch.randn(like.shape)
    assert torch.equal(add(x, y)[0], x + y)
    assert torch.equal(to.elementwise(torch.div, 4, like=like)(x)[0], x / 4)
    dest = to.elementwise(torch.add, arity=2, like=like, dest=True)
    assert len(fx_nodes.placeholders(dest.graph)) == 3
    into = torch.zeros(like.shape)
    dest(x, y, into)
    assert torch.equal(into, x + y)


def test_a_segment_says_how_many_results_are_new(to: Emitter) -> None:
    like = next(iter(to.plan.buffers.values()))
    a, b, c = (to.new(name, fake(*like.shape), "activation") for name in "abc")
    to.segment("run", to.elementwise(torch.add, arity=2, like=like), [a, b], [c], why="new")
    to.segment("run", to.elementwise(torch.add, arity=2, like=like, dest=True), [a, b], [a], why="in place", flat=1)
    new, old = (dict(op.attrs) for op in to.ops)
    assert new["fresh"] == 1
    assert "fresh" not in old
    assert old["flat"] == 1
    assert {op.segment for op in to.ops} == {*to.segments}


@pytest.mark.parametrize(
    ("how", "axis", "op", "divisor", "ranks"),
    [
        ("mean", "", "sum", 4 * 3, 4),
        ("mean", "dp", "sum", 2 * 3, 2),
        ("sum", "", "sum", 1, 4),
        ("max", "dp", "max", 1, 2),
    ],
)
def test_a_value_is_exchanged_whole(to: Emitter, how: str, axis: str, op: str, divisor: int, ranks: int) -> None:
    source = to.new("x", fake(5), "activation")
    result = to.exchange(source, fake(5), "total", how, 3, "why", axis)
    sent, wait = to.ops
    assert (sent.kind, sent.axis, sent.reduction, sent.divisor) == (
        "all_reduce_small", axis or "dp_out.dp", op, divisor
    )  # fmt: skip
    assert (sent.reads, sent.writes[0], wait.kind, wait.reads) == ((source,), result, "wait", (result,))
    assert to.buffers[result.name].shape == (5,)
    assert to.buffers[sent.writes[1].name].shape == (ranks - 1, 5), "room for what the others send"


def test_memory_that_others_read_needs_no_room(to: Emitter) -> None:
    to.transport = "shared"
    to.exchange(to.new("x", fake(5), "activation"), fake(5), "total", "mean", 1, "why")
    assert len(to.ops[0].writes) == 1


def test_the_line_of_a_node() -> None:
    node = fx.Graph().placeholder("x")
    assert line_of(node) == ""
    node.meta["source"] = "train.py:3"
    assert line_of(node) == "train.py:3"
