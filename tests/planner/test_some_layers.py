"""As few layers are recomputed as the memory asks for: brute force over all numbers finds none that is faster."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import P, optim, tree
from fzero.hardware import Device, Hardware
from fzero.ir.mesh import Mesh
from fzero.planner import some_layers
from fzero.planner.candidates import Candidate
from fzero.planner.held_layers import HeldLayers, held_layers
from fzero.planner.problem import problem_of
from fzero.planner.programs import by_rates, step_seconds
from fzero.planner.sketch import sketched
from fzero.planner.some_layers import FirstLayers, numbers_below

LAYERS, WIDTH, ROWS = 6, 64, 256
CARD = Hardware(name="card", device=Device(memory_gib=1, memory_bytes=1e10, flops={"fp32": 1e11}, launch_us=1))
PARAMS = {"layers": [{name: torch.empty(WIDTH, WIDTH, device="meta") for name in "ab"} for _ in range(LAYERS)]}
BATCH = torch.empty(ROWS, WIDTH, device="meta")


def loss(p: Any, x: Tensor) -> Tensor:
    for layer in p["layers"]:
        x = x + torch.tanh(torch.tanh(x @ layer["a"]) @ layer["b"])
    return x.square().mean()


def spec(**given: Any) -> fzero.Spec:
    fields = {"mesh": {"dp": 1}, "zero": 0, "microbatches": 1, "offload": None, **given}
    return fzero.Spec(loss=loss, optimizer=optim.sgd(1e-3), **fields)  # type: ignore[arg-type]


def lowered(remat: Any, **given: Any) -> fzero.Lowered:
    return fzero.lower(
        spec(remat=remat, **given), PARAMS, BATCH, world_size=1, decisions=by_rates(CARD, Mesh((("dp", 1),)))
    )


@pytest.fixture(scope="module")
def by_count() -> list[fzero.Lowered]:
    """With the first one layer recomputed, with two, and so on."""
    return [lowered(FirstLayers(n, LAYERS, (("layers",),)).rules) for n in range(1, LAYERS)]


@pytest.fixture(scope="module")
def two_recomputed(by_count: list[fzero.Lowered]) -> fzero.Planned:
    """Of the memory that two layers need."""
    return fzero.plan(spec(), PARAMS, BATCH, world_size=1, hardware=CARD, memory=by_count[1].memory.peak)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.acceptance)])
def test_one_layer_less_does_not_fit_and_no_number_is_faster(count: int, by_count: list[fzero.Lowered]) -> None:
    memory = by_count[count - 1].memory.peak
    planned = fzero.plan(spec(), PARAMS, BATCH, world_size=1, hardware=CARD, memory=memory)
    assert planned.spec.remat == FirstLayers(count, LAYERS, (("layers",),)).rules
    assert planned.peak <= memory
    assert "layers" in str(planned.choices["remat"].value)
    fit = [step_seconds(one, CARD) for one in by_count if one.memory.peak <= memory]
    assert planned.seconds == min(fit)
    assert planned.seconds < step_seconds(lowered("full"), CARD)
    less = next(row for row in planned.table if getattr(row.candidate.remat, "count", None) == count - 1)
    assert less.peak > memory or less.seconds > planned.seconds
    pasted = eval(planned.python(), {"dataclasses": dataclasses, "spec": spec()})
    assert fzero.lower(pasted, PARAMS, BATCH, world_size=1).digest == planned.lowered.digest


def test_a_first_proposal_that_is_too_large_is_mended(
    by_count: list[fzero.Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a program so large that no second may be tried: the first says how many layers are needed. A plan of 70
    billion parameters on 1,024 ended there, 12 % slower."""
    right = HeldLayers.fewest

    def hopeful(held: HeldLayers, budget: float, known: tuple[int, float], each: float) -> int:
        return 1 if known[0] == LAYERS else right(held, budget, known, each)

    monkeypatch.setattr(some_layers, "OPS", 1)
    monkeypatch.setattr(HeldLayers, "fewest", hopeful)
    memory = by_count[1].memory.peak
    planned = fzero.plan(spec(), PARAMS, BATCH, world_size=1, hardware=CARD, memory=memory)
    tried = [row.candidate.remat.count for row in planned.table if isinstance(row.candidate.remat, FirstLayers)]
    assert len(tried) == 2
    assert min(tried) == 1
    assert planned.spec.remat == FirstLayers(max(tried), LAYERS, (("layers",),)).rules


@pytest.mark.parametrize("counts", [(0, 2, 6, 9, 16), pytest.param(range(17), marks=pytest.mark.acceptance)])
def test_what_the_layers_of_a_pipeline_hold_says_how_many_fit(counts: Sequence[int]) -> None:
    """The complaint: on a line between all and none, eight roles recomputed 19 layers of 80 where 9 fit: the last
    roles hold few microbatches, and what their layers keep is nearly free."""
    roles, layers = 4, 16
    params = {"layers": [{name: torch.empty(WIDTH, WIDTH, device="meta") for name in "ab"} for _ in range(layers)]}
    given: dict[str, Any] = {"mesh": {"pp": roles}, "microbatches": 8, "reduce": "end"}
    batch, mesh = torch.empty(8 * ROWS, WIDTH, device="meta"), Mesh((("pp", roles),))
    problem = problem_of(spec(**given), params, batch, roles, "h100", 10**9)
    one = Candidate(mesh.axes, 0, 8, "none", None, None, "end")
    held = held_layers(problem, one, layers, sketched(problem).share)
    assert held.chunk_of == (0,) * 4 + (1,) * 4 + (2,) * 4 + (3,) * 4
    peaks = []
    for count in counts:
        remat = one.remat if not count else FirstLayers(count, layers, (("layers",),)).rules
        peaks.append(
            fzero.lower(
                spec(**given, remat=remat), params, batch, world_size=roles, decisions=by_rates(problem.machine, mesh)
            ).memory.peak
        )  # fmt: skip
    each = (peaks[0] - peaks[-1]) / (held.most(0) - held.most(layers))
    said = [held.fewest(peak, (0, peaks[0]), each) for peak in peaks]
    on_a_line = [layers * (peaks[0] - peak) / (peaks[0] - peaks[-1]) for peak in peaks]
    found = [min(n for n, peak in zip(counts, peaks, strict=True) if peak <= budget) for budget in peaks]
    for own, line, right in zip(said, on_a_line, found, strict=True):
        assert right <= own <= right + (line - right) / 2 + 1
    assert max(map(operator.sub, on_a_line, found)) > 8


def test_a_schedule_for_other_microbatches_is_no_end_of_a_plan() -> None:
    """The complaint: with microbatches left open, a candidate that the schedule refuses ended the plan."""
    order = fzero.pipeline.make_schedule("1f1b", 2, 4)
    one = fzero.Spec(
        loss=loss, optimizer=optim.sgd(1e-3), mesh={"pp": 2}, pipeline=order, offload=None, zero=0, reduce="end"
    )
    batch = torch.empty(8 * ROWS, WIDTH, device="meta")
    planned = fzero.plan(one, PARAMS, batch, world_size=2, hardware="h100", memory=5_600_000)
    assert planned.spec.microbatches == 4


def test_layers_that_keep_as_much_again_are_no_end_of_a_plan() -> None:
    """The complaint: a division by zero, of layers that gather all that they keep: on one rank recomputing saves
    nothing, over tensor parallelism it does."""

    def linear(p: Any, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            x = x @ layer["a"]
        return x.square().mean()

    given: dict[str, Any] = {
        "mesh": {"tp": 2}, "shard": {"layers/*/a": P(None, "tp")}, "sequence": "tp", "zero": 0, "microbatches": 1,
    }  # fmt: skip
    params = {"layers": [{"a": torch.empty(WIDTH, WIDTH, device="meta")} for _ in range(LAYERS)]}
    batch = torch.empty(8 * ROWS, WIDTH, device="meta")
    one = fzero.Spec(loss=linear, optimizer=optim.sgd(1e-3), offload=None, **given)
    none, full = (
        fzero.lower(one.but(remat=remat), params, batch, world_size=2).memory.peak for remat in ("none", "full")
    )
    assert full < none
    planned = fzero.plan(one, params, batch, world_size=2, hardware="h100", memory=(full + none) // 2)
    assert planned.peak <= (full + none) // 2 < none


def test_where_none_or_all_is_right_no_part_is_taken() -> None:
    none, full = lowered("none").memory.peak, lowered("full").memory.peak
    assert full < none
    for memory, remat in ((none, "none"), (full, "full")):
        planned = fzero.plan(spec(), PARAMS, BATCH, world_size=1, hardware=CARD, memory=memory)
        assert planned.spec.remat == remat
    pinned = fzero.plan(spec(remat="full"), PARAMS, BATCH, world_size=1, hardware=CARD, memory=none - 1)
    assert pinned.spec.remat == "full"


def test_a_function_of_a_key_is_planned_as_its_tensors(two_recomputed: fzero.Planned) -> None:
    def made(key: Tensor) -> Any:
        return {"layers": [{name: torch.zeros(WIDTH, WIDTH) for name in "ab"} for _ in range(LAYERS)]}

    one = two_recomputed
    two = fzero.plan(spec(), made, BATCH, world_size=1, hardware=CARD, memory=one.memory)
    assert one.spec.remat == two.spec.remat
    assert isinstance(one.spec.remat, dict)
    assert one.seconds == two.seconds


@pytest.mark.parametrize("name", ["a*", pytest.param("m[x]", marks=pytest.mark.acceptance)])
def test_paths_that_a_rule_cannot_name_are_left_alone(name: str, by_count: list[fzero.Lowered]) -> None:
    like = {name: PARAMS["layers"]}
    one = spec().but(loss=lambda p, x: loss({"layers": p[name]}, x))
    found = fzero.plan(one, like, BATCH, world_size=1, hardware=CARD, memory=by_count[1].memory.peak)
    assert found.spec.remat == "full"
    assert not any(row.refused for row in found.table)


def test_patterns_match_the_numbers_below_and_no_other() -> None:
    for n in (1, 2, 9, 10, 11, 19, 20, 99, 100, 101, 126, 230):
        patterns = numbers_below(n)
        hit = [[tree.matches(f"a/{p}/**", f"a/{number}/w") for p in patterns] for number in range(3 * n + 12)]
        assert [sum(row) for row in hit] == [int(number < n) for number in range(3 * n + 12)]


def test_a_value_is_the_rule_of_each_stack() -> None:
    value = FirstLayers(2, 3, (("decoder", "layers"), ("encoder", "layers")))
    assert value.rules == {"decoder/layers/[01]/**": "full", "encoder/layers/[01]/**": "full"}
    assert str(value) == "2 of 3 layers"
    assert replace(value, rest="gathers").rules == {**value.rules, "**": "gathers"}
    assert str(replace(value, rest="gathers")) == "2 of 3 layers and gathers"
    assert replace(value, count=1).rules["decoder/layers/0/**"] == "full"
