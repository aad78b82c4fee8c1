"""Hierarchical data parallelism: every way to place the state over two data axes has the bits of every other.

Gradients are added over the inner axis first. So all of them are compared with zero=3 on the same mesh.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import cases
import pytest
import torch
from helpers import Run, run

import fzero
from fzero import optim
from fzero.errors import SpecError

INIT, LOSS = cases.gpt(64, 16, 2, 2)
PLAIN: dict[str, Any] = dict(zip(("init", "loss"), cases.tied(64, 16, 2), strict=True))  # where ops do not matter
ADAMW = optim.adamw(1e-2)
HFSDP = {"params": ("dp",), "grads": ("dp",), "optimizer": ("dp_out", "dp")}
WAYS: dict[str, Any] = {"0": 0, "1": 1, "2": 2, "hsdp": "hsdp", "hpz": "hpz", "optimizer over both": HFSDP}
OTHERS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "each": {"microbatches": 2, "reduce": "each"},
    "shared": {"microbatches": 2, "reduce": "end", "transfers": "shared"},
    "bf16": {"precision": "bf16", "remat": "full"},
    "bf16 parameters": {"precision": "bf16_params"},
    "muon": {"optimizer": optim.muon(0.02, others=optim.adamw(1e-2))},
    "8-bit": {"optimizer": optim.adamw8bit(1e-2)},
    "small buckets": {"bucket_bytes": 1024},
}


def tokens(rank: int, step: int) -> Any:
    return cases.tokens(4, 8, 64, rank + 10 * step)


def spec(**given: Any) -> fzero.Spec:
    made = {"loss": LOSS, "optimizer": ADAMW, "transfers": "p2p", "mesh": {"dp_out": 2, "dp": 2}}
    return fzero.Spec(**{**made, **given})


def trained(steps: int = 3, world: int = 4, init: Any = INIT, **given: Any) -> Run:
    return run(spec(**given), init(fzero.random.key(0)), tokens, world=world, steps=steps)


def same(a: Run, b: Run) -> None:
    differing = [p for p, x, y in zip(a.paths, a.leaves[-1], b.leaves[-1], strict=True) if not torch.equal(x, y)]
    assert differing == []
    assert a.losses() == b.losses()


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.sampled(1)
def test_every_way_has_the_bits_of_zero_3(others: str, whole: bool) -> None:
    given = OTHERS[others] if whole else {**PLAIN, **OTHERS[others]}
    expected = trained(zero=3, **given)
    for zero in WAYS.values() if whole else (1, "hsdp", "hpz", HFSDP):
        same(expected, trained(zero=zero, **given))


@pytest.mark.parametrize(("mesh", "world"), [({"dp_out": 2, "dp": 3}, 6), ({"dp_out": 3, "dp": -1}, 6)])
@pytest.mark.sampled(1)
def test_uneven_meshes(mesh: dict[str, int], world: int) -> None:
    expected = trained(**PLAIN, zero=3, mesh=mesh, world=world, steps=2, clip_norm=0.5)
    same(expected, trained(**PLAIN, zero=1, mesh=mesh, world=world, steps=2, clip_norm=0.5))
    hsdp, hfsdp = (trained(**PLAIN, zero=zero, mesh=mesh, world=world, steps=2) for zero in ("hsdp", HFSDP))
    same(hsdp, hfsdp)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.sampled(1)
def test_with_a_pipeline(schedule: str, whole: bool) -> None:
    """Three axes, 8 ranks."""
    given: dict[str, Any] = {"microbatches": 4, "reduce": "end"}
    plain = trained(**PLAIN, zero=3, steps=2, **given)
    for zero in ("hsdp", "hpz", HFSDP) if whole else ("hpz",):
        mesh = {"pp": 2, "dp_out": 2, "dp": 2}
        same(plain, trained(**PLAIN, zero=zero, mesh=mesh, world=8, steps=2, pipeline=schedule, **given))


def test_a_mesh_with_one_outer_rank_is_the_flat_one() -> None:
    flat = trained(**PLAIN, zero=3, mesh={"dp": 4}, steps=2)
    same(flat, trained(**PLAIN, zero="hsdp", mesh={"dp_out": 1, "dp": 4}, steps=2))
    same(flat, trained(**PLAIN, zero=3, mesh={"dp_out": 4, "dp": 1}, steps=2))


def test_what_crosses_which_axis() -> None:
    """Per step and bucket: HSDP crosses the outer axis once, with slices; hpZ once more, for the parameters."""

    def counted(zero: Any) -> Counter[str]:
        lowered = fzero.lower(
            spec(zero=zero, microbatches=2, reduce="each", loss=PLAIN["loss"]),
            PLAIN["init"](fzero.random.key(0)),
            tokens(0, 0),
            world_size=4,
        )
        return Counter(f"{op.kind} {op.axis}" for op in lowered.program.ops if op.is_collective and not op.row.small)

    hsdp, hpz, flat = counted("hsdp"), counted("hpz"), counted(3)
    buckets = hsdp["all_reduce dp_out"]
    assert hsdp == {
        "all_gather dp": hsdp["all_gather dp"],
        "reduce_scatter dp": 2 * buckets,
        "all_reduce dp_out": buckets,
    }
    assert hpz["all_gather dp_out"] == hpz["reduce_scatter dp_out"] == buckets
    assert flat["all_gather dp_out"] == flat["all_gather dp"] == hpz["all_gather dp"] > 2 * buckets
    assert flat["reduce_scatter dp_out"] == buckets


@pytest.mark.acceptance  # `test_hierarchy_oracles` has the formulas
def test_what_a_rank_holds() -> None:
    def bytes_of(zero: Any) -> int:
        return fzero.lower(spec(zero=zero), INIT(fzero.random.key(0)), tokens(0, 0), world_size=4).plan.state_bytes

    whole, quarter, half, mixed = bytes_of(0), bytes_of(3), bytes_of("hsdp"), bytes_of(HFSDP)
    assert half == pytest.approx(whole / 2, rel=0.01)
    assert quarter == pytest.approx(whole / 4, rel=0.01)
    assert mixed == pytest.approx(whole / 3 * (1 / 2 + 2 / 4), rel=0.01)  # parameters, two moments
    assert bytes_of("hpz") == quarter


def test_bad_placements_say_what_fits() -> None:
    with pytest.raises(SpecError, match="needed two data axes"):
        spec(zero="hsdp", mesh={"dp": 4})
    with pytest.raises(SpecError, match="'hsdp' or 'hpz'"):
        spec(zero="fsdp")
    with pytest.raises(SpecError, match="the inner axis 'dp', before one outside of it"):
        spec(zero={"params": ("dp_out",), "grads": ("dp",), "optimizer": ("dp",)})
    with pytest.raises(SpecError, match="params over no more axes than grads"):
        spec(zero={"params": ("dp", "dp_out"), "grads": ("dp",), "optimizer": ("dp",)})
    with pytest.raises(SpecError, match=r"a tuple of axes of the mesh, of \['dp_out', 'dp'\]"):
        spec(zero={"params": ("tp",), "grads": ("dp",), "optimizer": ("dp",)})
    with pytest.raises(SpecError, match="all of params, grads and optimizer"):
        spec(zero={"params": ("dp",)})
    with pytest.raises(fzero.CaptureError, match="the data axes dp_out and dp, and it runs over all of them"):
        fzero.lower(
            fzero.Spec(step=lambda s, b: (s, fzero.psum(b, "dp")), mesh={"dp_out": 2, "dp": 2}, zero=0),
            {"w": torch.ones(4)},
            torch.ones(4),
        )
