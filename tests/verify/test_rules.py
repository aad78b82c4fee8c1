"""Programs broken by hand, one for each of verify's rules: the rule, the op and what is wrong are named."""

import re
import sys
from dataclasses import replace

import cases
import pytest
import torch

import fzero
from fzero.ir import fx_nodes, segments
from fzero.ir.decisions import RoleDecisions
from fzero.ir.mesh import Mesh
from fzero.ir.op import Op, make_op
from fzero.ir.program import Program
from fzero.ir.records import ALIGN, DISK, HOST, Buffer, Ref, Slot, SlotKey
from fzero.passes import optimise
from fzero.verify.rules import RULES, reduced_once, verify
from lab.mutate import Bench
from lab.mutate.corpus import Case, lowered, relay
from lab.mutate.edits import drop, find, insert, move, never_freed, put, replaced, with_buffers, with_ops
from lab.mutate.models import MODELS, OPTIMIZERS
from lab.mutate.oracle import difference, outcome

# --- by hand, one for each rule ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def relayed() -> Case:
    return relay(2, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def good() -> Program:
    """zero=3 on two ranks, two microbatches, momentum, a global norm: every kind of op but messages."""
    program = cases.lowered(zero=3, microbatches=2, reduce="each", clip_norm=1.0).program
    verify({0: program, 1: program})
    return program


def _refused(broken: Program, rule: str, what: str, **options: int) -> None:
    """verify names the rule, an op or the end, and what is wrong."""
    with pytest.raises(
        fzero.VerifyError, match=rf"^\[{rule}\] (?:op \d+( `.*`)?|the end): .*(?:{what}).* \(after pass settle\)$"
    ):
        verify(broken, **options)


def _first(program: Program, kind: str, **attrs: int | str) -> int:
    return find(program, lambda op: op.kind == kind and all(op.get(k) == v for k, v in attrs.items()))[0]


def _wait(program: Program, at: int) -> int:
    name = program.ops[at].writes[0].name
    return next(i for i in find(program, lambda op: op.is_wait) if program.ops[i].reads[0].name == name)


def _freeing(program: Program, name: str) -> int:
    return find(program, lambda op: op.is_free and any(ref.name == name for ref in op.reads))[0]


def test_a_wait_that_is_missing_or_repeated(good: Program) -> None:
    wait = _wait(good, _first(good, "all_gather"))
    name = re.escape(good.ops[wait].reads[0].name)
    _refused(drop(good, wait), "lifetimes", rf"before the transfer into {name} \(op \d+\) is waited for")
    _refused(insert(good, wait, good.ops[wait]), "lifetimes", f"waits for a transfer into {name}, of which none")


def test_a_free_that_is_early_missing_or_repeated(good: Program) -> None:
    at = _first(good, "all_gather")
    name = good.ops[at].writes[0].name
    free, shown = _freeing(good, name), re.escape(name)
    early = make_op("free", [Ref(name)])
    _refused(insert(good, at + 1, early), "lifetimes", f"frees {shown} while the transfer into {shown}")
    _refused(
        insert(good, _wait(good, at) + 1, early), "lifetimes", rf"reads {shown}\[.*\], which is not live: freed at op"
    )
    _refused(drop(good, free), "lifetimes", f"{shown} is never freed")
    _refused(insert(good, free + 1, early), "lifetimes", f"frees {shown}, which is not live")


def test_a_state_that_is_read_after_its_update(good: Program) -> None:
    at = find(good, lambda op: op.is_update and op.is_flat)[0]
    _refused(insert(good, at + 1, good.ops[at]), "lifetimes", r"which was donated: op \d+ wrote its new value")


def test_memory_that_two_have_at_one_time(good: Program) -> None:
    at = _first(good, "reduce_scatter")
    grad, room = (good.buffers[ref.name] for ref in (good.ops[at].reads[0], good.ops[at].writes[1]))
    names = "|".join(f"{re.escape(a)} and {re.escape(b)}" for a, b in ((grad.name, room.name), (room.name, grad.name)))
    _refused(with_buffers(good, replace(room, at=grad.at)), "places", f"({names}) share memory of the arena")
    run = find(good, lambda op: op.offset is not None)[0]
    block = put(good, run, good.ops[run].with_attrs(at=good.buffers[good.ops[run].reads[0].name].at or 0))
    if good.buffers[good.ops[run].reads[0].name].at is not None:
        _refused(block, "places", f"the workspace of op {run} share memory of the arena")


def test_places_that_are_odd_or_of_the_state(good: Program) -> None:
    grad = next(b for b in good.buffers.values() if b.kind == "grad")
    _refused(with_buffers(good, replace(grad, at=(grad.at or 0) + 4)), "places", "not a multiple of 64")
    held = next(b for b in good.buffers.values() if b.kind == "param")
    held = replace(held, at=0)
    _refused(with_buffers(good, held), "places", f"{re.escape(held.name)} has a place in the step's arena")


def test_a_value_of_a_layer_that_goes_whole_to_every_rank() -> None:
    """Of equal slices an all_reduce sends each rank its part: 48 bytes of these 32, where all of them are 96."""
    spec = fzero.Spec(
        loss=lambda p, b: (torch.relu(b @ p["w"]) @ p["v"]).square().mean(), optimizer=fzero.optim.sgd(0.1),
        mesh={"tp": 4}, shard={"w": fzero.P(None, "tp"), "v": fzero.P("tp")}, transfers="shared",
    )  # fmt: skip
    made = fzero.lower(spec, {"w": torch.ones(4, 8), "v": torch.ones(8, 2)}, torch.ones(4, 4)).program
    at = _first(made, "all_reduce")
    _refused(
        put(made, at, replace(made.ops[at], kind="all_reduce_small")), "transfers", "sends all 8 elements to every"
    )


def test_scratch_that_holds_something_else(good: Program) -> None:
    at = _first(good, "reduce_scatter")
    held = find(good, lambda op: op.in_region and op.num_outputs > 0)[0]
    broken = put(good, at, replaced(good.ops[at], "writes", 1, good.ops[held].writes[0]))
    _refused(broken, "lifetimes", "receives into .*, which is in use: free it first")


def test_a_batch_that_is_written(good: Program) -> None:
    batch = next(name for name, b in good.buffers.items() if b.kind == "batch")
    at = find(good, lambda op: op.is_update and not op.is_flat)[0]
    broken = put(good, at, replaced(good.ops[at], "writes", 0, Ref(batch)))
    _refused(broken, "lifetimes", f"writes {batch}, which is the user's and read-only")


def test_bytes_that_move_for_nothing(good: Program) -> None:
    at = _first(good, "all_gather")
    wait, name = _wait(good, at), re.escape(good.ops[at].writes[0].name)
    again = insert(good, wait + 1, good.ops[at], good.ops[wait])
    _refused(again, "needed", f"brings {name} again: nothing read it since op {at}")


def test_records_that_say_what_there_is_not(good: Program) -> None:
    gather, free = _first(good, "all_gather"), find(good, lambda op: op.is_free)[0]
    _refused(put(good, gather, replace(good.ops[gather], kind="banana")), "form", "banana is none of run, update,")
    _refused(put(good, free, replace(good.ops[free], reads=())), "form", "reads 0 buffers: a free reads 1 or more")
    _refused(put(good, gather, replace(good.ops[gather], reads=(Ref("no"),))), "form", "there is no buffer no")
    _refused(put(good, free, good.ops[free].with_attrs(microbatch="x")), "form", "microbatch=x is no number")
    reduce = _first(good, "reduce_scatter")
    _refused(put(good, reduce, good.ops[reduce].with_attrs(divisor=0)), "form", "divides by zero")
    shard = next(b for b in good.buffers.values() if b.sharded)
    _refused(with_buffers(good, replace(shard, bucket=None)), "form", "is in no bucket: it has no own slice")
    _refused(with_buffers(good, replace(shard, bucket="no")), "form", "is of bucket no, which is not there")
    _refused(with_buffers(good, replace(shard, kind="no")), "form", "is of kind no: none of param,")
    _refused(replace(good, trainable=(SlotKey("no", 1),)), "form", "trainable no:1 is no slot of a bucket")
    _refused(replace(good, trainable=(SlotKey("small", 9),)), "form", "trainable small:9 is no slot of a bucket")
    place = Buffer("place", torch.int64, (), "rank", axis="tp")
    _refused(with_buffers(good, place), "form", r"place is this rank's place along tp: the mesh has \['dp'\]")
    _refused(replace(good, metrics={"loss": "no"}), "form", "metric loss is in no: there is no buffer no")
    _refused(replace(good, mesh=Mesh((("dp", 0),))), "form", "the mesh is dp=0: every axis once")
    _refused(replace(good, mesh=Mesh((("tp", 2),))), "form", "is cut along axis dp, which the mesh has not")
    _refused(
        with_buffers(good, replace(shard, sharded="tp")), "form", "is sharded along tp: its bucket is cut along dp"
    )


def test_room_to_work_in_that_is_too_small_or_nowhere(good: Program) -> None:
    at = find(good, lambda op: op.workspace > 0)[0]
    op, room = good.ops[at], good.ops[at].workspace
    small = put(good, at, op.with_attrs(workspace=room - 1))
    _refused(small, "calls", rf"segment \w+ works in {room:,} bytes, its workspace has {room - 1:,}")
    nowhere = put(good, at, replace(op, attrs=tuple(a for a in op.attrs if a[0] != "at")))
    _refused(nowhere, "places", "its workspace has no place in the step's arena")
    batch = next(b for b in good.buffers.values() if b.kind == "batch")
    _refused(with_buffers(good, replace(batch, at=None)), "places", "has no place in the step's arena: the batch is")


def test_a_flat_range_that_is_longer_than_its_segment_was_planned_for(good: Program) -> None:
    """The segment of a shorter range computes the same, in memory that is too small for it."""
    flat = find(good, lambda op: op.is_run and op.is_flat and op.why.startswith("add gradients"))
    long, short = sorted(flat, key=lambda i: -(good.ops[i].writes[0].stop or 0))[:: len(flat) - 1]
    key = good.ops[short].segment
    assert key != good.ops[long].segment
    broken = put(good, long, good.ops[long].with_attrs(segment=key))
    _refused(broken, "calls", r"has up to \d+ elements: the segment has f32\[\d+\] there")


@pytest.mark.parametrize("world", [1, 2])
def test_a_flat_range_that_is_cut_at_its_padding(world: int) -> None:
    """The padding itself is nobody's: the step is the same but for its rounding. Elementwise kernels work on 8 or 16
    elements at a time and round those that are left over otherwise, so a range that ends with the leaf gives other
    bits than the one that ends with its padding, which every stage and every cut of a bucket share."""
    placed = {"zero": 1, "bucket_bytes": 1024}
    case = lowered("conv", MODELS["conv"], OPTIMIZERS["adamw"](), placed, world, torch.Generator().manual_seed(0))
    bench, program = Bench(case), case.programs[0]
    slots = [
        (b.name, s, b.end(i)) for b in program.buckets.values() for i, s in enumerate(b.slots) if s.stop < b.end(i)
    ]
    apart = 0
    for bucket, slot, end in slots:
        for at in find(program, lambda op: op.is_update and op.is_flat):
            op = program.ops[at]

            def cut(ref: Ref, bucket: str = bucket, slot: Slot = slot, end: int = end) -> Ref:
                mine = program.buffers[ref.name].bucket == bucket
                return replace(ref, stop=slot.stop) if mine and (ref.start, ref.stop) == (slot.start, end) else ref

            broken = put(program, at, replace(op, reads=tuple(map(cut, op.reads)), writes=tuple(map(cut, op.writes))))
            if broken == program:
                continue
            ran = outcome(case, dict.fromkeys(range(world), broken))
            apart += difference(bench.sound, ran) is not None
            for x, y in zip(bench.sound.state, ran.state, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
            _refused(broken, "calls", r"ends off a multiple of 64 elements: the bits of the last ones depend on that")
    assert apart


def test_an_op_that_counts_from_the_start_of_a_storage(good: Program) -> None:
    """A traced offset is one into a storage of its own; in a program many values share one (see test_as_strided.py)."""
    for key, gm in good.segments.items():
        graph = segments.copied(gm.graph)
        views = [n for n in graph.nodes if n.target is torch.ops.aten.t.default]
        for node in views[:1]:
            value = node.meta["val"]
            node.target = torch.ops.aten.as_strided.default
            node.args = (node.args[0], list(value.shape), list(value.stride()), 0)
        if views:
            broken = replace(good, segments={**good.segments, key: segments.module(graph)})
            _refused(broken, "inside", "aten.as_strided.default counts from the start of a storage that other values")
            return
    pytest.fail("no segment has a view")


def test_a_view_that_strides_do_not_allow(good: Program) -> None:
    """As where a copy before it was dropped: the value would be the same, and the view fails when it runs."""
    for key, gm in good.segments.items():
        graph = segments.copied(gm.graph)
        for node in fx_nodes.placeholders(graph):
            held = node.meta["val"]
            if held.ndim == 2 and 1 not in held.shape and node.users:
                first = min(node.users, key=list(graph.nodes).index)
                with graph.inserting_before(first):
                    turned = graph.call_function(torch.ops.aten.t.default, (node,))
                    turned.meta["val"] = held.t()
                    seen = graph.call_function(torch.ops.aten.view.default, (turned, [held.numel()]))
                    seen.meta["val"] = held.reshape(-1)
                    back = graph.call_function(torch.ops.aten.view.default, (seen, [*held.shape]))
                    back.meta["val"] = held
                node.replace_all_uses_with(back, delete_user_cb=lambda user, own=turned: user is not own)
                broken = replace(good, segments={**good.segments, key: segments.module(graph)})
                _refused(broken, "inside", r"sees a value of strides .* as \[\d+\]: no view can")
                return
    pytest.fail("no segment reads a matrix")


def test_a_view_as_a_result(good: Program) -> None:
    """As where the copy that is returned was dropped: the buffer would hold the value in the order of its base."""
    for key, gm in good.segments.items():
        graph = segments.copied(gm.graph)
        results = fx_nodes.outputs(graph)
        if results and results[0].meta["val"].ndim == 2:
            with graph.inserting_after(results[0]):
                view = graph.call_function(torch.ops.aten.view.default, (results[0], [*results[0].meta["val"].shape]))
            view.meta["val"] = results[0].meta["val"]
            fx_nodes.output(graph).args = ([view, *results[1:]],)
            broken = replace(good, segments={**good.segments, key: segments.module(graph)})
            _refused(broken, "calls", r"returns .* as a view of .*: a buffer holds a value as it is computed")
            return
    pytest.fail("no segment returns a matrix")


def test_a_leaf_that_lies_elsewhere(good: Program) -> None:
    bucket = next(b for b in good.buckets.values() if len(b.slots) > 1)
    moved = replace(bucket.slots[1], start=bucket.slots[1].start - ALIGN)
    broken = replace(bucket, slots=(bucket.slots[0], moved, *bucket.slots[2:]))
    _refused(replace(good, buckets={**good.buckets, bucket.name: broken}), "partition", "overlapping, unaligned or out")
    short = replace(bucket, length=bucket.length - ALIGN)
    uneven = replace(good, buckets={**good.buckets, bucket.name: short})
    _refused(uneven, "partition", rf"bucket {bucket.name} has {short.length} elements: not a multiple of 2 ranks x 64")


def test_a_shard_that_is_too_small(good: Program) -> None:
    shard = next(b for b in good.buffers.values() if b.kind == "grad" and b.sharded)
    broken = with_buffers(good, replace(shard, shape=(shard.numel // 2,)))
    needed = re.escape(f"{shard.name} has shape ({shard.numel // 2},): a shard has ({shard.numel},)")
    _refused(broken, "partition", needed)


def test_a_reference_beyond_its_buffer(good: Program) -> None:
    at = find(good, lambda op: op.is_flat and op.is_update)[0]
    ref = good.ops[at].reads[0]
    broken = put(good, at, replaced(good.ops[at], "reads", 0, replace(ref, stop=(ref.stop or 0) + ALIGN)))
    _refused(broken, "partition", "lies outside of")


def test_flat_ranges_of_buckets_that_are_cut_otherwise(good: Program) -> None:
    at = find(good, lambda op: op.is_flat and op.is_update)[0]
    bucket = next(b for b in good.buckets.values() if len(b.slots) > 1)
    other = replace(bucket, name="other", slots=bucket.slots[:1])
    column = next(b for b in good.buffers.values() if b.bucket == bucket.name and b.kind == "optimizer")
    at = find(good, lambda op: op.is_update and any(r.name == column.name for r in op.reads))[0]
    position = next(n for n, r in enumerate(good.ops[at].reads) if r.name == column.name)
    broken = with_buffers(good, replace(column, name="elsewhere", bucket="other"))
    broken = replace(broken, buckets={**good.buckets, "other": other})
    ref = replace(good.ops[at].reads[position], name="elsewhere")
    _refused(put(broken, at, replaced(good.ops[at], "reads", position, ref)), "partition", "holds leaves at")


def test_a_run_that_writes_over_what_it_reads(good: Program) -> None:
    at = find(good, lambda op: op.is_flat and op.why.startswith("add "))[0]
    op = good.ops[at]
    half = replace(op.writes[0], stop=(op.writes[0].stop or 0) // 2)
    what = re.escape(f"writes {half}, which overlaps {op.reads[0]} that it reads")
    _refused(put(good, at, replace(op, writes=(half,))), "aliasing", what)


def test_a_segment_that_does_not_fit(good: Program) -> None:
    at = find(good, lambda op: op.in_region)[0]
    op = good.ops[at]
    _refused(
        replace(good, segments={}), "calls", r"segment \w+ is not in the program: fzero.parse\(text, program.segments\)"
    )
    fewer = tuple(ref for ref in op.reads if good.buffers[ref.name].kind != "batch")
    _refused(put(good, at, replace(op, reads=fewer)), "calls", r"takes \d+ and returns \d+, the op gives \d+")
    result = good.buffers[op.writes[0].name]
    part = replaced(op, "writes", 0, Ref(result.name, 0, result.numel, result.shape))
    _refused(put(good, at, part), "calls", "as a new tensor: only a whole buffer that is in no bucket can become one")
    shrunk = with_buffers(good, replace(result, shape=(1, *result.shape[1:])))
    _refused(shrunk, "calls", rf"{result.name} is f32\[1.*\]: the segment has f32\[4.*\] there")


def test_a_new_tensor_in_the_place_of_state(good: Program) -> None:
    at = find(good, lambda op: op.phase == "outer" and op.num_outputs > 0)[0]
    name = good.ops[at].writes[0].name
    kept = with_buffers(never_freed(good, name), replace(good.buffers[name], kind="state"))
    _refused(kept, "calls", f"returns {re.escape(name)} as a new tensor: .* must be written in place")


def test_a_collective_of_another_axis_or_size(good: Program) -> None:
    gather, reduce = _first(good, "all_gather"), _first(good, "reduce_scatter")
    _refused(
        put(good, gather, replace(good.ops[gather], axis="tp")),
        "transfers",
        r"runs over axis 'tp': the mesh has \['dp'\]",
    )
    lonely = replace(good, mesh=Mesh((("dp_out", 1), ("dp", 2))))
    lonely = put(lonely, gather, replace(good.ops[gather], axis="dp_out.dp"))
    _refused(lonely, "transfers", "along dp_out there is one rank, and ranks open no group for it")
    source = good.ops[gather].reads[0].name
    other = next(b.name for b in good.buffers.values() if b.kind == "param" and b.numel != good.buffers[source].numel)
    crossed = put(good, gather, replace(good.ops[gather], reads=(Ref(other),)))
    _refused(crossed, "transfers", r"gathers \d+ elements of 2 ranks into \d+")
    whole = put(good, reduce, replace(good.ops[reduce], kind="all_reduce"))
    _refused(whole, "transfers", r"reduces \d+ elements into \d+: all_reduce needs \d+")
    unknown = put(good, reduce, replace(good.ops[reduce], kind="reduce"))
    _refused(unknown, "form", "reduce is none of run, update, all_gather, reduce_scatter")
    room = good.buffers[good.ops[reduce].writes[1].name]
    small = with_buffers(good, replace(room, shape=(1, 1)))
    _refused(small, "transfers", "elements into scratch of 1")


def test_gradients_that_are_written_twice(good: Program) -> None:
    def writes_gradients(op: Op) -> bool:
        return op.in_region and any(good.buffers[r.name].kind == "grad" for r in op.writes)

    at = find(good, writes_gradients)[0]
    _refused(insert(good, at + 1, good.ops[at]), "reduced once", r"writes the gradient r0\.grad.* a second time")


def test_gradients_that_are_reduced_twice(good: Program) -> None:
    at = _first(good, "reduce_scatter")
    result, add = good.ops[at].writes[0].name, find(good, lambda op: op.why.startswith("add gradients"))
    uses = next(i for i in add if any(r.name == result for r in good.ops[i].reads))
    once = replace(good.buffers[result], name="once", at=None)
    start = replace(good.ops[at], writes=(Ref("once"), good.ops[at].writes[1]))
    op = good.ops[uses]
    mixed = replace(op, reads=tuple(replace(r, name="once") if r.name != result else r for r in op.reads))
    wait = _wait(good, at)
    ops = [*good.ops[: wait + 1]]
    room = replace(good.buffers[good.ops[at].writes[1].name], name="room", at=None)
    start = replace(start, writes=(Ref("once"), Ref("room")))
    ops += [start, make_op("wait", [Ref("once")]), make_op("free", [Ref("room")])]
    ops += [*good.ops[wait + 1 : uses], good.ops[uses], mixed, make_op("free", [Ref("once")]), *good.ops[uses + 1 :]]
    broken = with_buffers(with_ops(good, ops), once, room)
    _refused(broken, "reduced once", rf"reduces {re.escape(good.ops[at].reads[0].name)} a second time")


def test_gradients_that_wait_elsewhere_before_they_are_coded_are_reduced() -> None:
    """The complaint: a program that brought a gradient back from the disk, encoded it on the host and sent that was
    refused, with "are never reduced"."""
    precision = fzero.Precision(reduce="int8", exact=())
    coded = cases.lowered(zero=2, microbatches=2, reduce="each", precision=precision).program
    sends = _first(coded, "all_to_all")
    message = coded.ops[sends].reads[0].name
    at = find(coded, lambda op: op.is_run and any(ref.name == message for ref in op.writes))[0]
    encode = coded.ops[at]
    whole = encode.reads[0].name
    of = {
        "kept": replace(coded.buffers[whole], name="kept", space=DISK),
        "back": replace(coded.buffers[whole], name="back", kind="staging", space=HOST),
        "here": replace(coded.buffers[message], name="here", kind="staging", space=HOST),
    }
    ways = [make_op("move", [Ref(a)], [Ref(b)]) for a, b in ((whole, "kept"), ("kept", "back"), ("here", message))]
    there = replace(
        encode, reads=(replace(encode.reads[0], name="back"),), writes=(replace(encode.writes[0], name="here"),)
    )
    ops = [*coded.ops[:at], *ways[:2], there, ways[2], *coded.ops[at + 1 :]]
    moved = with_buffers(with_ops(coded, ops), *of.values())
    assert [*reduced_once(coded)] == [*reduced_once(moved)] == []
    lost = with_ops(moved, [op for op in moved.ops if op is not coded.ops[sends]])
    assert [what for _, what in reduced_once(lost)] == [f"the gradients in {whole} are never reduced"]


def test_a_microbatch_that_runs_less(good: Program) -> None:
    at = find(good, lambda op: op.in_region and op.microbatch == 1)[0]
    broken = put(good, at, good.ops[at].with_attrs(microbatch=0))
    _refused(broken, "microbatches", r"r0 runs \{0: \d+, 1: \d+\} segments by microbatch: they must be equal")


def test_an_update_that_is_missing_or_repeated(good: Program) -> None:
    at = find(good, lambda op: op.is_update and op.is_flat)[0]
    _refused(drop(good, at), "updated once", "has a gradient and is never updated")
    count = find(good, lambda op: op.is_update and not op.is_flat)[0]
    again = insert(good, count + 1, good.ops[count])
    _refused(again, "updated once", f"updates {good.ops[count].writes[0]} a second time")


def test_more_gathered_bytes_than_the_cap(good: Program) -> None:
    broken = replace(good, gather_cap_bytes=good.gather_cap_bytes - 1)
    figures = f"{good.gather_cap_bytes:,} bytes are gathered at once, the cap is {good.gather_cap_bytes - 1:,}"
    _refused(broken, "cap", figures)


def test_a_mean_that_is_no_mean(good: Program) -> None:
    at = _first(good, "reduce_scatter")
    broken = put(good, at, good.ops[at].with_attrs(divisor=2))
    _refused(broken, "meaning", rf"computes something else than what was captured \(\w+, not {good.meaning}\)")


def test_more_memory_than_the_budget(good: Program) -> None:
    peak = fzero.cost.memory.account(good).peak
    verify(good, budget_bytes=peak)
    _refused(good, "budget", f"{peak:,} bytes live, the budget is {peak - 1:,}", budget_bytes=peak - 1)


def test_equal_collectives_in_another_order_on_one_rank() -> None:
    """Each rank's own program is right; together the gather of one layer would meet that of another."""
    program = cases.lowered(zero=1, bucket_bytes=1 << 10).program
    gathers = find(program, lambda op: op.gathers)
    size = {i: program.buffers[program.ops[i].writes[0].name].nbytes for i in gathers}
    first, second = next((a, b) for a in gathers for b in gathers if a < b and size[a] == size[b])
    pairs = [(program.ops[i], program.ops[_wait(program, i)]) for i in (second, first)]
    rest = [op for op in program.ops if not any(op is other for pair in pairs for other in pair)]
    swapped = with_ops(program, [*rest, *(op for pair in pairs for op in pair)])
    moved = with_ops(program, [*rest, *(op for pair in reversed(pairs) for op in pair)])
    verify({0: moved, 1: moved})
    verify({0: swapped, 1: swapped})
    crossed = r"^\[same order\] op \d+ of rank 1 `all_gather .*`: collective \d+ over dp differs from rank 0's, `all_ga"
    with pytest.raises(fzero.VerifyError, match=crossed):
        verify({0: moved, 1: swapped})


def test_a_collective_that_one_rank_does_not_issue(good: Program) -> None:
    other = cases.lowered(zero=3, microbatches=2, reduce="each").program  # it has no norm to sum
    with pytest.raises(fzero.VerifyError, match=r"^\[same order\] .* of rank 1.*over dp"):
        verify({0: good, 1: other})


def test_a_message_that_nobody_receives(relayed: Case) -> None:
    ring = relay(3, torch.Generator().manual_seed(0))
    verify(relayed.programs)
    unheard = (
        r"^\[sends\] op 3 of rank 0 .*\(tag 0\) is received over dp from rank 1 to 0 and not sent: rank 0 would wait"
    )
    with pytest.raises(fzero.VerifyError, match=unheard):
        verify({0: relayed.programs[0], 1: ring.programs[1]})


def test_a_source_that_is_written_while_other_ranks_may_read_it() -> None:
    """Of ranks that share memory: a settle that comes after the write it protects from."""
    shared = cases.lowered(zero=3, transfers="shared").program
    verify(shared)
    settles = find(shared, lambda op: op.is_settle)
    assert settles
    at = next(i for i in settles if shared.ops[i + 1].writes)
    _refused(move(shared, at, at + 1), "settled", "before the transfer into .* is settled")
    _refused(insert(shared, at, shared.ops[at]), "settled", "of which none has been waited for")


def test_a_segment_that_returns_nothing(good: Program) -> None:
    """As `native_layer_norm_backward` does for what its mask leaves out."""
    at = find(good, lambda op: op.in_region and op.num_outputs > 0)[0]
    graph = segments.copied(good.segments[good.ops[at].segment].graph)
    fx_nodes.outputs(graph)[0].meta["val"] = None
    gm = segments.module(graph)
    broken = replace(good, segments={**good.segments, good.ops[at].segment: gm})
    _refused(broken, "calls", "returns nothing for")


# --- device, host and disk --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moving() -> Program:
    """Second moments on disk, the rest on the host; updates on the device, in tiles of 1,024 elements, each brought
    right before its use."""
    options = {"zero": 3, "optimizer": fzero.optim.adamw(1e-3), "update_on": "device", "nvme_path": "/nvme"}
    lowered = cases.lowered(offload={"opt_state/nu/**": "nvme", "**": "cpu"}, **options)
    program, _ = optimise(
        lowered.naive, replace(lowered.options[0], decided=RoleDecisions().but(tile_bytes=4096, fetch_ahead=0))
    )
    verify({0: program, 1: program})
    return program


def _move(program: Program, source: str, target: str, kind: str = "staging") -> int:
    """The first move between these spaces into a buffer of this kind."""
    return find(
        program,
        lambda op: (
            op.moves
            and (program.buffers[op.reads[0].name].space, program.buffers[op.target].space) == (source, target)
            and (program.buffers[op.target].kind == "staging") == (kind == "staging")
        ),
    )[0]


def test_an_op_that_names_two_spaces_or_the_disk(moving: Program) -> None:
    update = find(moving, lambda op: op.is_update and op.is_flat)[0]
    on_disk = f"opt_state/nu:{moving.buffers[moving.ops[update].reads[0].name].bucket}"
    copy = next(n for n, ref in enumerate(moving.ops[update].reads) if ref.name.startswith("opt_state/nu"))
    ref = moving.ops[update].reads[copy]
    broken = put(moving, update, replaced(moving.ops[update], "reads", copy, replace(ref, name=on_disk)))
    _refused(broken, "spaces", f"names {re.escape(on_disk)}, which lies on disk: a move brings it to memory first")
    hosted = with_buffers(moving, replace(moving.buffers[ref.name], space="host"))
    with pytest.raises(fzero.VerifyError, match=r"\[(spaces|places)\] "):
        verify(hosted)
    gather = _first(moving, "all_gather")
    source = moving.buffers[moving.ops[gather].reads[0].name]
    _refused(with_buffers(moving, replace(source, space="host", at=1 << 30)), "spaces", "lies on the host|no such lane")


def test_a_move_that_has_no_lane_or_changes_what_it_brings(moving: Program) -> None:
    away = {"offload": {"optimizer": "nvme"}, "nvme_path": "/nvme", "update_on": "device"}
    cuda = cases.lowered(zero=3, optimizer=fzero.optim.adamw(1e-3), device="cuda", **away).program
    through = cuda.buffers[cuda.ops[_move(cuda, "disk", "host")].target]
    broken = with_buffers(cuda, replace(through, space="device", at=1 << 30))
    _refused(broken, "spaces", "from disk to device: there is no")
    _refused(with_buffers(cuda, replace(through, dtype=torch.int32)), "spaces", "a move changes nothing")
    copy = moving.buffers[moving.ops[_move(moving, "disk", "device")].target]
    _refused(
        with_buffers(moving, replace(copy, kind="staging", space="disk", at=1 << 30)), "spaces", "only what is held"
    )
    _refused(with_buffers(moving, replace(copy, space="moon")), "form", "lies in moon: none of device, host, disk")


def test_ranges_of_the_file_that_meet_or_begin_off_a_page(moving: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = [b for b in moving.buffers.values() if b.space == "disk"][:2]
    _refused(with_buffers(moving, replace(one, at=other.at)), "places", "share bytes of the rank's file")
    _refused(with_buffers(moving, replace(one, at=64)), "places", "of the rank's file: not a multiple of 4096")
    _refused(with_buffers(moving, replace(one, at=None)), "places", "has no place in the rank's file")
    tiled = find(moving, lambda op: op.moves and op.reads[0].tile is not None and op.reads[0].tile[0] > 0)
    at = next(i for i in tiled if moving.buffers[moving.ops[i].reads[0].name].space == "disk")
    ref = moving.ops[at].reads[0]
    _refused(
        put(moving, at, replaced(moving.ops[at], "reads", 0, replace(ref, tile=(0, 100)))),
        "form",
        "a tile that is none",
    )
    monkeypatch.setattr(sys.modules["fzero.verify.spaces"], "PAGE_BYTES", 8192)
    _refused(moving, "spaces", "begins off a page of the disk")


def test_a_write_back_that_is_lost_or_of_another_tile(moving: Program) -> None:
    """DeepSpeed #2272, #4696 and #6963: training goes on with moments that were never written."""
    for source, target in (("device", "disk"), ("device", "host")):
        at = _move(moving, source, target, "held")
        broken = drop(moving, at, _wait(moving, at))
        _refused(broken, "meaning", "computes something else|tiles are not of one value")
    at = find(
        moving, lambda op: op.moves and op.writes[0].tile is not None and moving.buffers[op.target].space == "disk"
    )
    one, other = moving.ops[at[0]], moving.ops[at[1]]
    swapped = put(put(moving, at[0], replace(one, writes=other.writes)), at[1], replace(other, writes=one.writes))
    with pytest.raises(fzero.VerifyError, match=r"\[(meaning|spaces|lifetimes|needed)\] "):
        verify(swapped)


def test_a_leaf_that_is_written_as_an_own_slice(moving: Program) -> None:
    """No text says it: of a kept program each rank would write its part of the leaf alone."""
    i, n = next((i, n) for i, op in enumerate(moving.ops) for n, ref in enumerate(op.writes) if ref.shape is not None)
    writes = [replace(ref, mine=True) if n == m else ref for m, ref in enumerate(moving.ops[i].writes)]
    _refused(put(moving, i, replace(moving.ops[i], writes=tuple(writes))), "form", "a slice is a flat range")


def test_every_rule_is_broken_by_some_program_here(request: pytest.FixtureRequest) -> None:
    text = request.path.read_text(encoding="utf-8")
    assert [rule for rule in (*RULES, "budget") if f'"{rule}", ' not in text] == []
