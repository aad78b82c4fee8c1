"""What is decided for a program: one record, one function for each choice, and the same program from the record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import cases
import kept
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tp_models import gpt

import fzero
from fzero.compile import decide
from fzero.compile.decide.by_cost import DEPTHS, bucket_bytes, fastest, product, tile_bytes
from fzero.compile.decide.layers_cut import fewest_elements
from fzero.cost import step_time
from fzero.cost.bucket_costs import bucket_costs, kept_bucket_costs
from fzero.cost.kept_costs import remember
from fzero.cost.rates import Rates
from fzero.errors import SpecError
from fzero.ir.decisions import BUDGET, CHOSEN, GIVEN, IDLE, TILE_BYTES, Choice, Decisions, RoleDecisions, RunnerUp
from fzero.ir.mesh import Mesh
from fzero.ir.offset_assignment import PAGE_BYTES
from fzero.ir.program import Program
from fzero.passes import Options
from fzero.plan.layout import BUCKET_BYTES

MODEL, ADAMW = gpt(layers=2), fzero.optim.adamw(1e-3)
KINDS = ("all_gather", "reduce_scatter")


def figures(latency: tuple[float, float], wire_bytes: float, *rest: Any) -> Rates:
    """Rates of a gather and of a reduction."""
    return Rates(dict(zip(KINDS, latency, strict=True)), dict.fromkeys(KINDS, wire_bytes), *rest)


NETWORK = figures((1e-4, 1e-4), 1e8, 1.0, {2: 1e9, 4: 1e9}, 1e9)
HERE = figures((0.0, 0.0), 1e10, 0.0, {2: 1e9, 4: 1e9}, 1e9)


def lower(decisions: Any = None, **options: Any) -> fzero.Lowered:
    spec = fzero.Spec(loss=MODEL.loss, **{"optimizer": ADAMW, **options})
    world = 1
    for size in (options.get("mesh") or {"dp": 2}).values():
        world *= size
    with kept.captures():
        return fzero.lower(spec, MODEL.params, MODEL.batch(0, 0), world_size=world, decisions=decisions)


# --- one function for each choice -------------------------------------------------------------------------------------

MADE_UP: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[fzero.Lowered], Any], Any]] = {
    "bucket_bytes": (lambda costs: Choice(4096), {}, lambda low: low.plan.bucket_bytes.value, 4096),
    "cut": (
        lambda layers, last, chunks: Choice(("blocks/1",)),
        {"mesh": {"pp": 2}, "microbatches": 2},
        lambda low: low.plan.cut is not None and low.plan.cut.chunk_of,
        {"blocks.0": 0, "blocks.1": 1},
    ),
    "product": (
        lambda question, figures: Choice("onednn"),
        {"matmul": "fastest"},
        lambda low: any("onednn_mm" in str(gm.graph) for gm in low.program.segments.values()),
        True,
    ),
    "reduce": (lambda graph, plan: Choice("each"), {"microbatches": 2}, lambda low: low.reduce, "each"),
    "prefetch": (
        lambda program, options, rates: Choice(3, "made up"),
        {"zero": 3},
        lambda low: low.program.digest == lower(zero=3, prefetch=3).program.digest != lower(zero=3).program.digest,
        True,
    ),
    "update_on": (
        lambda program, rates: Choice("cpu"),
        {"offload": "optimizer"},
        lambda low: low.program.digest == lower(offload="optimizer", update_on="cpu").program.digest,
        True,
    ),
    "fetch_ahead": (
        lambda program: Choice(0),
        {"offload": "optimizer+params", "zero": 3},
        lambda low: low.program.digest != lower(offload="optimizer+params", zero=3).program.digest,
        True,
    ),
    "tile_bytes": (
        lambda program: Choice(4096),
        {"offload": "optimizer"},
        lambda low: any(ref.tile for op in low.program.ops for ref in op.reads),
        True,
    ),
    "copies": (
        lambda: (Choice(False),),
        {"optimizer": fzero.optim.adamw(1e-2), "precision": "bf16"},
        lambda low: bool(low.program.copies),
        False,
    ),
    "tighter": (
        lambda program, decided: iter([decided.but(prefetch=0)]),
        {"zero": 3},
        lambda low: low.program.digest == lower(zero=3, prefetch=0).program.digest,
        True,
    ),
}


def test_each_choice_has_a_made_up_one_here() -> None:
    assert set(MADE_UP) == {field.name for field in fields(decide.Deciders)}


@pytest.mark.parametrize("name", MADE_UP)
@pytest.mark.sampled(2)
def test_a_choice_is_replaced_by_replacing_one_function(name: str) -> None:
    """ "Always prefetch 3", and one more for each other choice: the program follows, and the record shows it."""
    function, options, found, wanted = MADE_UP[name]
    table = replace(decide.DECIDERS, **{name: function})
    assert found(lower(table, **options)) == wanted


def test_the_reason_of_a_made_up_choice_is_shown() -> None:
    table = replace(decide.DECIDERS, prefetch=lambda program, options, rates: Choice(3, "made up"))
    found = lower(table, zero=3)
    assert found.decisions.roles[0].prefetch == Choice(3, "made up")
    assert found.choices["prefetch"] == "made up"
    assert lower(table, zero=3, prefetch=1).decisions.roles[0].prefetch.how == GIVEN, "what the user says is not asked"


def test_no_field_is_twice() -> None:
    names = [field.name for record in (Options, Decisions, RoleDecisions) for field in fields(record)]
    assert len(names) == len(set(names))


# --- the same program from the record ---------------------------------------------------------------------------------

RECORDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"zero": 3, "microbatches": 2},
    "pipeline": {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2, "offload": "optimizer+params"},
    "tensor": {"mesh": {"dp": 2, "tp": 2}, "shard": dict(MODEL.rules), "zero": 2},
    "budget": {"zero": 3, "offload": "optimizer+params", "prefetch": 2, "device_bytes": 0},
    "products": {"matmul": "fastest"},
}


@pytest.mark.parametrize("case", RECORDED)
@pytest.mark.sampled(1)
def test_a_record_makes_the_same_program(case: str) -> None:
    options = dict(RECORDED[case])
    if case == "budget":
        options["device_bytes"] = tight_budget(options)
    first = lower(**options)
    again = lower(first.decisions, **options)
    assert {n: str(p) for n, p in again.programs.items()} == {n: str(p) for n, p in first.programs.items()}
    assert again.decisions == first.decisions


def tight_budget(options: dict[str, Any]) -> int:
    """Bytes of a device in which a step fits only with less brought ahead."""
    free = {name: value for name, value in options.items() if name != "device_bytes"}
    tables = [replace(decide.DECIDERS, tighter=lambda program, wanted: iter([wanted.but(fetch_ahead=0, prefetch=0)]))]
    least, most = lower(tables[0], **free).memory.spaces["device"], lower(**free).memory.spaces["device"]
    assert least < most
    return least


def test_a_record_has_what_another_run_measured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of a machine with figures, on one without: the same buckets and products."""
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    remember("buckets", {"p2p, 2 ranks": {str(8 << 20): 1.0}})
    question = next(iter(lower(matmul="fastest").decisions.matmul))
    remember("products", {question: {"torch": 1.0, "onednn": 9.0}})
    first = lower(matmul="fastest", transfers="p2p")
    assert (first.decisions.bucket_bytes.value, first.decisions.matmul[question].value) == (8 << 20, "onednn")
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path / "empty"))
    assert lower(matmul="fastest", transfers="p2p").decisions != first.decisions
    assert lower(first.decisions, matmul="fastest", transfers="p2p").program.digest == first.program.digest


SPECS = st.fixed_dictionaries(
    {
        "zero": st.sampled_from([0, 1, 2, 3]),
        "microbatches": st.sampled_from([1, 2]),
        "mesh": st.sampled_from([{"dp": 2}, {"dp_out": 2, "dp": 2}, {"pp": 2}, {"pp": 2, "dp": 2}]),
    },
    optional={
        "prefetch": st.sampled_from([0, 2]),
        "remat": st.just("full"),
        "precision": st.just("bf16"),
        "offload": st.sampled_from(["optimizer", "optimizer+params"]),
        "clip_norm": st.just(1.0),
        "transfers": st.just("shared"),
        "overlap": st.just(False),
    },
)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "prefetch": st.sampled_from([0, 1, 3]).map(lambda n: lambda program, options, rates: Choice(n)),
        "fetch_ahead": st.sampled_from([0, 1, 2]).map(lambda n: lambda program: Choice(n)),
        "tile_bytes": st.sampled_from([4096, 1 << 20]).map(lambda n: lambda program: Choice(n)),
        "bucket_bytes": st.sampled_from([1 << 10, 1 << 14]).map(lambda n: lambda costs: Choice(n)),
        "reduce": st.sampled_from(["each", "end"]).map(lambda how: lambda graph, plan: Choice(how)),
    },
)


@given(options=SPECS, table=TABLES)
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
def test_records_of_random_specs_make_the_same_programs(options: dict[str, Any], table: dict[str, Any]) -> None:
    first = cases_lowered(replace(decide.DECIDERS, **table), options)
    again = cases_lowered(first.decisions, options)
    assert [str(p) for p in again.programs.values()] == [str(p) for p in first.programs.values()]
    assert again.decisions == first.decisions


def cases_lowered(decisions: Any, options: dict[str, Any]) -> fzero.Lowered:
    world = 1
    for size in options["mesh"].values():
        world *= size
    batch = cases.batch(4 * options["microbatches"])
    with kept.captures():
        return fzero.lower(cases.spec(**options), cases.layers(16), batch, world_size=world, decisions=decisions)


def test_a_record_that_the_spec_contradicts_is_refused() -> None:
    record = lower(zero=3).decisions
    with pytest.raises(SpecError, match=r"Spec\(prefetch=2\) with decisions that say prefetch=1: leave prefetch= out"):
        lower(record, zero=3, prefetch=2)
    with pytest.raises(SpecError, match=r"Spec\(bucket_bytes=64\) with decisions that say bucket_bytes=\d+: "):
        lower(record, zero=3, bucket_bytes=64)
    with pytest.raises(SpecError, match=r"of the roles 0, this step has a role 1: same mesh needed"):
        lower(replace(record, cut=Choice(("blocks/1",))), mesh={"pp": 2}, microbatches=2)
    with pytest.raises(SpecError, match="they know nothing of the matrix product"):
        lower(record, matmul="fastest")
    with pytest.raises(SpecError, match=r"over 'tp' this step's values make .* the record has 0"):
        lower(record, mesh={"dp": 2, "tp": 2}, shard=dict(MODEL.rules))
    with pytest.raises(SpecError, match=r"decisions=3: needed those of another lowering, lowered\.decisions"):
        lower(3)


# --- reasons and runners-up -------------------------------------------------------------------------------------------


def test_a_table_has_value_runner_up_and_reason() -> None:
    low = lower(zero=3, microbatches=2, offload="optimizer")
    head, *lines = str(low.decisions).splitlines()
    assert head.split() == ["decision", "value", "how", "runner-up", "reason"]
    names = [name for name, _ in low.decisions.rows()]
    of_role = ["prefetch", "fetch_ahead", "update_on", "tile_bytes", "copies"]
    assert names == ["bucket_bytes", "cut", "reduce", *of_role]
    assert [line.split()[0] for line in lines] == names
    reduce = next(line for line in lines if line.startswith("reduce"))
    assert f"{low.reduce} (" in reduce
    assert low.choices["reduce"] in reduce, "the same sentence"
    assert all(choice.reason for _, choice in low.decisions.rows())
    piped = lower(mesh={"pp": 2}, microbatches=2).decisions
    shown = str(piped)
    assert "\nprefetch, roles 0 to 1 " in shown
    assert "\nupdate_on, roles 0 to 1 " in shown
    other = replace(piped, roles={**piped.roles, 1: piped.roles[1].but(prefetch=7)})
    assert "\nprefetch, role 1  " in str(other)


def test_who_decided_is_said() -> None:
    given = lower(zero=3, prefetch=2, reduce="each", microbatches=2, bucket_bytes=1 << 14).decisions
    assert {given.roles[0].prefetch.how, given.reduce.how, given.bucket_bytes.how} == {GIVEN}
    assert given.reduce.reason == "as Spec(reduce=) says"
    plain = lower(zero=0).decisions
    assert {plain.roles[0].prefetch.how, plain.reduce.how, plain.cut.how} == {IDLE}
    assert lower(zero=3).decisions.roles[0].prefetch.how == CHOSEN


def test_where_each_rank_holds_whole_gradients_the_reason_says_what_is_better() -> None:
    """The choice is that of all stages, for they have the same bits."""
    none, some = (lower(zero=zero, microbatches=2).decisions.reduce for zero in (0, 1))
    assert none.value == some.value == "each"
    assert (
        none.reason == f"{some.reason}. At this stage reduce='end' sends 2 times fewer bytes, and needs no more memory"
    )
    peaks = [lower(zero=0, microbatches=2, reduce=how).memory.peak for how in ("each", "end")]
    assert peaks[1] <= peaks[0]


def test_a_budget_that_forces_a_value_is_the_reason() -> None:
    options = {"zero": 3, "offload": "optimizer+params", "prefetch": 2}
    most = tight_budget(options)
    role = lower(**options, device_bytes=most).decisions.roles[0]
    assert (role.prefetch.value, role.prefetch.how) == (0, BUDGET)
    assert role.prefetch.reason.startswith(f"Spec(device_bytes={most}): what was wanted needs ")
    assert role.prefetch.runner_up is not None
    assert role.prefetch.runner_up.value == 2
    assert (role.prefetch.runner_up.cost or 0) > most


def test_the_cut_has_the_next_best_as_runner_up() -> None:
    layers = {f"blocks/{i}": size for i, size in enumerate((4, 4, 4, 4, 1))}
    found = fewest_elements(layers, 6, 2)
    assert (found.value, found.cost, found.runner_up) == (("blocks/3",), 12, RunnerUp(("blocks/2",), 15))
    assert fewest_elements({"a/0": 1, "a/1": 1}, 0, 2).runner_up is None, "there is no other"


def test_a_product_has_both_speeds() -> None:
    found = product("mm", {"torch": 101.0, "onednn": 215.0})
    assert (found.value, found.cost, found.runner_up) == ("onednn", 215.0, RunnerUp("torch", 101.0))
    assert product("mm", {"torch": 100.0, "onednn": 109.0}).value == "torch", "a tie stays"


def deep(**options: Any) -> fzero.Lowered:
    def loss(p: Any, b: torch.Tensor) -> torch.Tensor:
        for layer in p["layers"]:
            b = torch.tanh(b @ layer["w"])
        return b.square().mean()

    params = {"layers": [{"w": torch.empty(128, 128, device="meta")} for _ in range(6)]}
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), zero=3, **options)
    return fzero.lower(spec, params, torch.empty(64, 128), world_size=2)


@pytest.mark.acceptance
def test_one_ahead_is_predicted_to_gain_over_a_network_and_not_in_one_memory() -> None:
    programs: dict[int, Program] = {depth: deep(prefetch=depth).program for depth in DEPTHS}
    picked = fastest(programs, 1, NETWORK)
    depth, why = picked.value, picked.reason
    assert depth >= 1
    assert "predicted seconds" in why
    assert "0: " in why, "what was not taken is shown too"
    seconds = {n: step_time.seconds(program, NETWORK) for n, program in programs.items()}
    assert seconds[1] < 0.95 * seconds[0]
    assert fastest(programs, 0, HERE).value == 0


def test_a_choice_needs_a_gain() -> None:
    one = deep(prefetch=1).program
    assert fastest({1: one, 2: one}, 1, NETWORK).value == 1
    assert fastest({1: one, 2: one}, 2, NETWORK).value == 2


def test_buckets_are_as_small_as_latency_lets_them() -> None:
    costs = bucket_costs(NETWORK)
    assert bucket_bytes(costs).value == 8 << 20
    slow_start = Rates(
        {"all_gather": 2e-3, "reduce_scatter": 1e-3}, {"all_gather": 1e9, "reduce_scatter": 1e9}, 0, {}, 1
    )
    assert bucket_bytes(bucket_costs(slow_start)).value == 64 << 20


def test_the_size_of_buckets_is_kept_for_the_machine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))

    def of(ranks: int) -> Mesh:
        return Mesh((("pp", 2), ("dp", ranks)))

    def size(transport: str, mesh: Mesh, rates: Rates | None = None) -> int:
        return bucket_bytes(kept_bucket_costs(transport, mesh, rates=rates)).value

    assert size("p2p", of(2)) == BUCKET_BYTES, "nothing was measured"
    assert size("p2p", of(2), rates=NETWORK) == 8 << 20
    other = figures((1.0, 1.0), 1e9, 0, {}, 1)
    assert size("p2p", of(2), rates=other) == 8 << 20, "a later run keeps the layout of the first"
    assert size("p2p", of(2)) == 8 << 20, "lower plans what init will do"
    assert size("p2p", of(4)) == BUCKET_BYTES
    remember("buckets", {"shared, 2 ranks": {str(64 << 20): 1.0}})
    assert size("shared", of(2)) == 64 << 20
    remember("buckets", {"p2p, 8 ranks": {"huge": 1.0, "-8": 0.1}})
    assert size("p2p", of(8)) == BUCKET_BYTES, "what is no size of a bucket is none"


@pytest.mark.parametrize(("transfers", "kept"), [("p2p", "p2p"), ("auto", "p2p"), ("auto", "shared")])
def test_lower_has_the_buckets_of_init(
    transfers: str, kept: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ranks of all data axes, not of one, and by the figures of shared memory where runs had it: else a plan has
    other buckets than the run."""
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    remember("buckets", {f"{kept}, 4 ranks": {str(8 << 20): 1.0}, "p2p, 2 ranks": {str(64 << 20): 1.0}})
    if kept == "shared":
        remember("buckets", {"p2p, 4 ranks": {str(64 << 20): 1.0}})
    leaf = torch.empty(1200, 1200, device="meta")  # 5.8 MB: two of them in 64 MiB, one in 8
    spec = fzero.Spec(
        loss=lambda p, b: torch.tanh(b @ p["layers"][0]["v"] @ p["layers"][0]["w"]).mean(),
        optimizer=fzero.optim.sgd(0.1), mesh={"dp_out": 2, "dp": 2}, transfers=transfers,
    )  # fmt: skip
    plan = fzero.lower(spec, {"layers": [{"v": leaf, "w": leaf}]}, torch.empty(2, 1200, device="meta")).plan
    assert plan.bucket_bytes.value == 8 << 20
    assert len(plan.buckets) == 2


def test_one_rank_shares_no_memory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of shared memory among one rank of the data are those of a pipeline."""
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path))
    remember("buckets", {"shared, 1 ranks": {str(8 << 20): 1.0}, "p2p, 1 ranks": {str(64 << 20): 1.0}})

    def size(mesh: dict[str, int]) -> int:
        params = {"layers": [{"w": torch.empty(8, 8, device="meta")} for _ in range(2)]}
        spec = cases.spec(loss=lambda p, b: (b @ p["layers"][0]["w"] @ p["layers"][1]["w"]).mean(), mesh=mesh)
        return fzero.lower(spec, params, torch.empty(2, 8, device="meta")).plan.bucket_bytes.value

    assert (size({"dp": 1}), size({"pp": 2})) == (64 << 20, 8 << 20)


def test_a_large_bucket_that_is_held_elsewhere_has_few_tiles() -> None:
    program = lower(offload="optimizer").after("schedule_updates")
    largest = max(b.nbytes for b in program.buffers.values() if b.kind == "optimizer" and b.bucket is not None)
    small = tile_bytes(program)
    assert small.value == TILE_BYTES >= largest
    assert tile_bytes(program, least=largest // 4, tiles=4).value == largest // 4
    few = tile_bytes(program, least=1, tiles=4)
    assert few.value % PAGE_BYTES == 0
    assert largest <= 4 * few.value < largest + 4 * PAGE_BYTES
    assert "4 tiles of the largest bucket" in few.reason
    assert tile_bytes(lower().after("schedule_updates"), least=1).value == 1  # nothing is elsewhere
