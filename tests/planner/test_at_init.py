"""Spec(mesh="auto"): rank 0 plans at fzero.init, every rank takes what it chose, and a checkpoint holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, values
from torch import Tensor

import fzero
from fzero import P, backend, groups, optim
from fzero.checkpoint.manifest import MANIFEST, MARKER, marker_of, read
from fzero.errors import CorruptError, SpecError
from fzero.hardware import Device, Hardware, Host, NetworkLevel
from fzero.planner.at_init import preset_of
from fzero.planner.chosen import chosen_of, with_chosen

BATCH = torch.empty(8, 32, device="meta")
TOY = Hardware(
    name="toy",
    device=Device(memory_gib=0.01, memory_bytes=1e10, flops={"fp32": 1e11}, launch_us=1),
    levels=(NetworkLevel(name="node", size=4, bytes=2e9, latency_us=5),),
    host=Host(memory_gib=1, to_device_bytes=1e9, from_device_bytes=1e9, adam_bytes=1e10),
)


def loss(p: Any, x: Tensor) -> Tensor:
    for layer in p["layers"]:
        x = torch.tanh(x @ layer["w"])
    return x.square().mean()


def spec(**given: Any) -> fzero.Spec:
    fields = {"mesh": "auto", "remat": "none", "offload": None, **given}  # few are open: a plan is quick
    return fzero.Spec(**{"loss": loss, "optimizer": optim.adamw(1e-3), **fields})


def params(key: Any) -> Any:
    return {"layers": [{"w": fzero.random.normal(k, (32, 32))} for k in fzero.random.split(key)]}


def planned_init(**given: Any) -> fzero.State:
    return fzero.init(params, spec(**given), batch_like=BATCH, hardware=TOY)


def test_it_is_what_a_plan_says_and_a_resume_takes_it(tmp_path: Path) -> None:
    state = planned_init(microbatches=2)
    said = fzero.plan(spec(microbatches=2), params, BATCH, world_size=1, hardware=TOY)
    made = state.runtime.spec  # type: ignore[attr-defined]
    assert chosen_of(made) == chosen_of(said.spec)
    assert made.microbatches == 2, "what is given is pinned"
    assert "microbatches" not in made.planned
    state = fzero.step(state, torch.ones(8, 32))
    fzero.save(state, tmp_path)
    assert fzero.checkpoint.manifest(tmp_path).plan == chosen_of(made)
    again = fzero.load(tmp_path, spec(microbatches=2))
    assert chosen_of(again.runtime.spec) == chosen_of(made)  # type: ignore[attr-defined]
    other = fzero.load(tmp_path, spec(microbatches=4, remat="full", prefetch=0))
    resumed = other.runtime.spec  # type: ignore[attr-defined]
    assert (resumed.microbatches, resumed.remat, resumed.prefetch) == (4, "full", 0), "what is given now holds"
    assert resumed.bucket_bytes == made.bucket_bytes


@pytest.mark.parametrize("pipeline", [fzero.Pipeline("interleaved", chunks=2), "zb-v"])
def test_the_schedule_of_a_pipeline_travels(pipeline: Any) -> None:
    made = spec(mesh={"pp": 2, "dp": 1}, zero=0, microbatches=4, pipeline=pipeline)
    told = json.loads(json.dumps(chosen_of(made.but(planned=["mesh", "zero", "microbatches", "pipeline"]))))
    taken = with_chosen(spec(), told, "the plan of rank 0")
    whole = {"layers": [{"w": torch.empty(32, 32, device="meta")} for _ in range(4)]}
    own, other = (fzero.lower(one, whole, BATCH, world_size=2) for one in (made, taken))
    assert str(own) == str(other)


def two_ranks(folder: str) -> Any:
    state = planned_init()
    data = torch.ones(8 // state.runtime.plan.mesh.data_ranks, 32)  # type: ignore[attr-defined]
    state = fzero.step(state, data)
    fzero.save(state, folder)
    again = fzero.load(folder, spec())
    said = []
    for hardware in ("h10", None):  # what rank 0 finds wrong before it plans
        try:
            fzero.init(params, spec(), batch_like=BATCH, hardware=hardware)
        except SpecError as error:
            said.append(str(error))
    made = [chosen_of(one.runtime.spec) for one in (state, again)]  # type: ignore[attr-defined]
    return made, said, again.step


def test_two_ranks_take_the_plan_of_the_first_and_its_errors(tmp_path: Path) -> None:
    (one, said, step), (two, told, _) = values(gloo(2, two_ranks, str(tmp_path)))
    assert one == two
    assert one[0] == one[1]
    assert step == 1
    assert one[0] == chosen_of(fzero.plan(spec(), params, BATCH, world_size=2, hardware=TOY).spec)
    assert "Did you mean 'h100'" in said[0]
    assert "there is no preset for cpu" in said[1]
    assert [f"planning failed on rank 0: {text}" for text in said] == told
    with pytest.raises(SpecError, match=r"is for 2 ranks, and here are 1. Plan for these"):
        fzero.load(tmp_path, spec())


def test_what_it_needs() -> None:
    with pytest.raises(SpecError, match="a plan needs the shapes of a batch: give init batch_like="):
        fzero.init(params, spec())
    with pytest.raises(SpecError, match=r"are read with Spec\(mesh='auto'\)"):
        fzero.init(params, spec(mesh=None), batch_like=BATCH)
    with pytest.raises(SpecError, match="fzero doctor --hardware"):
        fzero.init(params, spec(), batch_like=BATCH)
    with pytest.raises(fzero.SpecError, match="nothing fits 1 rank with"):
        fzero.init(params, spec(device_bytes=1000, zero=0, microbatches=1), batch_like=BATCH, hardware=TOY)


def test_a_checkpoint_without_a_plan_and_a_plan_that_is_none(tmp_path: Path) -> None:
    state = fzero.init(params, spec(mesh=None))
    folder = fzero.save(state, tmp_path / "plain")
    assert json.loads((folder / MANIFEST).read_text())["version"] == 1
    with pytest.raises(SpecError, match=r"holds no plan, for its state was not planned. Give mesh="):
        fzero.load(folder, spec())
    folder = fzero.save(planned_init(), tmp_path / "planned")
    whole = json.loads((folder / MANIFEST).read_text())
    assert whole["version"] == 4
    for plan, error, message in (
        ([], CorruptError, "plan"),
        ({"zero": 9, "mesh": {"dp": 1}}, SpecError, "zero"),
        ({"mesh": 2}, SpecError, "no plan chooses that"),
        ({"loss": "print"}, SpecError, "no plan chooses that"),
        ({"mesh": {"dp": 1}, "shard": {"w": [{"axis": "tp"}]}}, SpecError, "no plan chooses that"),
    ):
        text = json.dumps({**whole, "plan": plan}).encode()
        (folder / MANIFEST).write_bytes(text)
        (folder / MARKER).write_bytes(marker_of(text))
        with pytest.raises(error, match=message):
            fzero.load(folder, spec())
    del whole["plan"]
    text = json.dumps(whole).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / MARKER).write_bytes(marker_of(text))
    with pytest.raises(CorruptError, match="has no 'plan'"):
        read(folder)


def test_a_run_by_the_checkpointer(tmp_path: Path) -> None:
    with fzero.Checkpointer(tmp_path) as run:
        state = fzero.step(run.resume(params, spec(), batch_like=BATCH, hardware=TOY), torch.ones(8, 32))
        run.save(state)
    with fzero.Checkpointer(tmp_path) as run:
        again = run.resume(params, spec())
    assert again.step == 1
    assert chosen_of(again.runtime.spec) == chosen_of(state.runtime.spec)  # type: ignore[attr-defined]


def test_a_plan_is_saved_whatever_it_chose_and_goes_with_what_is_given_then(tmp_path: Path) -> None:
    concrete = {"mesh": {"dp": 1}, "zero": 0, "microbatches": 1}
    said = fzero.plan(spec(**concrete), params, BATCH, world_size=1, hardware=TOY, codecs=("int8",))
    assert "precision" in said.spec.planned, "none was taken, and that is a choice"
    fzero.save(fzero.init(params, said.spec), tmp_path / "a")
    again = fzero.load(tmp_path / "a", spec(prefetch=None, reduce=None)).runtime.spec  # type: ignore[attr-defined]
    assert again.mesh == {"dp": 1}, "the mesh that was given to the plan"
    assert again.prefetch == said.spec.prefetch, "None is open"
    moved = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), **concrete, offload="optimizer")
    lies = fzero.plan(moved, params, BATCH, world_size=1, hardware=TOY).spec
    assert "update_on" in lies.planned
    fzero.save(fzero.init(params, lies), tmp_path / "b")
    assert fzero.load(tmp_path / "b", spec(offload=None)).runtime.spec.update_on is None  # type: ignore[attr-defined]


def broken_ranks() -> list[str]:
    def reads(p: Any, x: Any) -> Any:
        return x["none"].sum()

    def types(p: Any, x: Any) -> Any:
        raise TypeError("of the loss")

    said = []
    for fn in (reads, types):
        try:
            fzero.init(params, spec(loss=fn), batch_like={"x": BATCH}, hardware=TOY)
        except (KeyError, TypeError, SpecError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_an_error_of_the_loss_on_rank_0_is_one_on_all() -> None:
    first, second = values(gloo(2, broken_ranks))
    assert [text.partition(":")[0] for text in first] == ["KeyError", "TypeError"]
    assert second == [f"SpecError: planning failed on rank 0: {text}" for text in first]


def slow_ranks(rank_0_takes: float) -> str:
    import time

    import torch.distributed as dist

    from fzero.comm.agree import from_first
    from fzero.session.world import World

    world = World.open("init", spec(mesh=None, timeout=2.0), {"w": torch.ones(1)})
    world.agree("planning", "")  # as init does, so that the heartbeats begin
    if dist.get_rank() == 0:
        time.sleep(rank_0_takes)
    return from_first("said" if world.rank == 0 else "", "planning", world.rank, world.size, world.group)


@pytest.mark.acceptance
def test_the_first_rank_may_think_longer_than_the_timeout() -> None:
    assert values(gloo(2, slow_ranks, 5.0)) == ["said", "said"]


def test_rules_and_codecs_come_back_as_they_were() -> None:
    rules = {
        "layers/*/w": P(None, groups("tp", 3)),
        "a": P(("tp", "mp")),
        "b": P(groups(("tp", "mp"), 2), "x"),
        "c": P(),
    }
    precision = fzero.Precision(compute="bf16", gather="int8", reduce="int4")
    names = ("mesh", "shard", "precision", "zero", "prefetch", "pipeline")
    made = spec(
        mesh={"pp": 1, "dp_out": 1, "dp": 1, "tp": 1, "mp": 1, "x": 1},
        shard=rules,
        precision=precision,
        zero="hpz",
        prefetch=None,
        pipeline=fzero.Pipeline("interleaved", 4),
    )
    data = json.loads(json.dumps(chosen_of(made.but(planned=names))))
    again = with_chosen(spec(precision="bf16"), {k: v for k, v in data.items() if k != "precision"}, "here")
    assert (again.mesh, again.shard, again.zero, again.pipeline) == (made.mesh, rules, "hpz", made.pipeline)
    assert again.precision == "bf16"
    assert again.planned == {*names} - {"precision"}
    again = with_chosen(spec(), data, "here")
    assert (again.precision.gather, again.precision.reduce) == ("int8", "int4")  # type: ignore[union-attr]


def test_presets_by_the_name_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA A100-PCIE-40GB": "a100-40gb",
        "Tesla V100-SXM2-32GB": "v100-32gb", "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA H200": "h200",
    }  # fmt: skip
    for name, preset in names.items():
        monkeypatch.setattr(backend.CudaCalls, "describe", lambda self, device, name=name: name)
        assert preset_of(torch.device("cuda", 0)) == preset
    monkeypatch.setattr(backend.CudaCalls, "describe", lambda self, device: "NVIDIA L4")
    with pytest.raises(SpecError, match="there is no preset for NVIDIA L4"):
        preset_of(torch.device("cuda", 0))
