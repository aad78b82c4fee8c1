"""`Edits` against what they mean, op by op, and `finish`."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.ir.mesh import Mesh
from fzero.ir.op import Op, make_op
from fzero.ir.program import Level, Program
from fzero.ir.records import Buffer, Ref
from fzero.ir.rewrite import Edits

NAMES = ("a", "b", "c", "d")


def _op(read: str, write: str, why: str) -> Op:
    return make_op("run", [Ref(read, 0, 1, ())], [Ref(write)], why=why)


def _program(ops: list[Op]) -> Program:
    buffers = {name: Buffer(name, torch.float32, (1,), "activation") for name in NAMES}
    return Program(Mesh((("dp", 1),)), {}, buffers, tuple(ops), {})


names = st.sampled_from(NAMES)
one = st.builds(_op, names, names, st.sampled_from("xyz"))
some = st.lists(one, max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.lists(one, max_size=6), st.data())
def test_edits_are_made_at_their_ops_alone(ops: list[Op], data: st.DataObject) -> None:
    """Of each op: what comes before it, it or what takes its place under the new names, what comes after it."""
    number = st.integers(0, max(len(ops) - 1, 0))
    before = data.draw(st.dictionaries(st.integers(0, len(ops)), some))
    after, instead = data.draw(st.dictionaries(number, some)), data.draw(st.dictionaries(number, some))
    rename = data.draw(st.dictionaries(number, st.dictionaries(names, names)))
    wanted: list[Any] = []
    for i, op in enumerate(ops):
        wanted += before.get(i, [])
        for each in instead.get(i, [op]):
            new = rename.get(i, {})
            read, write = each.reads[0].name, each.writes[0].name
            wanted.append(_op(new.get(read, read), new.get(write, write), each.why))
        wanted += after.get(i, [])
    wanted += before.get(len(ops), [])
    edits = Edits(before, after, instead, rename)
    assert edits.spliced(ops) == wanted
    done = edits.apply(_program(ops), "edited")
    assert list(done.ops) == wanted
    assert done.passes == ("edited",)
    assert set(done.buffers) == {ref.name for op in wanted for ref in (*op.reads, *op.writes)}, "what no op names goes"


@settings(max_examples=50, deadline=None)
@given(st.lists(one, max_size=6))
def test_no_edit_changes_no_op(ops: list[Op]) -> None:
    assert Edits().spliced(ops) == ops


def test_edits_add_up_where_a_pass_names_a_place_twice() -> None:
    edits = Edits()
    edits.before[0].append(_op("a", "b", "first"))
    edits.before[0] += [_op("a", "b", "second")]
    edits.after[0][:0] = [_op("b", "c", "behind")]
    edits.rename[0]["a"] = "b"
    edits.rename[0]["d"] = "c"
    told = [(op.why, op.reads[0].name) for op in edits.spliced([_op("a", "d", "it")])]
    assert told == [("first", "a"), ("second", "a"), ("it", "b"), ("behind", "b")], "what is put beside is not renamed"


def test_buffers_and_segments_join_the_program_and_its_input_stays() -> None:
    program = _program([_op("a", "b", "it")])
    new = Buffer("e", torch.float32, (2,), "scratch")
    other = Buffer("a", torch.float32, (3,), "scratch")
    graph = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    edits = Edits(buffers={"e": new, "a": other}, segments={"used": graph, "unused": graph})
    edits.after[0].append(make_op("run", [Ref("b")], [Ref("e")], segment="used"))
    done = edits.apply(program, "edited", level=Level.FREED)
    assert list(done.buffers) == ["a", "b", "e"]
    assert (done.buffers["a"], done.buffers["e"]) == (other, new)
    assert set(done.segments) == {"used"}
    assert done.level is Level.FREED
    assert (len(program.ops), program.buffers["a"].shape, program.level) == (1, (1,), Level.NAIVE)
    assert edits.apply(done, "again", level=Level.CAPPED).level is Level.FREED, "a level is never lost"


def test_the_numbers_may_count_other_ops_than_the_programs() -> None:
    edits = Edits(instead={1: ()})
    others = [_op("a", "b", "x"), _op("b", "c", "y"), _op("c", "d", "z")]
    assert list(edits.apply(_program([]), "edited", others).ops) == [others[0], others[2]]
