"""fill_buckets: which leaves share a bucket, in which order, and where each begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero
from fzero import tree
from fzero.ir.mesh import Mesh
from fzero.ir.records import Bucket
from fzero.kernels.codecs import Coding
from fzero.plan.fill_buckets import SMALL_BYTES, round_up, unused
from fzero.plan.layout import layout


def buckets(params: Any, world: int = 2, cap: int = 1 << 20, **options: Any) -> dict[str, Bucket]:
    paths, values, _ = tree.flatten({"params": params})
    return dict(layout(paths, values, mesh=Mesh((("dp", world),)), bucket_bytes=cap, **options).buckets)


def places(bucket: Bucket) -> dict[str, tuple[int, int]]:
    return {slot.path: (slot.start, slot.stop) for slot in bucket.slots}


def w(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_leaves_begin_at_multiples_of_64_and_matrices_come_first() -> None:
    (bucket,) = buckets({"b": w(70), "c": w(3), "v": w(2, 3), "w": w(10, 10)}).values()
    assert places(bucket) == {"v": (0, 6), "w": (64, 164), "b": (192, 262), "c": (320, 323)}
    assert bucket.length == 384
    (five,) = buckets({"b": w(70)}, world=5).values()
    assert five.length == 320, "a slice of a rank has a multiple of 64 elements"


def test_a_bucket_is_cut_where_it_is_full() -> None:
    """A larger leaf has one to itself; what fits exactly stays together. Places are counted, in whole 64s."""
    params = {"h": [{"a": w(64), "b": w(64), "c": w(65), "d": w(500), "e": w(64)}]}
    found = buckets(params, world=1, cap=4 * 128)
    assert {name: [slot.path[-1] for slot in bucket.slots] for name, bucket in found.items()} == {
        "h.0": ["a", "b"], "h.0~2": ["c"], "h.0~3": ["d"], "h.0~4": ["e"]
    }  # fmt: skip
    assert {(b.layer, b.numbered) for b in found.values()} == {("", True), ("h.0", True)}
    assert [len(b.slots) for b in buckets(params, world=1, cap=4 * 1000).values()] == [5]


def test_layers_without_a_number_share_a_bucket_if_they_are_small() -> None:
    """All leaves of a layer count."""
    half = SMALL_BYTES // 8
    params = {"a": {"x": w(half), "y": w(half)}, "b": {"x": w(half), "y": w(half - 1)}, "c": w(3), "h": [w(3)]}
    found = buckets(params)
    assert {name: [slot.path for slot in bucket.slots] for name, bucket in found.items()} == {
        "a": ["a/x", "a/y"], "small": ["b/x", "b/y", "c"], "h.0": ["h/0"]
    }  # fmt: skip
    assert {name: bucket.numbered for name, bucket in found.items()} == {"a": False, "small": False, "h.0": True}


@pytest.mark.parametrize(
    "options",
    [
        {"zero": {"h/0/a": 3, "**": 1}},
        {"compute": lambda path, leaf: torch.bfloat16 if path.endswith("a") else leaf.dtype},
        {"home": lambda path: "host" if path.endswith("a") else "device"},
    ],
    ids=["stage", "cast", "home"],
)  # fmt: skip
def test_leaves_of_a_bucket_are_alike(options: dict[str, Any]) -> None:
    params = {"h": [{"a": w(8, 8), "b": w(8, 8)}]}
    assert [len(bucket.slots) for bucket in buckets(params).values()] == [2]
    assert [len(bucket.slots) for bucket in buckets(params, **options).values()] == [1, 1]


def test_leaves_of_two_dtypes_are_apart() -> None:
    found = buckets({"h": [{"a": w(8, 8), "b": w(8, 8, dtype=torch.bfloat16)}]})
    assert [[slot.path for slot in bucket.slots] for bucket in found.values()] == [["h/0/a"], ["h/0/b"]]


def test_a_wire_is_that_of_the_codec() -> None:
    paths, values, _ = tree.flatten({"params": {"a": w(64, 64)}})
    plan = layout(paths, values, mesh=Mesh((("dp", 2),)), coding=lambda path, leaf: Coding(reduce="int8"))
    (row,) = plan.bucket_layouts.values()
    assert row.wire is not None
    plain = layout(paths, values, mesh=Mesh((("dp", 2),)))
    assert next(iter(plain.bucket_layouts.values())).wire is None


def test_matrices_that_are_wanted_whole_are_packed_first() -> None:
    made = {"h": [{"a": torch.zeros(64, 64), "b": torch.zeros(64, 64), "g": torch.zeros(64)}]}
    tx = fzero.optim.muon(0.02, others=fzero.optim.adamw(1e-3))
    paths, values, _ = tree.flatten({"params": made, "opt_state": tx.init(made)})
    plan = layout(paths, values, mesh=Mesh((("dp", 2),)), zero=3)
    first, second = plan.buckets.values()
    assert places(first) == {"h/0/a": (0, 4096), "h/0/b": (4096, 8192)}
    assert places(second) == {"h/0/g": (0, 64)}


def test_a_free_name_and_a_round_number() -> None:
    assert unused("a", ()) == "a"
    assert unused("a", ("b",)) == "a"
    assert unused("a", ("a", "a~2", "a~4")) == "a~3"
    assert unused("a", ("a",)) == "a~2"
    assert [round_up(n, 64) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
