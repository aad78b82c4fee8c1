"""Where leaves lie: properties of the layout over random trees, worlds, stages and caps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import stage_of
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero import tree
from fzero.errors import SpecError
from fzero.ir.mesh import Mesh
from fzero.ir.records import ALIGN
from fzero.kernels.codecs import Coding
from fzero.plan.layout import layout
from fzero.plan.pipeline_cut import Cut
from fzero.plan.state_plan import Plan
from fzero.state import storage

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
leaves = st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), shapes, dtypes)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, min_size=1),
    max_leaves=8,
)
worlds = st.integers(1, 5)


def planned(params: Any, world: int, zero: int, cap: int = 1 << 20) -> tuple[Plan, list[torch.Tensor]]:
    """The layout of {params, moments} for parameters of any structure."""
    state = {"params": params, "opt_state": {"mu": params, "nu": params, "count": torch.zeros((), dtype=torch.int64)}}
    paths, values, _ = tree.flatten(state)
    return layout(paths, values, mesh=Mesh((("dp", world),)), zero=zero, bucket_bytes=cap), values


@settings(max_examples=150, deadline=None)
@given(trees, worlds, st.sampled_from([0, 1, 3]), st.sampled_from([64, 4096, 1 << 20]))
def test_every_leaf_has_one_aligned_place_and_comes_back(params: Any, world: int, zero: int, cap: int) -> None:
    has_flat = any(x.is_floating_point() and x.ndim and x.numel() for x in tree.flatten(params)[1])
    if not has_flat:
        return
    plan, values = planned(params, world, zero, cap)
    taken: set[tuple[str, int | None]] = set()
    for leaf, value in zip(plan.leaves, values, strict=True):
        assert (leaf.buffer, leaf.slot) not in taken
        taken.add((leaf.buffer, leaf.slot))
        flat = value.is_floating_point() and value.ndim > 0 and value.numel() > 0
        assert (leaf.slot is not None) == flat
    for bucket in plan.buckets.values():
        assert bucket.length % (world * ALIGN) == 0
        ends = [0, *(slot.stop for slot in bucket.slots)]
        for end, slot in zip(ends, bucket.slots, strict=False):
            assert slot.start >= end
            assert slot.start % ALIGN == 0
            assert slot.stop - slot.start == math.prod(slot.shape)
    values = [torch.randn(v.shape).to(v.dtype) if v.is_floating_point() else v for v in values]
    parts = [storage.shards(plan, values, rank) for rank in range(world)]
    for leaf, value in zip(plan.leaves, values, strict=True):
        assert torch.equal(storage.join(plan, leaf, parts), value)


@settings(max_examples=60, deadline=None)
@given(trees, worlds, st.sampled_from([64, 4096, 1 << 20]))
def test_a_parameter_and_its_moments_share_a_place(params: Any, world: int, cap: int) -> None:
    if not isinstance(params, (list, dict)):
        return
    plan, _ = planned(params, world, 3, cap)
    by_path = {leaf.path: leaf for leaf in plan.leaves}
    for path, leaf in by_path.items():
        if path.startswith("params/") and leaf.slot is not None:
            for moment in ("mu", "nu"):
                other = by_path[path.replace("params/", f"opt_state/{moment}/", 1)]
                assert plan.buffers[other.buffer].bucket == plan.buffers[leaf.buffer].bucket
                assert other.slot == leaf.slot


@settings(max_examples=60, deadline=None)
@given(trees, worlds)
def test_the_layout_does_not_depend_on_the_stage(params: Any, world: int) -> None:
    if not any(x.is_floating_point() and x.ndim and x.numel() for x in tree.flatten(params)[1]):
        return
    geometry = {
        tuple((b.name, b.length, b.slots) for b in planned(params, world, zero)[0].buckets.values())
        for zero in (0, 1, 2, 3)
    }
    assert len(geometry) == 1


def test_the_table() -> None:
    """Stage by stage: what of 4,096 parameters with Adam a rank of four holds, in elements."""
    params = {"w": torch.zeros(4096)}
    held = {}
    for zero in (0, 1, 2, 3):
        plan, _ = planned(params, 4, zero)
        held[zero] = {name.split(":")[0]: b.numel for name, b in plan.buffers.items() if b.bucket}
    whole, shard = 4096, 1024
    assert held[0] == {"params": whole, "opt_state/mu": whole, "opt_state/nu": whole}
    assert held[1] == held[2] == {"params": whole, "opt_state/mu": shard, "opt_state/nu": shard}
    assert held[3] == {"params": shard, "opt_state/mu": shard, "opt_state/nu": shard}


def test_a_world_of_one_shards_nothing() -> None:
    plan, _ = planned({"w": torch.zeros(100)}, 1, 3)
    assert not any(b.sharded for b in plan.buffers.values())


def test_layers_are_cut_at_their_number_and_at_the_cap() -> None:
    params = {"h": [{"w": torch.zeros(64, 64), "b": torch.zeros(64)} for _ in range(3)], "emb": torch.zeros(1000, 64)}
    plan, _ = planned(params, 2, 3)
    assert list(plan.buckets) == ["emb", "h.0", "h.1", "h.2"]
    plan, _ = planned(params, 2, 3, cap=64 * 64 * 4)
    assert list(plan.buckets) == ["emb", "h.0", "h.0~2", "h.1", "h.1~2", "h.2", "h.2~2"]
    assert [s.path for s in plan.buckets["h.0"].slots] == ["h/0/w"]  # matrices before vectors


def test_dotted_names_are_layers_too() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    plan, _ = planned(dict(module.named_parameters()), 2, 3)
    assert list(plan.buckets) == ["0", "1"]


def test_stages_by_path_are_per_leaf_and_the_first_rule_wins() -> None:
    params = {"blocks": [{"w": torch.zeros(64, 64)}] * 2, "head": torch.zeros(64, 64)}
    paths, values, _ = tree.flatten({"params": params})
    plan = layout(paths, values, mesh=Mesh((("dp", 2),)), zero={"blocks/1/**": 0, "blocks/**": 3, "**": 1})
    assert {name: stage_of(b) for name, b in plan.buckets.items()} == {"blocks.0": 3, "blocks.1": 0, "small": 1}


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"block/**": 3, "**": 1}, r"zero rule 'block/\*\*' matches no leaf. Did you mean 'blocks/\*\*'\?"),
        ({"blocks/**": 3}, "zero has no rule for 'params/head'"),
    ],
)
def test_rules_that_miss_are_refused(zero: dict[str, int], message: str) -> None:
    params = {"blocks": [{"w": torch.zeros(64, 64)}], "head": torch.zeros(64, 64)}
    paths, values, _ = tree.flatten({"params": params})
    with pytest.raises(SpecError, match=message):
        layout(paths, values, mesh=Mesh((("dp", 2),)), zero=zero)


def test_stage_1_of_a_custom_state_needs_to_know_its_parameters() -> None:
    paths, values, _ = tree.flatten({"model": {"w": torch.zeros(64)}, "ema": {"w": torch.zeros(64)}})
    with pytest.raises(SpecError, match="Say which leaves are parameters"):
        layout(paths, values, mesh=Mesh((("dp", 2),)), zero=1)
    with pytest.raises(SpecError, match="Say which leaves are parameters"):
        layout(paths, values, mesh=Mesh((("dp", 2),)), zero=2)
    plan = layout(paths, values, mesh=Mesh((("dp", 2),)), zero=3)
    assert {name: b.sharded for name, b in plan.buffers.items()} == {"ema:small": "dp", "model:small": "dp"}
    plan = layout(paths, values, mesh=Mesh((("dp", 2),)), zero=1, params=("model/**",))
    assert {name: b.sharded for name, b in plan.buffers.items()} == {"ema:small": "dp", "model:small": None}


def test_padding_is_listed() -> None:
    plan, _ = planned({"w": torch.zeros(100)}, 2, 3)
    assert plan.padding_bytes() == {name: (128 - 100) * 4 for name in plan.buffers if ":" in name}


def test_tree_paths_name_fields_keys_and_indices() -> None:
    state = fzero.optim.adamw(1e-3).init({"a": [torch.zeros(1)], "b.c": torch.zeros(2)})
    assert tree.flatten(state)[0] == ["count", "mu/a/0", "mu/b.c", "nu/a/0", "nu/b.c"]


def test_leaves_whose_names_look_alike_keep_buffers_of_their_own() -> None:
    state = {
        "a b": torch.ones(64), "a_b": torch.ones(64) * 2, "": {"w": torch.ones(3) * 3}, "w": torch.ones(3) * 4,
        "n m": torch.tensor(5), "n_m": torch.tensor(6),
    }  # fmt: skip
    paths, leaves, _ = tree.flatten(state)
    plan = layout(paths, leaves, mesh=Mesh((("dp", 2),)), zero=3, params=("**",))
    assert len({(leaf.buffer, leaf.slot) for leaf in plan.leaves}) == len(leaves)
    memory = [storage.shards(plan, leaves, rank) for rank in range(2)]
    for leaf, value in zip(plan.leaves, leaves, strict=True):
        assert torch.equal(storage.join(plan, leaf, memory), value), leaf.path


def test_a_zero_rule_may_name_a_leaf_that_lies_in_no_bucket() -> None:
    spec = fzero.Spec(
        loss=lambda p, b: (p["w"].sum() * p["scale"] * b).mean(),
        optimizer=fzero.optim.sgd(0.1),
        zero={"**/scale": 1, "**": 3},
    )
    lowered = fzero.lower(spec, {"w": torch.ones(3), "scale": torch.ones(())}, torch.ones(2), world_size=2)
    assert {leaf.path for leaf in lowered.plan.leaves} >= {"params/scale", "params/w"}


# --- what an option changes of a plan ---------------------------------------------------------------------------------


def of(state: Any, world: int = 2, **options: Any) -> tuple[Plan, dict[str, Any]]:
    """(the plan, the buffer of each leaf by its path)."""
    paths, values, _ = tree.flatten(state)
    plan = layout(paths, values, mesh=Mesh((("dp", world),)), **options)
    return plan, {leaf.path: plan.buffers[leaf.buffer] for leaf in plan.leaves}


ADAFACTOR = {
    "params": {"embed": torch.ones(64, 8), "h": [{"w": torch.ones(8, 6)} for _ in range(4)], "head": torch.ones(8, 64)},
    "opt": {
        "row": {"embed": torch.ones(64), "h": [{"w": torch.ones(8)} for _ in range(4)], "head": torch.ones(8)},
        "mu": {"h": [{"w": torch.ones(8, 6)} for _ in range(4)]},
    },
}


def test_a_pipeline_is_cut_by_the_elements_of_parameters() -> None:
    """Not by those of what mirrors or follows them; an embedding comes before the layers, a head after them."""
    asked: list[Any] = []

    def pipeline(layers: Any, last: int, heads: Any) -> Cut:
        asked.append((dict(layers), last, set(heads)))
        return Cut((1, 0), {name: int(name > "h.1") for name in layers})

    plan, buffer = of(ADAFACTOR, pipeline=pipeline)
    assert asked == [({f"h.{i}": 48 for i in range(4)}, 512, set())]
    role = {path: plan.role_of(b) for path, b in buffer.items()}
    for moment in ("params", "opt/row"):
        assert [role[f"{moment}/h/{i}/w"] for i in range(4)] == [1, 1, 0, 0]
        assert (role[f"{moment}/embed"], role[f"{moment}/head"]) == (1, 0), "a follower goes with its leader"
    assert of(ADAFACTOR)[0].cut is None


def test_a_layer_of_several_leaves_has_the_elements_of_all() -> None:
    asked: list[Any] = []
    state = {
        "params": {"h": [{"w": torch.ones(8, 6), "b": torch.ones(6)}, {"w": torch.ones(2, 2)}], "n": torch.ones(5)}
    }

    def pipeline(layers: Any, last: int, heads: Any) -> Cut:
        asked.append((dict(layers), last, set(heads)))
        return Cut((0, 1), {"h.0": 0, "h.1": 1}, heads=heads)

    of(state, pipeline=pipeline)
    assert asked == [({"h.0": 54, "h.1": 4}, 5, set())]
    state["params"] |= {"wte": torch.ones(10, 6), "wpe": torch.ones(7, 6)}
    plan, buffer = of(state, pipeline=pipeline)
    assert asked[1] == ({"h.0": 54, "h.1": 4}, 65, {"wte"}), "the head too, so it is behind the layers"
    assert {path: plan.role_of(b) for path, b in buffer.items() if "h/" not in path} == {
        "params/n": 1, "params/wte": 1, "params/wpe": 0,
    }  # fmt: skip


def test_what_is_on_disk_has_pages_of_its_own() -> None:
    """One buffer behind the other in the rank's file."""
    state = {"params": {"a": torch.ones(3000), "b": torch.ones(8), "c": torch.ones(64)}}
    plan, buffer = of(state, zero=3, bucket_bytes=1024, home=lambda path: "device" if path.endswith("b") else "disk")
    places = [(b.at, b.nbytes) for b in plan.buffers.values() if b.space == "disk"]
    assert places == [(0, 6144), (8192, 256)]
    assert buffer["params/b"].space == "device"
    assert buffer["params/b"].at is None


@pytest.mark.parametrize(("zero", "axes"), [(0, None), (1, "dp"), (2, "dp"), (3, "dp")])
def test_parameters_that_are_gathered_in_fewer_bits_are_held_as_what_updates_them(zero: int, axes: str | None) -> None:
    state = {"params": {"w": torch.ones(64, 2)}, "mu": {"w": torch.ones(64, 2)}}
    cast: dict[str, Any] = {"compute": lambda path, leaf: torch.bfloat16}
    for options in (cast, {"coding": lambda path, leaf: Coding(gather="int8")}):
        _, buffer = of(state, zero=zero, **options)
        assert (buffer["params/w"].sharded, buffer["mu/w"].sharded) == (axes, axes)
    _, buffer = of(state, zero=zero)
    assert (buffer["params/w"].sharded, buffer["mu/w"].sharded) == ("dp" if zero == 3 else None, axes)
    _, buffer = of(state, zero=zero, world=1, **cast)
    assert buffer["params/w"].sharded is None


def test_leaves_in_no_bucket_have_buffers_of_their_own() -> None:
    state = {"params": {"w": torch.ones(4), "n": torch.tensor(1.0), "i": torch.ones(4).long()}, "own": torch.ones(3)}
    plan, buffer = of(state, per_rank=("own",), zero=0)
    for path, shape, per_rank in (("params/n", (), False), ("params/i", (4,), False), ("own", (3,), True)):
        assert (buffer[path].shape, buffer[path].bucket, buffer[path].kind) == (shape, None, "state"), path
        assert buffer[path].per_rank == per_rank
    assert [leaf.path for leaf in plan.leaves if leaf.slot is not None] == ["params/w"]
    assert [leaf.path for leaf in plan.leaves] == tree.flatten(state)[0]


def test_without_options_every_rank_holds_all_of_the_state_on_its_device() -> None:
    plan, buffer = of({"params": {"w": torch.ones(64)}, "mu": {"w": torch.ones(64)}})
    assert {(b.sharded, b.space, b.per_rank, b.numel) for b in buffer.values()} == {(None, "device", False, 128)}
    (row,) = plan.bucket_layouts.values()
    assert (str(row.params), str(row.rest), row.wire, plan.cut) == ("", "", None, None)


def test_a_column_says_of_which_kind_and_entry_it_is() -> None:
    _, buffer = of({"params": {"w": torch.ones(4)}, "opt": {"mu": {"w": torch.ones(4).bfloat16()}}})
    said = {path: (b.kind, b.dtype, b.entry) for path, b in buffer.items()}
    assert said == {
        "params/w": ("param", torch.float32, "params"), "opt/mu/w": ("optimizer", torch.bfloat16, "opt/mu"),
    }  # fmt: skip
