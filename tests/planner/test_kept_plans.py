"""kept_plans: the same question has its answer without a search, and any other question none."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_hardware import TOY

import fzero
from fzero import P, optim
from fzero._torch_compat import FakeTensorMode
from fzero.compile.kept_lowerings import NOTHING
from fzero.hardware import Drive
from fzero.ir import op_info
from fzero.ir.packed import pack, unpack
from fzero.planner import choose, kept_plans
from fzero.planner.problem import problem_of
from fzero.planner.some_layers import FirstLayers

LAYERS, WIDTH, ROWS = 6, 64, 256
DEEP = {"layers": [{name: torch.empty(WIDTH, WIDTH, device="meta") for name in "ab"} for _ in range(LAYERS)]}
PARAMS = {"layers": DEEP["layers"][:2]}
BATCH = torch.empty(ROWS, WIDTH, device="meta")


def loss(p: Any, x: Tensor) -> Tensor:
    for layer in p["layers"]:
        x = x + torch.tanh(torch.tanh(x @ layer["a"]) @ layer["b"])
    return x.square().mean()


def another(p: Any, x: Tensor) -> Tensor:
    return loss(p, x) * 2


def refused(p: Any, x: Tensor) -> Tensor:
    return loss(p, x) * float(x[0, 0])


def spec(**given: Any) -> fzero.Spec:
    return fzero.Spec(**{"loss": loss, "optimizer": optim.sgd(1e-3), "offload": None, **given})


def planned(one: fzero.Spec | None = None, **given: Any) -> fzero.Planned:
    asked = {"params_like": PARAMS, "batch_like": BATCH, "world_size": 2, "hardware": TOY, "most": 2, **given}
    return fzero.plan(one or spec(), **asked)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Plans are kept in a folder of their own; one entry for each search."""
    monkeypatch.setenv("FZERO_KEEP_LOWERINGS", "1")
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    monkeypatch.setattr(op_info, "_foreign", set())  # those of other tests
    made, search = list[int](), choose.search

    def counted(*given: Any) -> Any:
        made.append(1)
        return search(*given)

    monkeypatch.setattr(choose, "search", counted)
    return made


ONE_RANK = {"mesh": {"dp": 1}, "zero": 0, "microbatches": 1}
SPLIT = {"mesh": {"tp": 2}, "shard": {"layers/*/a": P(None, "tp"), "layers/*/b": P("tp")}}
QUESTIONS: dict[str, Callable[[], fzero.Planned]] = {
    "all open": planned,
    "some layers": lambda: planned(spec(**ONE_RANK), params_like=DEEP, world_size=1, memory=1_400_000, most=None),
    "homes open": lambda: planned(fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), mesh={"dp": 2})),
    "a pipeline": lambda: planned(spec(mesh={"pp": 2}, microbatches=4)),
    "tensor parallelism": lambda: planned(spec(**SPLIT)),
    "codecs": lambda: planned(spec(mesh={"dp": 2}, zero=3, remat="none"), codecs=("int8",)),
    "a phase": lambda: planned(
        spec(optimizer=fzero.Phases(lambda n: "slow", {"slow": optim.sgd(1e-4), "fast": optim.sgd(1e-2)})), phase="fast"
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_same_question_has_the_same_answer_without_a_search(question: str, searches: list[int]) -> None:
    first = QUESTIONS[question]()
    count = len(searches)
    assert count
    again = QUESTIONS[question]()
    assert len(searches) == count
    assert str(again) == str(first)
    for one in dataclasses.fields(fzero.Spec):
        if one.name not in ("loss", "optimizer"):
            assert getattr(again.spec, one.name) == getattr(first.spec, one.name), one.name
    assert (again.spec.given, again.spec.planned) == (first.spec.given, first.spec.planned)
    assert (again.seconds, again.peak, again.table) == (first.seconds, first.peak, first.table)
    assert again.choices == first.choices
    assert again.lowered.digest == first.lowered.digest
    assert again.lowered.phase == first.lowered.phase
    if question == "some layers":
        assert any(isinstance(row.candidate.remat, FirstLayers) for row in again.table)


def test_rules_that_were_found_are_kept(searches: list[int]) -> None:
    """The complaint: 70 billion on 1,024 were planned anew each time, for the rules that were found were read without
    the mesh."""
    found = planned(spec(**SPLIT))
    open_ = problem_of(spec(), PARAMS, BATCH, 2, TOY, None)
    kept = unpack(pack(kept_plans._answer(found)), FakeTensorMode())
    again = kept_plans._planned(kept, open_, NOTHING)
    assert again.spec.shard == SPLIT["shard"]
    assert again.spec.mesh == found.spec.mesh
    assert again.lowered.digest == found.lowered.digest


def test_a_line_that_moved_is_no_other_question(searches: list[int]) -> None:
    """The complaint: with a line more above it, a script was planned anew."""
    first = planned()
    again = fzero.plan(spec(), PARAMS, BATCH, world_size=2, hardware=TOY, most=2)
    assert str(again) == str(first)
    assert len(searches) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"one": spec(loss=another)},
        {"one": spec(optimizer=optim.adamw(1e-3))},
        {"one": spec(zero=3)},
        {"one": spec(offload="optimizer")},
        {"batch_like": torch.empty(2 * ROWS, WIDTH, device="meta")},
        {"world_size": 4},
        {"hardware": replace(TOY, device=replace(TOY.device, launch_us=2))},
        {"memory": 10**6},
        {"most": 3},
    ],
    ids=lambda other: str(*other),
)
def test_another_question_is_another(other: dict[str, Any], searches: list[int]) -> None:
    def key(one: fzero.Spec | None = None, most: int = 2, memory: int | None = None, **given: Any) -> str:
        asked = {"params_like": PARAMS, "batch_like": BATCH, "world_size": 2, "hardware": TOY, **given}
        return kept_plans._place(problem_of(one or spec(), memory=memory, **asked), most).key

    own = key()
    assert own
    assert key(**other) not in ("", own)


def test_a_leaf_of_each_rank_is_another_question(searches: list[int]) -> None:
    """The complaint: a state was said to fit in the bytes of its shards, after a plan of the same step with shards."""

    def stepped(state: Any, x: Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss)(state["params"], x)
        less = fzero.tree.map(lambda p, g: p - g, state["params"], grads)
        return {"params": less, "own": state["own"] / 2}, {"loss": value}

    def peak(own: Any) -> int:
        one = fzero.Spec(step=stepped, offload=None, remat="none", mesh={"dp": 2}, zero=3, microbatches=1)
        found = planned(one, params_like={"params": PARAMS, "own": own})
        assert found.peak == found.lowered.memory.peak
        return found.peak

    leaf = torch.zeros(8 * WIDTH, WIDTH)
    assert peak(fzero.per_rank(leaf)) > peak(leaf)
    assert len(searches) == 2


def test_rows_of_a_kept_table_are_keys(searches: list[int]) -> None:
    one = spec(zero={"layers/0/**": 3, "**": 1}, mesh={"dp": 2}, microbatches=1, remat="none")
    first, again = planned(one), planned(one)
    assert len(searches) == 1
    assert {row.candidate for row in again.table} == {row.candidate for row in first.table}


def test_a_folder_of_a_path_is_one_of_text(searches: list[int]) -> None:
    machine = replace(TOY, disk=Drive(read_bytes=1e9, write_bytes=1e9))
    asked = [spec(mesh={"dp": 2}, offload={"**": "nvme"}, nvme_path=folder) for folder in (Path("/disk"), "/disk")]
    first, again = (planned(one, hardware=machine) for one in asked)
    assert len(searches) == 1
    assert [one.spec.nvme_path for one in (first, again)] == ["/disk", "/disk"]


def test_an_answer_without_programs_is_removed(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a loss that has come to refuse other rows than those of the question."""

    def refuses(*_: Any) -> None:
        raise fzero.SpecError("not these rows")

    planned()
    with monkeypatch.context() as patched:
        patched.setattr(kept_plans, "lowered_of", refuses)
        with pytest.raises(fzero.SpecError, match="not these rows"):
            _ = planned().lowered
    assert len(searches) == 1
    planned()
    assert len(searches) == 2


def test_what_cannot_be_captured_is_refused_as_without(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for kept in "10":
        monkeypatch.setenv("FZERO_KEEP_LOWERINGS", kept)
        with pytest.raises(fzero.errors.FzeroError) as error:
            planned(spec(loss=refused))
        said.append(str(error.value))
    assert said[0] == said[1]


def test_nothing_is_captured_for_it_where_nothing_is_kept(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FZERO_KEEP_LOWERINGS", "0")
    monkeypatch.delattr(kept_plans, "graph_of")
    planned()
    assert len(searches) == 1


def test_an_answer_that_no_plan_has_is_made_anew(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    right = kept_plans._answer
    monkeypatch.setattr(kept_plans, "_answer", lambda found: replace(right(found), fields={"zero": [1]}))
    first = planned()
    monkeypatch.setattr(kept_plans, "_answer", right)
    for _ in range(2):
        assert str(planned()) == str(first)
    assert len(searches) == 2, "made anew once, and kept"


def test_programs_that_are_not_as_foretold_are_said(
    searches: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss that computes something else for more rows has the same graph for those of the question."""
    planned()
    monkeypatch.setattr(kept_plans, "step_seconds", lambda *_: 1.0)
    with caplog.at_level(logging.WARNING, "fzero"):
        assert planned().lowered.memory.peak
    assert "plan again" in caplog.text
    planned()
    assert len(searches) == 2


def test_a_choice_has_the_value_of_the_spec() -> None:
    """The complaint: of a pipeline under a budget the reasons had the depth of role 0, and the Spec another one."""
    given = {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2, "zero": 3, "remat": "none", "reduce": "each"}
    one = spec(optimizer=optim.adamw(1e-3), pipeline="1f1b", **given)
    asked: dict[str, Any] = {"params_like": DEEP, "batch_like": BATCH[:64], "world_size": 4, "most": 1}
    loose = planned(one, **asked)
    tight = planned(one, memory=int(loose.peak * 0.97), **asked)
    assert "device_bytes" in tight.choices, "it is lowered under the budget"
    for name, choice in tight.choices.items():
        assert choice.value == getattr(tight.spec, name), name
