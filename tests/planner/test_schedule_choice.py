"""The schedule of a pipeline that was left open: no other is predicted faster, and one that was given stays."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import optim
from fzero.hardware import Device, Hardware, NetworkLevel
from fzero.ir.mesh import Mesh
from fzero.pipeline import SCHEDULES
from fzero.planner import schedule_choice
from fzero.planner.programs import by_rates, step_seconds

MACHINE = Hardware(
    name="toy",
    device=Device(memory_gib=1, memory_bytes=1e10, flops={"fp32": 1e11}, launch_us=1),
    levels=(NetworkLevel(name="node", size=2, bytes=2e9, latency_us=5),),
)
PARAMS = {"layers": [{"w": torch.empty(128, 128, device="meta")} for _ in range(4)]}
BATCH = torch.empty(64, 128, device="meta")
MESH = {"pp": 2, "dp": 1}


def loss(p: Any, x: Tensor) -> Tensor:
    for layer in p["layers"]:
        x = torch.tanh(x @ layer["w"])
    return x.square().mean()


def spec(**given: Any) -> fzero.Spec:
    fields = {"mesh": MESH, "zero": 0, "remat": "none", "offload": None, "microbatches": 4, **given}
    return fzero.Spec(loss=loss, optimizer=optim.sgd(1e-3), **fields)  # type: ignore[arg-type]


def planned(one: fzero.Spec) -> fzero.Planned:
    return fzero.plan(one, PARAMS, BATCH, world_size=2, hardware=MACHINE)


def test_no_schedule_is_faster() -> None:
    found = planned(spec())
    mesh = Mesh(tuple(MESH.items()))
    seconds = {}
    for name in SCHEDULES:
        lowered = fzero.lower(spec(pipeline=name), PARAMS, BATCH, decisions=by_rates(MACHINE, mesh))
        seconds[name] = step_seconds(lowered, MACHINE)
    assert found.seconds == min(seconds.values()) < seconds["1f1b"]
    assert found.spec.pipeline == min(seconds, key=seconds.__getitem__)
    assert "slower" in found.choices["pipeline"].reason
    pasted = eval(found.python(), {"dataclasses": dataclasses, "spec": spec()})
    assert fzero.lower(pasted, PARAMS, BATCH).digest == found.lowered.digest


def test_a_pipeline_that_only_idles_too_long_is_tried_with_other_schedules() -> None:
    """The data ranks win over 1F1B, and another schedule over both."""
    least = spec(microbatches=2)
    data = planned(spec(microbatches=2, mesh={"dp": 2}))
    assert data.seconds < planned(spec(microbatches=2, pipeline="1f1b")).seconds
    found = planned(spec(microbatches=2, mesh="auto"))
    assert found.seconds == planned(least).seconds < data.seconds * 0.9
    assert (dict(found.spec.mesh or {}), found.spec.pipeline) == (MESH, "zb-h1")


def test_the_stage_is_the_best_under_the_schedule_that_was_chosen() -> None:
    """1F1B is fastest at stage 1, and what is faster than it at stage 3."""
    machine = dataclasses.replace(MACHINE, levels=(dataclasses.replace(MACHINE.levels[0], size=4),))
    pinned: dict[str, Any] = {"mesh": {"pp": 2, "dp": 2}, "remat": "none", "offload": None, "microbatches": 4}

    def of(**given: Any) -> fzero.Planned:
        one = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), **pinned, **given)
        return fzero.plan(one, PARAMS, BATCH, world_size=4, hardware=machine)

    found = of()
    assert found.spec.zero == 3
    assert found.seconds == of(zero=3).seconds < of(zero=1).seconds


def test_a_schedule_that_was_given_where_the_mesh_is_open() -> None:
    found = fzero.plan(spec(mesh="auto", pipeline="zb-h1"), PARAMS, BATCH, world_size=2, hardware=MACHINE)
    assert found.spec.pipeline == ("zb-h1" if "pp" in found.spec.mesh else None)


def test_one_that_was_given_stays_and_without_a_pipeline_there_is_none() -> None:
    assert planned(spec(pipeline="gpipe")).spec.pipeline == "gpipe"
    alone = planned(spec(mesh={"dp": 2}))
    assert "pipeline" not in alone.choices
    assert alone.spec.pipeline is None


DEEP = {"layers": [{"w": torch.empty(128, 128, device="meta")} for _ in range(24)]}


def keeps_much(p: Any, x: Tensor) -> Tensor:
    for layer in p["layers"]:
        x = x + torch.tanh((x @ layer["w"]).sin().exp()).cos()
    return x.square().mean()


def test_of_a_deep_model_an_interleaved_pipeline_is_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where programs have many ops, 1F1B is not lowered: its shallow programs and the idle shares say enough."""
    monkeypatch.setattr(schedule_choice, "OPS", 0)
    found = fzero.plan(spec(), DEEP, BATCH, world_size=2, hardware=MACHINE)
    rows = {row.candidate.pipeline: row for row in found.table}
    assert found.spec.pipeline in ("interleaved", fzero.Pipeline("interleaved", 4))
    assert [rows[name].probed for name in (None, found.spec.pipeline)] == [True, False]
    plain = fzero.lower(spec(), DEEP, BATCH, decisions=by_rates(MACHINE, Mesh(tuple(MESH.items()))))
    assert rows[None].seconds == pytest.approx(step_seconds(plain, MACHINE), 1e-6)
    assert found.seconds < rows[None].seconds
    pasted = eval(found.python(), {"dataclasses": dataclasses, "spec": spec(), "Pipeline": fzero.Pipeline})
    assert pasted.pipeline == found.spec.pipeline


@pytest.mark.acceptance
def test_layers_that_are_recomputed_in_an_interleaved_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was foretold of a schedule is corrected by what came out: the answer is the fastest row, lowered in full."""
    monkeypatch.setattr(schedule_choice, "OPS", 0)
    fields = {"loss": keeps_much, "optimizer": optim.sgd(1e-3), "mesh": MESH, "zero": 0, "offload": None}
    some = fzero.Spec(**fields, microbatches=4)  # type: ignore[arg-type]
    found = fzero.plan(
        some, DEEP, torch.empty(1024, 128, device="meta"), world_size=2, hardware=MACHINE, memory=15_000_000
    )
    first = found.table[0]
    assert "of 24 layers" in str(first.candidate.remat)
    assert first.candidate.chunks > 1
    assert not first.probed
    assert (found.seconds, found.peak) == (first.seconds, first.peak)
    assert found.peak <= 15_000_000
