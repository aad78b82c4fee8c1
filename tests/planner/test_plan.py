"""fzero.plan: what it answers fits, is as fast as what brute force finds, and can be pasted; what is given stays."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_hardware import TOY

import fzero
from fzero import cli, optim
from fzero.errors import SpecError
from fzero.hardware import Drive
from fzero.ir.mesh import Mesh
from fzero.plan.layout import BUCKET_BYTES
from fzero.planner import NothingFitsError, candidates, choose, programs, search
from fzero.planner.candidates import Candidate
from fzero.planner.problem import problem_of
from fzero.planner.programs import by_rates
from fzero.planner.tensor_rules import tensor_rules
from fzero.spec_fields import OPENED, opened_of


def layers(n: int, width: int) -> Any:
    return {"layers": [{"w": torch.empty(width, width, device="meta")} for _ in range(n)]}


def loss(p: Any, x: Tensor) -> Tensor:
    for layer in p["layers"]:
        x = torch.tanh(x @ layer["w"])
    return x.square().mean()


def given(**fields: Any) -> fzero.Spec:
    return fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), **fields)


def planned(
    spec: fzero.Spec | None = None, n: int = 3, width: int = 64, rows: int = 16, world: int = 4, **options: Any
) -> fzero.Planned:
    options = {"hardware": TOY, "most": 8, **options}
    return fzero.plan(
        spec or given(), layers(n, width), torch.empty(rows, width, device="meta"), world_size=world, **options
    )


@functools.cache
def usual(memory: int | None = None) -> fzero.Planned:
    """Planned once for all tests that ask for it."""
    return planned(memory=memory)


def test_what_was_given_is_pinned_also_where_it_is_the_default() -> None:
    """3 is the stage of a Spec that says nothing; said, it stays."""
    found = planned(given(zero=3, mesh={"dp": 4}), most=4)
    assert {row.candidate.zero for row in found.table} == {3}
    assert {row.candidate.mesh for row in found.table} == {(("dp", 4),)}
    assert sorted(found.choices)[:3] == ["bucket_bytes", "microbatches", "offload"]
    assert "zero" not in found.choices
    assert len({row.candidate.zero for row in usual().table}) > 1


def test_a_spec_knows_what_was_given() -> None:
    spec = given(zero=3, remat="none")
    assert spec.given == {"loss", "optimizer", "zero", "remat"}
    assert replace(spec, microbatches=2).given == {"loss", "optimizer", "microbatches"}, "of a copy: no defaults"


@pytest.mark.parametrize("name", sorted(OPENED))
def test_auto_opens_a_field_by_hand(name: str) -> None:
    left, pinned = given(zero=1, remat="full"), given(zero=1, remat="full")
    opened = pinned.but(**{name: "auto"})
    assert opened.given == left.given - {name}
    assert given(**{name: "auto"}).given == {"loss", "optimizer"}
    assert opened_of(opened) == {name}
    assert not opened_of(opened.but(**{name: getattr(opened, name)}))
    for call in (
        lambda: fzero.lower(opened, layers(1, 64), torch.empty(4, 64)),
        lambda: fzero.init(layers(1, 4), opened),
    ):
        with pytest.raises(
            SpecError, match=rf"Spec\({name}='auto'\) leaves {name} to a plan, and fzero\.\w+ makes none"
        ):
            call()


def test_a_field_that_is_opened_by_hand_is_chosen() -> None:
    pinned = {"mesh": {"dp": 4}, "microbatches": 1, "offload": None, "remat": "none"}
    chosen = planned(given(**pinned, zero="auto"))
    assert chosen.spec.zero == planned(given(**pinned)).spec.zero
    assert "zero" in chosen.choices
    assert not opened_of(chosen.spec)


def test_the_answer_is_text_that_makes_the_same_program() -> None:
    found = usual(375_000)
    spec = given()
    pasted = eval(found.python(), {"dataclasses": dataclasses, "spec": spec})
    data = pasted_mesh(pasted)
    again = fzero.lower(pasted, layers(3, 64), torch.empty(16 // data, 64, device="meta"), world_size=4)
    assert again.digest == found.lowered.digest


def test_the_text_has_the_device_of_the_machine() -> None:
    """Over NCCL a program has other buffers. The machine says it: a checkpoint does not hold it."""
    pinned: dict[str, Any] = {"mesh": {"dp": 4}, "zero": 2, "microbatches": 1, "remat": "none", "offload": None}
    machine, spec = replace(TOY, type="cuda"), given(**pinned)
    found = planned(spec, hardware=machine)
    pasted = eval(found.python(), {"dataclasses": dataclasses, "spec": spec})
    assert pasted.device == found.spec.device == "cuda"
    assert fzero.lower(pasted, layers(3, 64), torch.empty(4, 64, device="meta")).digest == found.lowered.digest
    assert "device" not in found.spec.planned
    assert "device" not in planned(given(**pinned, device="cpu"), hardware=machine).choices


def pasted_mesh(spec: fzero.Spec) -> int:
    sizes = dict(spec.mesh or {})
    return sizes.get("dp", 1) * sizes.get("dp_out", 1)


def test_a_mesh_that_is_left_open_is_no_mesh_to_run_on() -> None:
    with pytest.raises(SpecError, match=r"mesh='auto': .* Here plan first: spec = fzero.plan"):
        fzero.lower(given(mesh="auto"), layers(1, 8), torch.empty(4, 8), world_size=2)
    assert planned(given(mesh="auto")).spec.mesh == usual().spec.mesh


def test_the_same_file_gives_the_same_answer() -> None:
    assert str(planned(memory=375_000)) == str(usual(375_000))


@pytest.mark.parametrize(
    ("world", "memory"),
    [(2, 280_000), *(pytest.param(*one, marks=pytest.mark.acceptance) for one in ((1, None), (8, 280_000)))],
)
def test_the_default_is_among_the_candidates_and_the_answer_no_slower(world: int, memory: int | None) -> None:
    found = planned(world=world, memory=memory)
    plain = next(row for row in found.table if row.candidate == candidates.default(given(), world))
    assert not plain.fits(found.memory, TOY.host_budget) or found.seconds <= plain.seconds * (1 + 1e-9)
    assert found.peak <= found.memory


@pytest.mark.acceptance
def test_less_memory_is_bought_with_time() -> None:
    """Of falling budgets each answer fits, and none is faster than that of a larger one."""
    seconds = []
    for memory in (None, 375_000, 280_000, 190_000):
        found = usual(memory)
        assert found.peak <= found.memory
        assert memory in (None, found.memory)
        seconds.append(found.seconds)
    assert all(later >= earlier * (1 - choose.GAIN) for earlier, later in itertools.pairwise(seconds))


@pytest.fixture
def lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two searches of one problem lower a program once."""
    choices: dict[str, Any] = {}
    made: dict[tuple[str, str, int], Any] = {}

    def by_rates_of(machine: Any, mesh: Any, **options: Any) -> Any:
        return choices.setdefault(f"{machine} {mesh} {options}", programs.by_rates(machine, mesh, **options))

    def lowered_of(problem: Any, spec: fzero.Spec, mesh: Any, deciders: Any) -> Any:
        key = str(spec), str(mesh), id(deciders)
        if key not in made:
            made[key] = programs.lowered_of(problem, spec, mesh, deciders)
        return made[key]

    monkeypatch.setattr(search, "by_rates", by_rates_of)
    monkeypatch.setattr(search, "lowered_of", lowered_of)


@pytest.mark.parametrize("seed", range(300))
@pytest.mark.acceptance
@pytest.mark.usefixtures("lowered_once")
def test_no_candidate_of_brute_force_is_faster(seed: int) -> None:
    """A random model, memory, world and machine: all candidates are lowered, and none that fits is predicted more than
    2 % faster than the answer, beyond what the default is given."""
    rng = random.Random(seed)
    n, width, world = rng.choice((2, 3)), rng.choice((32, 64)), rng.choice((2, 4))
    rows = world * rng.choice((1, 2))
    machine = replace(TOY, levels=(replace(TOY.levels[0], bytes=rng.choice((2e8, 2e9, 2e10))), TOY.levels[1]))
    spec = given(clip_norm=1.0) if rng.random() < 0.5 else given()
    room = rng.uniform(0.4, 3) * 16 * n * width * width
    problem = problem_of(
        spec, layers(n, width), torch.empty(rows, width, device="meta"), world, machine, int(room) + 4096
    )
    problem = replace(problem, rules=tensor_rules(problem))
    every = search.Search(problem, {}, 0.0)
    for one in candidates.candidates(spec, problem.given, world, rows, n, machine, problem.rules.shard):
        every.row(one)
    if not every.fitting:
        with pytest.raises(NothingFitsError):
            planned(spec, n, width, rows, world, hardware=machine, memory=problem.budget)
        return
    found = planned(spec, n, width, rows, world, hardware=machine, memory=problem.budget, most=None)
    best = min(every.fitting, key=lambda row: row.seconds)
    assert found.seconds <= best.seconds * (1 + 0.02) / (1 - choose.GAIN), (str(found), best)
    assert found.peak <= problem.budget


@pytest.mark.parametrize(
    ("world", "n", "width"),
    [
        (2, 3, 64),
        (4, 2, 32),
        (2, 2, 128),
        (4, 3, 64),
        (2, 2, 32),
        (4, 4, 64),
        (1, 3, 64),
        (1, 2, 128),
        (8, 2, 64),
        (8, 3, 32),
    ],
)
@pytest.mark.acceptance
def test_where_nothing_fits_the_least_is_right_and_each_way_out_fits(
    world: int, n: int, width: int, whole: bool
) -> None:
    """One byte less than the least is refused, the least itself is planned; the ways out are lowered programs."""
    few, rows = 5 * width * width, 2 * world
    with pytest.raises(
        NothingFitsError, match=rf"nothing fits {world} rank{'s' * (world > 1)} with 0\.\d\d MB each"
    ) as caught:
        planned(n=n, width=width, world=world, memory=few, rows=rows, most=4 if whole else 2)
    least = caught.value.least
    assert least is not None
    assert f"({least.peak:,} bytes)" in str(caught.value)
    ways = {way.words: way.row for way in caught.value.alternatives}
    assert ("The nearest that fit:\n  " in str(caught.value)) == bool(ways)
    assert all(not row.refused for row in ways.values())
    assert all(row.peak <= few for words, row in ways.items() if "GB" not in words and "memory=" not in words)
    most = 12 if whole else 6
    assert planned(n=n, width=width, world=world, memory=least.peak, rows=rows, most=most).peak <= least.peak
    pinned = {**least.candidate.fields, "mesh": dict(least.candidate.mesh)}
    if "tp" not in pinned["mesh"]:
        with pytest.raises(NothingFitsError):
            planned(given(**pinned), n=n, width=width, world=world, rows=rows, memory=least.peak - 1)


def test_more_memory_of_the_card_is_the_way_out_of_memory() -> None:
    """The complaint: "with 0.00 MB each", and the nearest was another card, beside 80 GB of this one."""
    batch, spec = torch.empty(8, 64, device="meta"), given(zero=0, mesh={"dp": 1}, remat="none", microbatches=1)
    plan = functools.partial(fzero.plan, spec, layers(1, 64), batch, world_size=1, hardware="h100", most=1)
    with pytest.raises(NothingFitsError, match=r"nothing fits 1 rank with 1,000 bytes each") as caught:
        plan(memory=1000)
    least, way = caught.value.least, caught.value.alternatives[-1]
    assert least is not None
    assert (way.words, way.row) == (f"memory={least.peak}", least)
    assert "RTX" not in str(caught.value)
    assert plan(memory=least.peak).peak <= least.peak


@pytest.mark.parametrize(
    ("fields", "memory", "rows", "words"),
    [
        ({}, 70_000, 16, "ranks"),
        ({"zero": 0, "mesh": {"dp": 2}, "offload": None}, 170_000, 16, "leave offload open"),
        ({"zero": 0, "mesh": {"dp": 2}, "remat": "none", "microbatches": 1}, 320_000, 1024, "rows"),
    ],
)
@pytest.mark.acceptance  # the test before has the ways out of one problem
def test_ways_out(fields: dict[str, Any], memory: int, rows: int, words: str) -> None:
    with pytest.raises(NothingFitsError) as caught:
        planned(given(**fields), world=2, memory=memory, rows=rows, most=4)
    ways = {way.words: way.row for way in caught.value.alternatives}
    assert any(words in name for name in ways), str(caught.value)
    assert all(row.peak <= memory for name, row in ways.items() if "GB" not in name and "memory=" not in name)
    assert "The nearest that fit:\n  " in str(caught.value)


def test_widths_of_the_axis_that_rules_name() -> None:
    """Every width up to a node's; the axis is part of the answer."""

    def two(p: Any, x: Tensor) -> Tensor:
        return (torch.relu(x @ p["up"]) @ p["down"]).square().mean()

    rules = {"up": fzero.P(None, "tp"), "down": fzero.P("tp", None)}
    fixed: dict[str, Any] = {"zero": 0, "remat": "none", "offload": None, "microbatches": 1}
    spec = fzero.Spec(loss=two, optimizer=optim.sgd(0.1), shard=rules, mesh="auto", **fixed)
    params = {"up": torch.empty(64, 256, device="meta"), "down": torch.empty(256, 64, device="meta")}
    found = fzero.plan(spec, params, torch.empty(8, 64, device="meta"), world_size=8, hardware=TOY, most=30)
    assert {dict(row.candidate.mesh)["tp"] for row in found.table} == {1, 2, 4}
    assert not any(row.refused for row in found.table)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"world": 0}, "world_size=0\\): needed a positive int"),
        ({"memory": -1}, "memory=-1\\): needed a positive int"),
        ({"world": 128}, "hardware 'toy' joins 64 devices"),
        ({"hardware": "h1000"}, "no preset and no file. Did you mean 'h100'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        planned(**change)


@pytest.mark.parametrize(
    ("pinned", "said"),
    [
        ({"microbatches": 5}, "dim 0 must be divisible by microbatches=5: give 5 rows"),
        ({"offload": {"opt_state/**": "cpu"}, "host_bytes": 7}, r"The least that works is host_bytes=[\d,_]+"),
    ],
)
def test_where_no_candidate_has_a_program_the_first_says_why_in_full(pinned: dict[str, Any], said: str) -> None:
    with pytest.raises(NothingFitsError, match=rf"(?s)^no candidate for 4 ranks could be lowered.*{said}"):
        planned(given(mesh={"dp": 4}, zero=0, **pinned), most=1)


def test_a_batch_without_one_number_of_rows_is_refused() -> None:
    batch = {"x": torch.empty(4, 8), "y": torch.empty(2)}
    with pytest.raises(SpecError, match="have \\[2, 4\\] rows along dim 0: needed the global batch"):
        fzero.plan(given(), layers(1, 8), batch, world_size=2, hardware=TOY)


def test_a_loss_that_cannot_be_lowered_raises_its_own_error() -> None:
    def wrong(p: Any, x: Tensor) -> Tensor:
        return (x @ p["layers"][0]["w"].t()[:3]).sum()

    spec = fzero.Spec(loss=wrong, optimizer=optim.sgd(0.1))
    with pytest.raises(Exception, match=r"aten\.mm.default of f32\[2, 8\] and f32\[3, 8\]"):
        fzero.plan(spec, layers(1, 8), torch.empty(4, 8), world_size=2, hardware=TOY)


def test_reasons_of_each_field(golden: Callable[[str, str], None]) -> None:
    golden("planner/tight", str(planned(memory=280_000)))


def test_candidates_of_a_world(golden: Callable[[str, str], None]) -> None:
    found = candidates.meshes(given(), 8, 4, TOY)
    assert list(found) == [
        (("dp", 8),),
        (("dp_out", 2), ("dp", 4)),
        (("pp", 2), ("dp", 4)),
        (("pp", 4), ("dp", 2)),
    ]
    assert candidates.stages((("dp", 1),)) == [0]
    shown = Candidate((("pp", 2), ("dp", 4)), 1, 4, "full", "optimizer")
    assert str(shown) == "pp=2 dp=4 zero=1 microbatches=4 remat=full offload=optimizer"


PROBLEM = """
import fzero, torch

def problem():
    pinned = {"zero": 3, "microbatches": 1, "remat": "none", "offload": None}
    spec = fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1), **pinned)
    return spec, {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")

number = 3
short = lambda: 3
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "problem_of_mine.py"
    file.write_text(PROBLEM, encoding="utf-8")
    named = [f"{file}:problem", "--ranks", "2", "--hardware", "h100"]
    assert cli.main(["plan", *named, "--python"]) == 0
    assert capsys.readouterr().out.startswith("dataclasses.replace(spec, mesh={'dp': 2}")
    assert cli.main(["plan", *named]) == 0
    assert "on 2 ranks of DGX H100" in capsys.readouterr().out
    assert cli.main(["plan", *named, "--phase", "coded"]) == 2
    assert "neither the optimizer nor the step has phases" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{file}:other", "has no function 'other'"),
        ("{file}:number", "has no function 'number'"),
        ("{file}:short", "it returned int; needed (spec, params_like, batch_like)"),
        ("{file}", "needed FILE.py:FUNCTION"),
        ("nowhere.py:problem", "there is no file nowhere.py; needed FILE.py:FUNCTION"),
    ],
)
def test_what_the_command_refuses(name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "problem_of_mine.py"
    file.write_text(PROBLEM, encoding="utf-8")
    assert cli.main(["plan", name.format(file=file), "--ranks", "2", "--hardware", "h100"]) == 2
    assert said in capsys.readouterr().err


def test_a_picture_of_another_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The complaint: SVG was written into x.png."""
    picture = tmp_path / "x.png"
    told = ["plan", "problem.py:problem", "--ranks", "2", "--hardware", "h100", "--picture", str(picture)]
    assert cli.main(told) == 2
    assert "x.png: it is written as .svg" in capsys.readouterr().err
    assert not picture.exists()


def test_buckets_are_larger_where_a_transfer_has_more_hops() -> None:
    """What a bucket loses to latency is paid by more bytes in a larger world; on one rank nothing is sent."""
    machine = fzero.hardware.load("h100")
    worlds = (2, 8, 64, 1024, 16384)
    sizes = [by_rates(machine, Mesh((("dp", n),))).bucket_bytes({}).value for n in worlds]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 1 << 30
    assert by_rates(machine, Mesh((("dp", 1),))).bucket_bytes({}).value == BUCKET_BYTES


@pytest.mark.parametrize(
    "fields",
    [
        {"zero": {"layers/0/**": 1, "**": 3}},
        {"remat": {"layers/0/**": "full"}},
        {"offload": {"opt_state/**": "cpu"}},
        {"mesh": {"dp_out": 2, "dp": 2}, "zero": {"params": ("dp",), "grads": ("dp",), "optimizer": ("dp_out", "dp")}},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.sampled(2)
def test_path_rules_are_pinned_as_other_values_are(fields: dict[str, Any]) -> None:
    found = planned(given(**fields), most=2)
    assert all(getattr(found.spec, name) == value for name, value in fields.items())
    assert not fields.keys() & found.choices.keys()


def test_a_place_of_updates_that_was_given() -> None:
    assert planned(given(update_on="device", offload="optimizer+params"), most=2).spec.update_on == "device"


def test_what_is_printed_has_the_budget_under_which_the_program_fits() -> None:
    spec = given(offload={"params/**": "cpu"}, mesh={"dp": 1}, zero=0, microbatches=1, remat="none")
    loose = planned(spec, n=6, width=128, rows=4, world=1)
    found = planned(spec, n=6, width=128, rows=4, world=1, memory=int(loose.peak * 0.95))
    pasted = eval(found.python(), {"dataclasses": dataclasses, "spec": spec})
    again = fzero.lower(pasted, layers(6, 128), torch.empty(4, 128, device="meta"))
    assert again.memory.peak == found.peak <= found.memory
    assert ("device_bytes" in found.choices) == (found.spec.device_bytes is not None)


def test_a_reduction_that_was_left_to_fzero_is_chosen_and_printed() -> None:
    spec = given(mesh={"dp": 4}, zero=3, microbatches=2, remat="none", offload=None, reduce=None)
    found = planned(spec)
    pasted = eval(found.python(), {"dataclasses": dataclasses, "spec": spec})
    assert pasted.reduce == found.spec.reduce is not None
    assert fzero.lower(pasted, layers(3, 64), torch.empty(4, 64, device="meta")).digest == found.lowered.digest


def on_disk() -> fzero.Spec:
    pinned: dict[str, Any] = {"mesh": {"dp": 4}, "zero": 1, "microbatches": 1, "remat": "none"}
    return given(offload={"optimizer": "nvme"}, nvme_path="/tmp", **pinned)


def test_moves_to_the_disk_of_a_processor_take_their_time() -> None:
    """Its rank's memory is the host's: nothing goes by way of it."""
    machine = replace(TOY, type="cpu", disk=Drive(read_bytes=1e6, write_bytes=1e6))
    found = planned(on_disk(), hardware=machine, most=1)
    moved = 2 * 3 * 64 * 64 * 4 // 4  # two moments of a quarter of three layers
    assert found.seconds > moved / 1e6
    assert fzero.simulate(found.lowered, machine).written >= moved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most": 0}, r"most=0\): needed a positive int"),
        ({"hardware": None}, r"hardware=None: needed a preset \(a100"),
        ({"codecs": 3}, r"codecs=3\): needed names"),
        ({"memory": "1GB"}, r"memory='1GB'\): needed a positive int"),
        ({"rows": 0}, "its tensors have no rows"),
        ({"spec": on_disk()}, r"needs a disk, and hardware 'toy' has none: add \[disk\] to its file, with read_bytes"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        planned(**options)
    with pytest.raises(SpecError, match=r"fzero.plan needed a Spec, got NoneType: call fzero.plan\("):
        fzero.plan(None, layers(1, 4), torch.empty(4, 4), world_size=1, hardware=TOY)  # type: ignore[arg-type]


def test_gradients_that_wait_to_be_clipped_may_be_held_by_the_host() -> None:
    """Where all else lies there already, they are the most that the device holds."""
    base = {"mesh": {"dp": 1}, "zero": 0, "remat": "full", "microbatches": 1, "clip_norm": 1.0}
    params, batch = layers(6, 128), torch.empty(4, 128, device="meta")

    def peak(offload: Any) -> int:
        mesh = Mesh((("dp", 1),))
        lowered = fzero.lower(given(**base, offload=offload), params, batch, decisions=by_rates(TOY, mesh))
        return lowered.memory.peak

    without, with_them = peak("optimizer+params"), peak(dict(candidates.ALL))
    assert with_them < without
    found = fzero.plan(given(**base), params, batch, world_size=1, hardware=TOY, memory=(without + with_them) // 2)
    assert found.spec.offload == candidates.ALL
    assert found.peak <= (without + with_them) // 2


@pytest.mark.acceptance
def test_a_card_with_more_memory_is_no_way_out_of_device_bytes() -> None:
    """What is pinned stays on every card, so the way out is to leave it open. It fits when it is followed."""
    spec, batch = given(device_bytes=50_000, mesh={"dp": 1}), torch.empty(4, 64, device="meta")
    with pytest.raises(NothingFitsError, match="leave device_bytes open") as caught:
        fzero.plan(spec, layers(2, 64), batch, world_size=1, hardware=TOY, most=2)
    way = caught.value.alternatives[-1]
    found = fzero.plan(given(mesh={"dp": 1}), layers(2, 64), batch, world_size=1, hardware=TOY, most=2)
    assert way.words == "leave device_bytes open"
    assert 50_000 < way.row.peak <= found.memory
