"""What terms know, what a write leaves of them, and that verify answers for any text: accepted, or a VerifyError.

Programs broken by hand for each rule are in test_rules.py.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import cases
import pytest
import torch
from torch import fx

import fzero
from fzero._torch_compat import FakeTensorMode
from fzero.ir import forms, fx_nodes, segments
from fzero.ir.mesh import Mesh
from fzero.ir.op import make_op
from fzero.ir.program import Program
from fzero.ir.records import Buffer, Ref
from fzero.verify.abstract import Abstract
from fzero.verify.contents import Content
from fzero.verify.rules import verify
from fzero.verify.terms import PartialTerm, Undefined, Vec, apply, evaluate, gathered, reduced, term
from lab.mutate.corpus import relay
from lab.mutate.edits import find, insert, put, replaced, with_buffers
from lab.mutate.text import damaged

aten = torch.ops.aten
ON_DP = frozenset(("dp",))


@pytest.fixture(scope="module")
def good() -> Program:
    program = cases.lowered(zero=3, microbatches=2, reduce="each", clip_norm=1.0).program
    verify({0: program, 1: program})
    return program


# --- replicated, or varying by rank -----------------------------------------------------------------------------------


def test_a_term_varies_where_an_operand_does_until_it_is_reduced() -> None:
    batch, weight = term("input", "x", None).over(ON_DP), term("input", "w", 0)
    product = term("aten::mm", (batch, [weight]), ())
    assert (product.varies, weight.varies) == (ON_DP, frozenset())
    total = reduced(product, "sum", "dp", 2, 1)
    assert total.varies == frozenset()
    assert reduced(product, "sum", "tp", 2, 1).varies == ON_DP


def test_own_slices_that_are_gathered_are_the_value_only_where_all_ranks_have_the_same() -> None:
    weight = term("input", "w", 0)
    assert gathered(weight, "dp") == weight
    varying = weight.over(ON_DP)
    assert gathered(varying, "dp") != weight
    assert gathered(varying, "dp").varies == frozenset()
    assert gathered(varying, "tp") == weight


def test_what_differs_between_ranks_is_known_of_batch_rank_and_per_rank_leaves() -> None:
    buffers = [
        Buffer("x", torch.float32, (4,), "batch"), Buffer("place", torch.int64, (), "rank", axis="dp"),
        Buffer("drift", torch.float32, (4,), "state", per_rank=True), Buffer("mean", torch.float32, (4,), "state"),
    ]  # fmt: skip
    for world, varying in ((2, {"x", "place", "drift"}), (1, set())):
        program = Program(Mesh((("dp", world),)), {}, {b.name: b for b in buffers}, (), {})
        assert fzero.parse(str(program)) == program
        memory = Abstract(program).memory
        assert {name for name, held in memory.items() for t in held.terms.values() if t.varies} == varying


def test_gradients_that_are_gathered_before_they_are_reduced(good: Program) -> None:
    """Every rank would hold slices of all ranks' own gradients, and the sum of those is no sum of gradients."""
    at = find(good, lambda op: op.reduces and op.row.scatters)[0]
    grad = good.ops[at].reads[0].name
    length = good.buckets[good.buffers[grad].bucket or ""].length
    gather = make_op("all_gather", [Ref(grad, 0, length, None, True)], [Ref(grad)], axis="dp")
    broken = insert(good, at, gather, make_op("wait", [Ref(grad)]))
    with pytest.raises(
        fzero.VerifyError, match=rf"\[meaning\] op {at} `all_gather .*differs from rank to rank: its slices"
    ):
        verify(broken)


def test_slices_of_which_some_differ_between_ranks_are_another_term(good: Program) -> None:
    at = find(good, lambda op: op.gathers)[0]
    source, whole = good.ops[at].reads[0].name, good.ops[at].writes[0].name
    memory = Abstract(good)
    (first, value), *rest = memory.memory[source].terms.items()
    memory.memory[source].put(first, value.over(ON_DP))
    memory.step(good.ops[at])
    assert memory.memory[whole].terms == {first: gathered(value.over(ON_DP), "dp"), **dict(rest)}
    assert memory.memory[whole].terms[first] != value


def test_a_sum_over_own_slices_of_what_differs_between_ranks() -> None:
    """Added over the ranks it is the sum over the whole only of what all ranks have alike."""
    buffers = {name: Buffer(name, torch.float32, (), "activation") for name in ("own", "all")}
    program = Program(Mesh((("dp", 2),)), {}, buffers, (), {})
    for varies, whole in ((frozenset(), True), (ON_DP, False)):
        total = term("aten::sum", "w").over(varies)
        memory = Abstract(program)
        memory.memory["own"] = Content({(0, 1): PartialTerm(total, "dp")})
        memory.step(make_op("all_reduce_small", [Ref("own")], [Ref("all")], axis="dp", op="sum", divisor=1))
        assert (memory.read(Ref("all")) == total) is whole


# --- a write leaves nothing of what it overlaps -----------------------------------------------------------------------


def test_a_write_drops_every_term_that_it_overlaps() -> None:
    held = Content({(0, 8): "a", (8, 16): "b", (16, 16): "empty", (16, 32): "c"})
    held.put((12, 20), "new", own_slice=True)
    assert held.terms == {(0, 8): "a", (12, 20): "new", (16, 16): "empty"}
    held.put((0, 64), "all")
    assert held.terms == {(0, 64): "all", (16, 16): "empty"}
    assert held.own_slices == set()
    held.put((63, 64), "last")
    assert held.terms == {(63, 64): "last", (16, 16): "empty"}


def test_terms_never_overlap_whatever_is_written() -> None:
    rng = random.Random(0)
    held = Content()
    elements: dict[int, int] = {}
    for number in range(2000):
        start = rng.randrange(60)
        stop = start + rng.randrange(12)
        held.put((start, stop), number)
        gone = {elements[i] for i in range(start, stop) if i in elements}
        elements = {i: n for i, n in elements.items() if n not in gone} | dict.fromkeys(range(start, stop), number)
        assert {i: n for (a, b), n in held.terms.items() for i in range(a, b)} == elements


@pytest.mark.parametrize("part", [(0, 3), (5, 9), (0, 1)])
def test_a_part_of_a_live_buffer_that_is_overwritten(good: Program, part: tuple[int, int]) -> None:
    at, name, used = _living(good)
    start, stop = part
    gm = _segment(lambda g, into: g.call_function(aten.copy_.default, (into, _zeros(g, stop - start))), (stop - start,))
    pool = {**good.segments, segments.digest(gm): gm}
    over = make_op("run", [], [Ref(name, start, stop, (stop - start,))], segment=segments.digest(gm))
    broken = replace(insert(good, at + 1, over), segments=pool)
    with pytest.raises(
        fzero.VerifyError, match=rf"\[meaning\] op {used + 1} `run .*{re.escape(name)} was not computed as a whole"
    ):
        verify(broken)


def _living(program: Program) -> tuple[int, str, int]:
    """(the op that makes a whole activation, its name, the next op that reads all of it)."""
    for at, op in enumerate(program.ops):
        for ref in op.writes[: op.num_outputs] if op.is_run else ():
            whole = Ref(ref.name)
            later = [i for i, o in enumerate(program.ops) if i > at and o.kind == "run" and whole in o.reads]
            if later and program.buffers[ref.name].numel >= 16 and program.buffers[ref.name].dtype is torch.float32:
                return at, ref.name, later[0]
    raise AssertionError("no activation lives on")


def _zeros(graph: fx.Graph, size: int) -> fx.Node:
    return graph.call_function(aten.zeros.default, ([size],))


def _segment(body: Callable[..., fx.Node], *shapes: tuple[int, ...]) -> fx.GraphModule:
    graph = fx.Graph()
    holders = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    body(graph, *holders)
    graph.output([])
    with FakeTensorMode():
        return forms.propagate(segments.module(graph), [torch.empty(shape) for shape in shapes])


# --- inside a segment -------------------------------------------------------------------------------------------------


def test_a_write_into_a_view_inside_a_segment() -> None:
    program = relay(2, torch.Generator().manual_seed(0)).programs[0]
    verify(program)
    at = find(program, lambda op: op.is_update)[0]

    def halved(graph: fx.Graph, source: fx.Node, into: fx.Node) -> fx.Node:
        half = [graph.call_function(aten.slice.Tensor, (x, 0, 0, 4)) for x in (into, source)]
        return graph.call_function(aten.copy_.default, tuple(half))

    gm = _segment(halved, (8,), (8,))
    broken = put(program, at, program.ops[at].with_attrs(segment=segments.digest(gm)))
    broken = replace(broken, segments={**program.segments, segments.digest(gm): gm})
    with pytest.raises(
        fzero.VerifyError, match=rf"\[meaning\] op {at} `update .*is a view of x1, and is written in place"
    ):
        verify(broken)


def test_memory_that_is_read_after_it_was_written_under_another_name() -> None:
    def body(graph: fx.Graph, x: fx.Node, into: fx.Node) -> fx.Node:
        seen = graph.call_function(aten.view.default, (into, [4, 2]))
        graph.call_function(aten.copy_.default, (into, x))
        return graph.call_function(aten.copy_.default, (x, graph.call_function(aten.view.default, (seen, [8]))))

    gm = _segment(body, (8,), (8,))
    with pytest.raises(Undefined, match=r"view.* is read after its memory was written as x1"):
        evaluate(gm, [term("a"), term("b")])


def test_two_references_to_one_place_are_one_memory() -> None:
    """x is read again after x, as a destination, was written."""

    def body(graph: fx.Graph, x: fx.Node, into: fx.Node, other: fx.Node) -> fx.Node:
        graph.call_function(aten.copy_.default, (into, graph.call_function(aten.neg.default, (x,))))
        return graph.call_function(aten.copy_.default, (other, x))

    gm = _segment(body, (8,), (8,), (8,))
    evaluate(gm, [term("a"), term("b"), term("c")])
    with pytest.raises(Undefined, match="x0 is read after its memory was written as x1"):
        evaluate(gm, [term("a"), term("a"), term("c")], {1: 0})


def test_a_sum_along_a_dim_has_no_meaning_on_a_flat_range() -> None:
    """A range has the leaf's elements and none of its dims: only the sum of all of them can be made of own slices."""
    flat = Vec({0: term("leaf")}, "dp", (0, 8))
    assert isinstance(apply(aten.sum.default, (flat,), {}), PartialTerm)
    with pytest.raises(Undefined, match=r"aten.sum.dim_IntList is not elementwise and works on a flat range"):
        apply(aten.sum.dim_IntList, (flat, [0]), {})


def test_a_copy_into_another_dtype_is_a_cast() -> None:
    gm = _segment(lambda g, x, into: g.call_function(aten.copy_.default, (into, x)), (8,), (8,))
    holders = fx_nodes.placeholders(gm.graph)
    assert evaluate(gm, [term("a"), None])[1] == {1: term("a")}
    with FakeTensorMode():
        holders[1].meta["val"] = torch.empty(8, dtype=torch.bfloat16)
    (cast,) = evaluate(gm, [term("a"), None])[1].values()
    assert cast == term("aten::_to_copy", (term("a"),), (("dtype", "torch.bfloat16"),))


def test_a_whole_tensor_beside_a_flat_range(good: Program) -> None:
    """A vector of the leaf's own shape would be spread over, or refused by, a slice of another length."""
    at = find(good, lambda op: op.is_flat and op.is_run and len(op.reads) == 2)[0]
    read = good.ops[at].reads[0]
    size = (read.stop or 0) - (read.start or 0)
    lone = with_buffers(good, Buffer("lone", torch.float32, (size,), "constant"))
    broken = put(lone, at, replaced(good.ops[at], "reads", 0, Ref("lone")))
    with pytest.raises(fzero.VerifyError, match=r"the segment has|a whole tensor, beside a flat range"):
        verify(broken)


# --- any text ---------------------------------------------------------------------------------------------------------


def test_a_batch_of_another_shape(good: Program) -> None:
    """Its parts are rows of it: a user's batch would not fit into one of other columns."""
    batch = next(b for b in good.buffers.values() if b.kind == "batch" and len(b.shape) == 2)
    rows, columns = batch.shape
    exchanged = replace(batch, shape=(rows // 2, columns * 2))
    with pytest.raises(fzero.VerifyError, match="is no part of the batch"):
        verify(replace(good, buffers={**good.buffers, batch.name: exchanged}))


def test_an_op_without_references_has_a_text(good: Program) -> None:
    at = find(good, lambda op: op.gathers)[0]
    program = replace(good, ops=(*good.ops[:at], replace(good.ops[at], writes=()), *good.ops[at + 1 :]))
    assert fzero.parse(str(program)) == program
    with pytest.raises(fzero.VerifyError, match=f"op {at}"):
        verify(program)


def test_an_own_slice_of_a_buffer_without_a_bucket(good: Program) -> None:
    _, name, used = _living(good)
    sharded = with_buffers(good, replace(good.buffers[name], sharded="dp"))
    with pytest.raises(fzero.VerifyError, match=rf"\[form\] .*{re.escape(name)} is in no bucket: it has no own slice"):
        verify(sharded)
    place = good.ops[used].reads.index(Ref(name))
    own = replaced(good.ops[used], "reads", place, Ref(name, 0, good.buffers[name].numel, None, True))
    with pytest.raises(fzero.VerifyError, match=rf"\[partition\] op {used} .* is in no bucket and has no own slice"):
        verify(put(good, used, own))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(2)
def test_damaged_text_is_accepted_or_refused_by_a_rule(seed: int) -> None:
    """Whatever can be parsed: no error but VerifyError comes out, and no rule breaks down on the way to it."""
    rng = random.Random(seed)
    zero = (0, 1, 2, 3)[seed]
    program = cases.lowered(zero=zero, microbatches=2, clip_norm=1.0).program
    text, refusals = str(program), []
    for _ in range(60):
        broken = damaged(rng, text)
        try:
            parsed = fzero.parse(broken, program.segments)
        except ValueError:
            continue
        try:
            verify({0: parsed, 1: program})
        except fzero.VerifyError as error:
            refusals.append(error)
    assert [str(error) for error in refusals if error.__cause__ is not None] == []
    assert len(refusals) >= 15
