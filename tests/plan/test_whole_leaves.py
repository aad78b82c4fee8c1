"""Matrices that an optimizer needs whole: how they are packed onto ranks, and that packing changes no bit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import kept
import pytest
import torch
from helpers import differing, gloo, relative, run, run_reference, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero import tree
from fzero.ir import segments
from fzero.ir.mesh import Mesh
from fzero.ir.op import Op
from fzero.ir.program import Program, wire_bytes
from fzero.ir.records import ALIGN, Bucket, Ref, Slot
from fzero.plan.layout import layout
from fzero.plan.state_plan import Plan
from fzero.plan.whole_leaves import MOST_PADDING, fits, is_whole, pack, separate
from fzero.state import storage
from fzero.verify.rules import verify
from fzero.verify.terms import Undefined, Vec, apply
from lab.mutate.edits import drop, find, put, wait_of

FLAT = torch.ops.fzero.orthogonalize_flat.default

# --- packing ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_packed_leaves_are_aligned_apart_and_on_one_rank(sizes: list[int], world: int) -> None:
    starts, length = pack(sizes, world)
    assert length % (world * ALIGN) == 0
    size = length // world
    ends = 0
    for start, n in sorted(zip(starts, sizes, strict=True)):
        assert start >= ends
        assert start % ALIGN == 0
        assert start // size == (start + n - 1) // size
        ends = start + n
    assert ends <= length
    rounded = [-(-n // ALIGN) * ALIGN for n in sizes]
    assert size <= sum(rounded) / world + max(rounded)  # Graham's bound


def test_the_largest_goes_first_into_the_slice_with_the_least() -> None:
    assert pack([64, 64, 64], 2) == ([0, 128, 64], 256), "of equal ones the first"
    assert pack([64, 1000, 65], 3) == ([2048, 0, 1024], 3 * 1024)
    assert pack([], 2) == ([], 2 * ALIGN)


def test_a_quarter_of_padding_is_allowed() -> None:
    assert fits([128, 64], 2)
    assert not fits([128, 63], 2)
    assert not fits([64], 2)
    assert fits([3], 1) is False, "the ends of leaves are padding too"


def test_whether_a_leaf_lies_in_one_slice() -> None:
    slots = tuple(Slot(f"{i}", start, stop, (stop - start,)) for i, (start, stop) in enumerate(
        [(0, 64), (64, 129), (192, 256), (0, 128), (127, 128), (128, 129)]))  # fmt: skip
    bucket = Bucket("b", 256, slots, "dp")
    assert [is_whole(bucket, i, 2) for i in range(6)] == [True, False, True, True, True, True]


GROUP: dict[str, tuple[object, ...]] = {
    "a": ("a", 1, "columns"), "b": ("b", 1, "columns"), "c": ("c", 1, "others"), "d": ("d", 3, "columns"),
}  # fmt: skip


def separated(sizes: dict[str, list[int]], fill: int = 128, world: int = 2) -> tuple[dict[str, list[int]], list[Any]]:
    """(what is left of each group, the runs). sizes: of each group's classes; a negative one is not wanted whole."""
    every = [n for own in sizes.values() for n in own]
    numbers, groups = iter(range(len(every))), dict[tuple[object, ...], list[int]]()
    for name, own in sizes.items():
        groups[GROUP[name]] = [next(numbers) for _ in own]
    rest, runs = separate(groups, lambda c: every[c] > 0, lambda c: abs(every[c]), fill, world)
    return {str(key[0]): members for key, members in rest.items()}, runs


@pytest.mark.parametrize(
    ("sizes", "rest", "runs"),
    [
        ({"a": [64, 64]}, {}, [("a", 1, [0, 1])]),
        ({"a": [64, 64, 64, 64]}, {}, [("a", 1, [0, 1]), ("a", 1, [2, 3])]),
        ({"a": [64] * 5}, {}, [("a", 1, [0, 1]), ("a", 1, [2, 3, 4])]),  # the last alone would be half padding
        ({"a": [64] * 3}, {}, [("a", 1, [0, 1, 2])]),
        ({"a": [64, -64]}, {"a": [0, 1]}, []),
        ({"d": [64, 64]}, {}, [("d", 3, [0, 1])]),
        ({"d": [64]}, {"d": [0]}, []),
        ({"a": [64], "b": [64]}, {}, [("matrices", 1, [0, 1])]),
        ({"a": [64], "c": [64]}, {"a": [0], "c": [1]}, []),
        ({"a": [64], "d": [64]}, {"a": [0], "d": [1]}, []),
        ({"a": [64], "b": [6400, 64]}, {"b": [1]}, [("matrices", 1, [0, 2])]),
        ({"a": [64, 64], "b": [64]}, {"b": [2]}, [("a", 1, [0, 1])]),
    ],
)
def test_which_leaves_are_packed_together(sizes: Any, rest: Any, runs: Any) -> None:
    assert separated(sizes) == (rest, runs)
    names = [*sizes]
    alone = separated(sizes, world=1)
    assert ([*alone[0]], alone[1]) == (names, []), "one rank holds all whole"


def test_a_bucket_is_at_least_full() -> None:
    """Beyond that it is cut, where the padding allows it."""
    assert separated({"a": [64] * 4}, fill=256)[1] == [("a", 1, [0, 1, 2, 3])]
    assert separated({"a": [64] * 4}, fill=1)[1] == [("a", 1, [0, 1]), ("a", 1, [2, 3])]
    assert separated({"a": [64] * 6}, fill=200)[1] == [("a", 1, [0, 1, 2]), ("a", 1, [3, 4, 5])]


def planned(params: Any, world: int, zero: Any, cap: int = 1 << 20) -> Plan:
    tx = fzero.optim.muon(0.02, others=fzero.optim.adamw(1e-3))
    paths, leaves, _ = tree.flatten({"params": params, "opt_state": tx.init(params)})
    return layout(paths, leaves, mesh=Mesh((("dp", world),)), zero=zero, bucket_bytes=cap)


def matrices(plan: Plan) -> list[str]:
    """The buckets of which some column is named by `matrices`."""
    return [b.bucket or "" for b in plan.buffers.values() if b.bucket and "matrices" in b.name.split(":")[0]]


def cut(plan: Plan) -> set[str]:
    """The matrices that a rank boundary cuts."""
    n = plan.world_size
    return {
        bucket.slots[i].path
        for bucket in (plan.buckets[name] for name in matrices(plan))
        for i in range(len(bucket.slots))
        if not is_whole(bucket, i, n)
    }


def block(width: int) -> dict[str, Tensor]:
    """The matrices of a transformer's layer, and a vector."""
    return {"qkv": torch.zeros(width, 3 * width), "out": torch.zeros(width, width), "g": torch.zeros(width),
            "up": torch.zeros(width, 4 * width), "down": torch.zeros(4 * width, width)}  # fmt: skip


def test_a_layer_with_enough_matrices_keeps_its_bucket_under_every_stage() -> None:
    params = {"layers": [block(64) for _ in range(3)]}
    for zero in (0, 1, 2, 3):
        plan = planned(params, 2, zero)
        assert cut(plan) == set()
        assert [b.split("~")[0] for b in matrices(plan)] == ["layers.0", "layers.1", "layers.2"]
        geometry = {tuple((s.start, s.stop) for s in plan.buckets[name].slots) for name in matrices(plan)}
        assert geometry == {((0, 16384), (16384, 28672), (28672, 45056), (45056, 49152))}  # down qkv | up out
    padding = planned(params, 2, 3).padding_bytes()
    assert padding["params:layers.0"] == (2 * 28672 - 12 * 64 * 64) * 4  # 14 %, and it is shown


def test_a_cap_that_would_leave_too_much_padding_gives_way() -> None:
    params = {"layers": [block(64)]}
    assert len(matrices(planned(params, 2, 3, cap=1 << 30))) == 1
    assert len(matrices(planned(params, 2, 3, cap=64 * 64 * 4))) == 1
    alone = {"layers": [{"a": torch.zeros(64, 64), "b": torch.zeros(64, 64), "c": torch.zeros(64, 64)}] * 2}
    assert len(matrices(planned(alone, 1, 3, cap=64 * 64 * 4))) == 6  # one rank: as ever


def test_layers_share_buckets_where_one_has_too_few_matrices() -> None:
    params = {"layers": [block(64) for _ in range(4)]}
    shared = {zero: planned(params, 8, zero) for zero in (0, 1, 2)}
    for plan in shared.values():
        assert cut(plan) == set()
        assert {b.split("~")[0] for b in matrices(plan)} == {"matrices"}
        for name in matrices(plan):
            bucket = plan.buckets[name]
            assert sum(s.stop - s.start for s in bucket.slots) >= (1 - MOST_PADDING) * bucket.length
    assert len({tuple((n, b.length, b.slots) for n, b in plan.buckets.items()) for plan in shared.values()}) == 1
    assert cut(planned(params, 8, 3))  # a layer gathers its own: they are cut, and gathered for the work


def test_two_layers_are_enough_where_they_fill_the_ranks() -> None:
    plan = planned({"layers": [block(64) for _ in range(4)]}, 8, 1, cap=1)
    assert [len(plan.buckets[name].slots) for name in matrices(plan)] == [8, 8]


def test_a_vocabulary_beside_small_layers_is_left_out() -> None:
    params = {"wte": torch.zeros(4096, 64), "layers": [block(64) for _ in range(4)]}
    plan = planned(params, 8, 1)
    assert cut(plan) == {"wte"}
    shared = [plan.buckets[name] for name in matrices(plan) if name.startswith("matrices")]
    assert shared
    assert all(bucket.padding <= MOST_PADDING * bucket.length for bucket in shared)


def test_other_states_lie_as_before() -> None:
    params = {
        "matrices": {"w": torch.zeros(64, 65), "v": torch.zeros(60, 64)}
    }  # a name in a parameter's path says nothing
    paths, leaves, _ = tree.flatten({"params": params, "opt_state": fzero.optim.adamw(1e-3).init(params)})
    bucket = layout(paths, leaves, mesh=Mesh((("dp", 2),)), zero=3).buckets["small"]
    assert [(s.start, s.stop) for s in bucket.slots] == [(0, 3840), (3840, 8000)]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6), st.integers(1, 5),
       st.sampled_from([0, 1, 2, 3]))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_leaf_comes_back_and_no_bucket_of_packed_leaves_is_mostly_padding(
    shapes: list[tuple[int, int]], world: int, zero: int
) -> None:
    params = {"layers": [{f"w{i}": torch.ones(s) for i, s in enumerate(shapes)} | {"b": torch.ones(3)}] * 2}
    plan = planned(params, world, zero)
    tx = fzero.optim.muon(0.02, others=fzero.optim.adamw(1e-3))
    _, leaves, _ = tree.flatten({"params": params, "opt_state": tx.init(params)})
    drawn = [torch.randn(x.shape).to(x.dtype) if x.ndim else x for x in leaves]
    parts = [storage.shards(plan, drawn, rank) for rank in range(world)]
    for leaf, value in zip(plan.leaves, drawn, strict=True):
        assert torch.equal(storage.join(plan, leaf, parts), value)


# --- any stage, the same bits -----------------------------------------------------------------------------------------


def drawn(depth: int, vocab: int = 8) -> Any:
    g = torch.Generator().manual_seed(0)

    def r(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g) * 0.3

    layers = [{"w": r(20, 24), "v": r(24, 20), "b": r(24)} for _ in range(depth)]
    return {"first": r(vocab, 20), "layers": layers, "last": r(20, 3)}


def loss(p: Any, x: Tensor) -> Tensor:
    h = x @ p["first"]
    for one in p["layers"]:
        h = h + torch.tanh(h @ one["w"] + one["b"]) @ one["v"]
    return ((h @ p["last"]) ** 2).mean()


def batch(vocab: int = 8) -> Any:
    return lambda rank, step: torch.randn(4, vocab, generator=torch.Generator().manual_seed(100 * step + rank))


@cache
def muon(masked: bool, moments: Any) -> fzero.optim.GradientTransformation:
    return fzero.optim.muon(1e-2, mask=HIDDEN if masked else None, others=fzero.optim.adamw(1e-3), moments=moments)


def spec(zero: Any, mask: Any = None, moments: Any = None, **options: Any) -> fzero.Spec:
    assert mask in (None, HIDDEN)
    return fzero.Spec(loss=loss, optimizer=muon(mask is not None, moments), zero=zero, **options)


HIDDEN = ["layers/*/w", "layers/*/v"]
OPTIONS: dict[str, dict[str, Any]] = {
    "hidden": {"mask": HIDDEN},
    "all": {},
    "accumulated": {"mask": HIDDEN, "microbatches": 2, "reduce": "each"},
    "bfloat16 moments": {"mask": HIDDEN, "moments": "bfloat16"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.sampled(1)
def test_every_stage_gives_the_same_bits(options: str, world: int) -> None:
    """World 2 packs within a layer; 3 and 4 need more layers, or under stage 3 gather; at 4 two are left out."""
    chosen = OPTIONS[options]
    runs = [run(spec(zero, **chosen), drawn(3), batch(), world=world, steps=3) for zero in range(4)]
    for zero in (1, 2, 3):
        assert differing(runs[0].final, runs[zero].final) == [], f"zero={zero}"
    if options == "hidden":
        assert bool(cut(runs[1].lowered.plan)) == (world == 4)
        assert bool(cut(runs[3].lowered.plan)) == (world > 2)
        reference, _ = run_reference(spec(0, **chosen), drawn(3), batch(), world=world, steps=3)
        assert all(relative(runs[0].final[path], reference[path]) < 1e-5 for path in reference)


@pytest.mark.acceptance
def test_with_clipping_too_where_stages_share_a_layout() -> None:
    runs = [run(spec(zero, HIDDEN, clip_norm=0.1), drawn(3), batch(), world=2, steps=3) for zero in range(4)]
    assert [differing(runs[0].final, one.final) for one in runs] == [[], [], [], []]


def test_a_matrix_that_a_step_orthogonalises_by_itself(whole: bool) -> None:
    """Of the state as it is, and twice, in a step of one's own: reads of a leaf, and work on work."""

    def step(state: Any, x: Tensor) -> Any:
        value, grads = fzero.value_and_grad(lambda p, x: loss(p, x))(state["params"], x)

        def one(g: Tensor, m: Tensor) -> Tensor:
            if m.ndim != 2:
                return m + g
            first = torch.ops.fzero.orthogonalize(m, 2, 3.0, -4.0, 2.0, 1e-7)
            again = torch.ops.fzero.orthogonalize(first + g, 2, 3.0, -4.0, 2.0, 1e-7)
            return 0.9 * m + again.float()

        moved = tree.map(one, grads, state["matrices"])
        params = tree.map(lambda p, m: p - 0.01 * m, state["params"], moved)
        return {"params": params, "matrices": moved}, {"loss": value}

    params = drawn(2)
    for world in (2, 3) if whole else (3,):
        start = {"params": params, "matrices": tree.map(torch.ones_like, params)}
        specs = [fzero.Spec(step=step, zero=zero) for zero in range(4)]
        finals = [run(one, start, batch(), world=world, steps=2).final for one in specs]
        assert [differing(finals[0], final) for final in finals] == [[], [], [], []]


def real(zero: int) -> dict[str, Tensor]:
    state = fzero.init(drawn(3), spec(zero, HIDDEN))
    for number in range(3):
        state = fzero.step(state, batch()(torch.distributed.get_rank(), number))
    paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
    return dict(zip(paths, leaves, strict=True))


def test_processes_give_the_bits_of_the_interpreter() -> None:
    interpreted = run(spec(3, HIDDEN), drawn(3), batch(), world=2, steps=3).final
    for found in values(gloo(2, real, 3)):
        assert differing(found, interpreted) == []


# --- the program ------------------------------------------------------------------------------------------------------


@cache
def lowered(world: int, zero: int) -> Program:
    return kept.lower(spec(zero, HIDDEN), drawn(3), batch()(0, 0), world).program


def orthogonalising(program: Program) -> list[tuple[int, Op]]:
    found = []
    for i, op in enumerate(program.ops):
        gm = program.segments.get(op.segment)
        if gm is not None and any(n.target is FLAT for n in gm.graph.nodes):
            found.append((i, op))
    return found


def work(program: Program) -> list[int]:
    """Per rank, the elements that it orthogonalises."""
    refs = [ref for _, op in orthogonalising(program) for ref in op.reads]
    ranges = [[program.local_range(ref, rank) for ref in refs] for rank in range(program.world_size)]
    return [sum(stop - start for start, stop in own) for own in ranges]


def test_each_matrix_is_worked_on_by_one_rank_and_nothing_is_gathered_for_it() -> None:
    total = 3 * 2 * 20 * 24
    for zero in (1, 2, 3):
        program = lowered(2, zero)
        assert work(program) == [total // 2, total // 2]
        gathered = {op.reads[0].name for op in program.ops if op.gathers}
        assert all(name.startswith("params") for name in gathered)
        columns = [b for n, b in program.buffers.items() if n[0] in "fo" and b.kind == "scratch" and b.bucket]
        assert columns
        assert all(b.sharded for b in columns)  # what comes and goes with the work is a slice long
    assert work(lowered(3, 1)) == [total // 3] * 3
    assert work(lowered(2, 0)) == [total] * 2


def test_under_stage_3_a_layer_with_too_few_is_gathered_and_worked_on_by_all() -> None:
    program = lowered(3, 3)
    assert work(program) == [3 * 2 * 20 * 24] * 3
    extra = [op for op in program.ops if op.gathers and not op.reads[0].name.startswith("params")]
    assert len(extra) == 3  # the momentum of each layer
    assert all(wire_bytes(program, op) for op in extra)


def test_a_part_of_a_matrix_is_refused() -> None:
    program = lowered(3, 3)
    verify(program)
    at, op = orthogonalising(program)[0]
    gather = find(program, lambda other: other.gathers and other.target == op.reads[0].name)[0]
    alone = replace(op, reads=tuple(replace(r, mine=True) for r in op.reads))
    broken = drop(put(program, at, alone), gather, wait_of(program, gather))
    with pytest.raises(fzero.VerifyError, match=r"\[meaning\] .*a whole leaf, of which a rank boundary leaves each"):
        verify(broken)


def test_a_matrix_of_another_shape_is_refused() -> None:
    program = lowered(2, 3)
    at, op = orthogonalising(program)[0]
    graph = segments.copied(program.segments[op.segment].graph)
    node = next(n for n in graph.nodes if n.target is FLAT)
    node.args = (node.args[0], list(reversed(node.args[1])), *node.args[2:])  # type: ignore[call-overload]
    gm = segments.module(graph)
    key = segments.digest(gm)
    broken = put(program, at, op.with_attrs(segment=key))
    with pytest.raises(fzero.VerifyError, match=r"\[meaning\] .* takes a leaf of shape \(2\d, 2\d\) for one of shape"):
        verify(replace(broken, segments={**program.segments, key: gm}))


def test_two_matrices_at_once_are_refused() -> None:
    vector = Vec({0: "a", 1: "b"}, True, (0, 128), shapes={0: (8, 8), 1: (8, 8)})
    with pytest.raises(Undefined, match="works on one leaf at a time, without padding"):
        apply(FLAT, (vector, [8, 8], 5, 1.0, 1.0, 1.0, 1e-7), {})
    one = replace(vector, slots={0: "a"}, span=(0, 64))
    flat = apply(FLAT, (one, [8, 8], 5, 1.0, 1.0, 1.0, 1e-7), {})
    leaf = apply(torch.ops.fzero.orthogonalize.default, ("a", 5, 1.0, 1.0, 1.0, 1e-7), {})
    assert flat.slots == {0: leaf}


def test_the_flat_op_is_the_op_and_refuses_other_sizes() -> None:
    m = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    rest = (5, 3.4445, -4.775, 2.0315, 1e-7)
    flat = torch.ops.fzero.orthogonalize_flat(m.reshape(-1), [12, 5], *rest)
    assert torch.equal(flat, torch.ops.fzero.orthogonalize(m, *rest).reshape(-1))
    checks = ("test_schema", "test_faketensor")
    for given_ in (m.reshape(-1), m.reshape(-1)[:0]):
        torch.library.opcheck(FLAT, (given_, [12, 5], *rest), test_utils=checks)
    with pytest.raises(ValueError, match=r"m has shape \(59,\), needed \(60,\), the elements of a matrix \(12, 5\)"):
        torch.ops.fzero.orthogonalize_flat(m.reshape(-1)[:59], [12, 5], *rest)


def test_a_reference_to_a_leaf_of_another_rank_is_empty() -> None:
    program = lowered(2, 3)
    _, op = orthogonalising(program)[0]
    for ref in op.reads:
        assert isinstance(ref, Ref)
        sizes = [math.prod([stop - start]) for start, stop in (program.local_range(ref, r) for r in range(2))]
        assert sorted(sizes) == [0, 480]
