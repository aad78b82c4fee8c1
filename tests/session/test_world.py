"""world: the ranks of a state: what they agree on, which device, and errors that one rank alone has.

The other ranks are played: `told` keeps what this rank tells them, and raises what it failed with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import fzero
from fzero.comm import group as process_group
from fzero.comm import heartbeat
from fzero.compile.state_recipe import recipe_for
from fzero.errors import SpecError, TreeError
from fzero.ir.mesh import Mesh
from fzero.plan.layout import layout
from fzero.session import world as module
from fzero.session.world import World, spec_digest

CPU = torch.device("cpu")
PARAMS = {"w": torch.tensor([1.0, 2.0]), "v": torch.ones(3)}


def loss(p: Any, batch: torch.Tensor) -> torch.Tensor:
    return (p["w"] * batch).sum() + p["v"].sum()


def spec(**options: Any) -> fzero.Spec:
    return fzero.Spec(**{"loss": loss, "optimizer": fzero.optim.sgd(0.1), **options})


class Told(NamedTuple):
    """What a rank tells the others at an agreement."""

    call: str
    digest: str
    failure: BaseException | None
    same: Any
    inputs: Any = None
    needs: str = ""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    calls: list[Told] = []

    def agree(
        rank: int, size: int, call: str, digest: str, group: Any, failure: Any = None, *, same: Any = (),
        inputs: Any = tuple, needs: str = "",
    ) -> int:  # fmt: skip
        heartbeat.of(group).enter(call)
        calls.append(Told(call, digest, failure, same, next(iter(inputs()), None), needs))
        if failure is not None:
            raise failure
        return 0

    monkeypatch.setattr(module, "agree", agree)
    return calls


@dataclass
class Filler:
    """Fills a state as a recipe does, with digests and a number of steps that a test gives."""

    recipe: Any
    texts: tuple[str, str] = ("", "")
    step: int = 0
    per_rank: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recipe, name)

    def place(self, plan: Any, rank: int, memory: Any) -> tuple[str, str]:
        self.recipe.place(plan, rank, memory)
        return self.texts


def made(told: list[Told], name: str = "init", params: Any = PARAMS, of: Any = None, **given: Any) -> list[Told]:
    """What is told while a state is made."""
    of = of or spec()
    told.clear()
    World(0, 1, CPU, None).state(name, of, lambda: Filler(recipe_for(of, params, None, CPU), **given))
    return [*told]


# --- what ranks agree on ----------------------------------------------------------------------------------------------


def test_a_state_is_filled_and_the_call_ends(told: list[Told]) -> None:
    one = spec()
    state = World(0, 1, CPU, None).state("init", one, lambda: Filler(recipe_for(one, PARAMS, None, CPU), step=4))
    assert torch.equal(state.params["w"].full(), PARAMS["w"])
    assert torch.equal(state.params["v"].full(), PARAMS["v"])
    assert state.step == 4
    assert not heartbeat.ALONE.where.inside, "what comes next is the program's own code"


def test_the_calls_have_names() -> None:
    assert module._one_digest(["a", "b"]) == module._one_digest(["b", "a", "b"]) != module._one_digest(["a"])


@pytest.mark.parametrize(
    ("name", "values"), [("init", "the values of params"), ("load", "the values of the checkpoint")]
)
def test_ranks_agree_before_memory_is_taken_and_after_it_is_filled(told: list[Told], name: str, values: str) -> None:
    before, after = made(told, name)
    assert (before.call, after.call) == (name, values)
    ((libraries,), (own,)) = before.same, after.same
    assert torch.__version__ in libraries.value
    assert fzero.__version__ in libraries.value
    assert libraries.shown
    assert (own.what, own.among) == (values, 0)


@pytest.mark.parametrize(
    "given",
    [
        {"params": {**PARAMS, "w": torch.ones(3)}}, {"params": {**PARAMS, "v": torch.ones(3, dtype=torch.float64)}},
        {"params": {"w": PARAMS["w"], "u": PARAMS["v"]}}, {"step": 1}, {"of": spec(zero=1)},
        {"per_rank": ("params/v",)},
    ],
    ids=["shape", "dtype", "path", "step", "spec", "per rank"],
)  # fmt: skip
def test_other_leaves_or_fields_have_another_digest(told: list[Told], given: dict[str, Any]) -> None:
    assert made(told)[0].digest == made(told)[0].digest != ""
    assert made(told, **given)[0].digest != made(told)[0].digest


def test_what_ranks_can_compare_has_a_name(told: list[Told]) -> None:
    """A field of the spec, a leaf of the state, a parameter before its moments, and the values of each."""
    of = spec(clip_norm=2.0, optimizer=fzero.optim.adam(0.1))
    before, after = made(told, of=of, per_rank=("params/v",))
    assert before.inputs["Spec(clip_norm=)"] == "2.0"
    assert before.inputs["state['params/w']"] == "f32[2]"
    assert before.inputs["state['params/v']"] == "f32[3] of each rank"
    names = [*before.inputs]
    assert names.index("state['params/w']") < names.index("state['opt_state/mu/w']")
    assert before.needs == "give every rank the same spec and the same params"
    assert after.needs.startswith("the values of params differ. Give every rank the same params, or make them from")


def test_values_have_a_digest_for_all_ranks_and_one_for_those_of_a_role(told: list[Told]) -> None:
    plain, common, own = (made(told, texts=texts)[1] for texts in (("a", "b"), ("c", "b"), ("a", "c")))
    assert plain.digest != common.digest
    assert plain.digest == own.digest
    assert plain.same[0].value == common.same[0].value != own.same[0].value


def test_a_spec_is_compared_without_what_is_a_ranks_own() -> None:
    first = spec_digest(spec())
    assert spec_digest(spec(loss=lambda p, b: p["w"].sum(), optimizer=fzero.optim.sgd(0.2), device="cpu")) == first
    away = {"offload": {"**": "nvme"}}
    assert spec_digest(spec(nvme_path="/a", **away)) == spec_digest(spec(nvme_path="/b", **away)) != first
    assert spec_digest(spec(zero=1)) != first
    rules = {"params/w": 3, "**": 1}
    assert spec_digest(spec(zero=rules)) == spec_digest(spec(zero=dict(reversed(rules.items()))))
    assert spec_digest(spec(zero=rules)) != spec_digest(spec(zero={**rules, "**": 2}))


# --- an error of one rank ---------------------------------------------------------------------------------------------


def test_an_error_of_the_filler_is_told_before_it_is_raised(told: list[Told]) -> None:
    def filler() -> Any:
        raise TreeError("no such leaf")

    with pytest.raises(TreeError, match="no such leaf"):
        World(0, 1, CPU, None).state("load", spec(), filler)
    ((call, digest, failure, *_),) = told
    assert (call, digest, str(failure)) == ("load", "", "no such leaf")


def test_an_update_that_roles_cannot_make_is_told_before_memory_is_taken(
    told: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, error = spec(), SpecError("needs leaves of several roles")

    def check(given: Any, state: Any, plan: Any, device: torch.device) -> None:
        assert given is of
        assert {name: x.shape for name, x in state["params"].items()} == {name: x.shape for name, x in PARAMS.items()}
        assert {leaf.path for leaf in plan.leaves} >= {"params/w", "params/v"}
        assert device == CPU
        raise error

    monkeypatch.setattr(module, "check_update", check)
    monkeypatch.setattr(module, "transport_for", lambda *given, **named: pytest.fail("nothing is made"))
    with pytest.raises(SpecError, match="several roles"):
        made(told, of=of)
    assert [(one.call, one.failure) for one in told] == [("init", error)]


def test_an_error_of_a_read_is_told_before_it_is_raised(told: list[Told]) -> None:
    one = spec()
    filler = Filler(recipe_for(one, PARAMS, None, CPU))
    filler.place = lambda plan, rank, memory: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        World(0, 1, CPU, None).state("load", one, lambda: filler)
    assert [type(one.failure) for one in told] == [type(None), ZeroDivisionError]
    assert told[1].digest == ""


def test_an_earlier_error_is_told_and_nothing_is_made(told: list[Told]) -> None:
    error = SpecError("wrong")
    with pytest.raises(SpecError, match="wrong"):
        World(0, 1, CPU, None, error).state("init", spec(), lambda: pytest.fail("it was asked for leaves"))
    assert [one.failure for one in told] == [error]


# --- the world --------------------------------------------------------------------------------------------------------


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> heartbeat.Presence:
    """A world of four ranks, of which this is the last."""
    presence = heartbeat.Presence(3, 4)
    monkeypatch.setattr(process_group, "open_world", lambda kind, seconds=None: (3, 4))
    monkeypatch.setattr(heartbeat, "of", lambda group=None: presence)
    monkeypatch.setattr(module.dist, "new_group", lambda **given: "a group")
    return presence


def test_a_rank_is_named_by_its_place_in_the_mesh(four: heartbeat.Presence) -> None:
    shard = {"w": fzero.P("tp")}
    world = World.open("init", spec(mesh={"dp": 2, "tp": 2}, shard=shard), PARAMS)
    assert (world.rank, world.size, world.device, world.group, world.failure) == (3, 4, CPU, None, None)
    assert four.label(3) == "rank 3 (dp=1 tp=1)"
    assert world.settled(spec(mesh={"dp_out": 2, "dp": -1})).mesh == {"dp_out": 2, "dp": -1}
    assert four.label(2) == "rank 2 (dp_out=1 dp=0)"


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (spec(mesh={"dp": 3}), SpecError, "needs 3 ranks, there are 4"),
        ({"w": 1}, SpecError, "needed a Spec, got dict"),
        (spec(device="cuda"), SpecError, "sees no CUDA device"),
    ],
)
def test_an_error_is_kept_for_all_ranks_to_raise(
    four: heartbeat.Presence, given: Any, error: type[Exception], said: str
) -> None:
    world = World.open("init", given, PARAMS)
    assert isinstance(world.failure, error)
    assert said in str(world.failure)
    assert world.planned(given, PARAMS, None, None) is given, "it is raised where a state is made"


def test_inside_a_transform_no_world_is_opened(four: heartbeat.Presence) -> None:
    found: list[World] = []

    def opened(x: torch.Tensor) -> torch.Tensor:
        found.append(World.open("init", spec(), PARAMS))
        return x

    torch.vmap(opened)(torch.ones(2))
    assert isinstance(found[0].failure, fzero.CaptureError)
    assert "fzero.init was called inside a torch.func transform" in str(found[0].failure)


def test_a_mesh_that_is_planned_is_not_known_yet(four: heartbeat.Presence) -> None:
    assert World.open("init", spec(mesh="auto"), PARAMS).failure is None
    assert four.label(3) == "rank 3"


@pytest.mark.parametrize(("size", "seconds"), [(4, 7.0), (4, None), (1, None)])
def test_on_a_device_with_streams_ranks_agree_over_gloo(
    monkeypatch: pytest.MonkeyPatch, size: int, seconds: float | None
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(process_group, "open_world", lambda kind, given=None: asked.append((kind, given)) or (0, size))
    monkeypatch.setattr(module.backend, "of", lambda device: SimpleNamespace(on_streams=True, on_host=True))
    monkeypatch.setattr(module.dist, "new_group", lambda backend, timeout: (backend, timeout))
    world = World.open("init", replace(spec(), timeout=seconds), PARAMS)
    assert world.failure is None
    patience = timedelta(seconds=seconds or process_group.TIMEOUT_SECONDS)
    assert world.group == (None if size == 1 else ("gloo", patience))
    assert asked == [("cpu", seconds)]


# --- a plan -----------------------------------------------------------------------------------------------------------


def test_arguments_of_a_plan(told: list[Told], monkeypatch: pytest.MonkeyPatch) -> None:
    world, fixed, auto = World(0, 1, CPU, None), spec(), spec(mesh="auto")
    assert world.planned(fixed, PARAMS, None, None) is fixed
    assert told == [], "nothing is asked of the others"
    for given in ({"batch_like": torch.ones(2), "hardware": None}, {"batch_like": None, "hardware": "h100"}):
        with pytest.raises(SpecError, match=r"read with Spec\(mesh='auto'\).*Leave them out"):
            world.planned(fixed, PARAMS, **given)
    with pytest.raises(SpecError, match="a plan needs the shapes of a batch"):
        world.planned(auto, PARAMS, None, "h100")
    assert [one.call for one in told] == ["planning"] * 3
    seen: list[Any] = []
    monkeypatch.setattr(module, "planned_by_first", lambda *given: seen.append(given) or fixed)
    assert world.planned(auto, PARAMS, torch.ones(2), "h100") is fixed
    assert seen[0][0] is auto
    assert seen[0][3:] == ("h100", 0, 1, CPU, None)
    assert told[-1] == Told("planning", spec_digest(auto), None, ())


# --- the device -------------------------------------------------------------------------------------------------------


def device(name: str = "init", like: Any = PARAMS, **options: Any) -> torch.device:
    return module._device(name, spec(**options), like)


def test_the_device_is_that_of_the_spec_or_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = {"w": torch.ones(2, device="meta")}
    assert device() == device(like=lambda key: PARAMS) == device(like={"n": 3}) == device(device="cpu:0") == CPU
    assert device(device="cpu", like=meta) == device("load", meta) == device("load", PARAMS | meta) == CPU
    with pytest.raises(TreeError, match="params are on the meta device"):
        device(like=meta)
    with pytest.raises(TreeError, match=r"params lie on several devices: \['cpu', 'meta'\]"):
        device(like=PARAMS | {"v": meta["w"]})
    with pytest.raises(SpecError, match="this torch sees no CUDA device"):
        device(device="cuda")
    calls = SimpleNamespace(available=lambda: True)
    monkeypatch.setattr(module.backend, "of", lambda _: SimpleNamespace(on_streams=True, on_host=False, calls=calls))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert device(device="cuda") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert device(device="cuda") == torch.device("cuda", 2)
    assert device(device="cuda:1") == torch.device("cuda", 1)


def test_the_kind_of_a_device_that_may_be_wrong_otherwise() -> None:
    assert [module._kind_named(x) for x in ("cuda:77", "cpu", None, "tpu", torch.device("cuda"))] == [
        "cuda", "cpu", "cpu", "cpu", "cuda"
    ]  # fmt: skip


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_rank_has_a_file_of_its_own_where_the_spec_names_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths, values, _ = fzero.tree.flatten({"params": {"w": torch.ones(2000)}, "count": torch.tensor(1)})
    plan = layout(paths, values, mesh=Mesh((("dp", 1),)), home=lambda path: "disk")
    made: list[Any] = []
    monkeypatch.setattr(module, "DiskFile", lambda *given, **named: made.append((given, named)) or "file")
    here = heartbeat.Presence(0, 1)
    assert module._file(spec(), plan, 0, here) is None
    away = spec(offload={"**": "nvme"}, nvme_path=str(tmp_path / "{local_rank}"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert module._file(away, plan, 0, here) == "file"
    monkeypatch.setenv("LOCAL_RANK", "3")
    module._file(replace(away, timeout=5.0), plan, 0, here)
    (first, named), (second, more) = made
    assert (first[0], second[0]) == (str(tmp_path / "0"), str(tmp_path / "3"))
    assert first[1] == 8192, "2,000 numbers of 4 bytes, in whole pages"
    assert named == {"timeout": process_group.TIMEOUT_SECONDS, "owner": "rank 0"}
    assert more["timeout"] == 5.0


@pytest.mark.parametrize("folder", [False, True])
def test_memory_is_made_for_a_disk_where_there_is_one(
    folder: bool, told: list[Told], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In huge pages, which a disk writes faster and a first step makes slower."""
    asked: list[bool] = []
    real = module.transport_for

    def transport(*given: Any, disk: bool, **named: Any) -> Any:
        asked.append(disk)
        return real(*given, disk=disk, **named)

    monkeypatch.setattr(module, "transport_for", transport)
    made(told, of=spec(offload={"**": "nvme"}, nvme_path=str(tmp_path)) if folder else spec())
    assert asked == [folder]
