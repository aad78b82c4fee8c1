"""The fuzzer of meshes: a seeded part of it, what it draws, and that it finds and shrinks what is broken on purpose."""

from __future__ import annotations

import ast
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero import P, Pipeline, groups
from fzero.precision import LossScale, Precision
from fzero.runtime import interpreter
from lab import fuzz_meshes
from lab.fuzz.__main__ import main
from lab.fuzz_meshes import (
    Case,
    Outcome,
    check,
    checkpoints,
    draw,
    optimizers,
    oracle,
    read,
    refusals,
    run,
    runs,
    shrink,
)
from lab.fuzz_meshes.case import Recipe
from lab.fuzz_meshes.layers import KINDS, Layer
from lab.fuzz_meshes.model import Model
from lab.fuzz_meshes.report import uses

PLAIN = {"norm": "layer", "turned": False, "bias": True, "residual": True}
MLP = Layer("mlp", {**PLAIN, "hidden": 8, "gated": False, "act": "tanh"})
HEADS = {"heads": 2, "kv": 2, "head": 4, "fused": True, "mask": "none", "rope": False, "qk_norm": False}
ATTENTION = Layer("attention", {**PLAIN, **HEADS, "way": "softmax"})
THREE = {**ATTENTION.options, "heads": 3, "kv": 3, "fused": False}
SCALAR = Layer("scale", {**PLAIN, "norm": "none", "bias": False, "place": "scalar"})
MODEL = Model(8, 4, 8, "floats", "values", (MLP, MLP))
WIDE = replace(MODEL, width=12, layers=(Layer("attention", THREE),))
CASE = Case("by hand", MODEL, Recipe(), {"mesh": {"dp": 2}, "zero": 3})
CUT = {"blocks/*/up": P(None, "tp"), "blocks/*/up_b": P("tp"), "blocks/*/down": P("tp", None)}


@pytest.mark.parametrize("seed", [101, 935, 1005])  # that draw small models
@pytest.mark.sampled(1)
def test_random_models_on_random_meshes_train_as_on_one_rank(seed: int) -> None:
    report = run(range(3), seed)
    assert report.failed == []
    assert report.ends["equal"] >= 2


def test_a_thousand_cases_hold_all_there_is() -> None:
    """Every kind of layer, head, optimizer, axis, schedule and option; two to eight ranks; no two alike."""
    cases = [draw(0, number) for number in range(1000)]
    seen = Counter(word for case in cases for word in uses(case))
    words = {f"layer:{kind}" for kind in KINDS} | {f"optimizer:{name}" for name in optimizers.TABLE}
    words |= {f"axis:{name}" for name in ("pp", "dp_out", "dp", "tp")} | {"model:encoder", "model:shared"}
    options = ("shard", "sequence", "pipeline", "reduce", "remat", "offload", "nvme_path", "update_on", "clip_norm")
    words |= {f"option:{name}" for name in (*options, "clip_value", "trainable", "microbatches", "mean", "prefetch")}
    words |= {f"head:{name}" for name in ("tied", "words", "values", "classes", "contrast")}
    words |= {f"dtype:{name}" for name in ("f64", "f32", "narrow")}
    assert [word for word in words if seen[word] < 5] == []
    assert {case.world for case in cases} == set(range(2, 9))
    named = {getattr(p, "schedule", p) for case in cases if (p := case.place.get("pipeline")) is not None}
    assert named == {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"}
    zero = {repr(case.place["zero"]) for case in cases}
    assert {"0", "1", "2", "3", "'hsdp'", "'hpz'"} < zero
    assert any("'**'" in text for text in zero)
    assert len({repr(case) for case in cases}) == 1000


def test_a_case_is_the_same_whenever_it_is_drawn_and_runs_from_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw(3, 17) == draw(3, 17)
    assert draw(3, 17).model == draw(3, 16).model
    assert draw(3, 17).place != draw(3, 16).place
    wide = Precision(compute="fp16", loss_scale=LossScale(initial=64.0))
    rules = {"blocks/0/up": P(None, "tp"), "blocks/1/qkv": P(None, groups("tp", 3))}
    place = {
        "mesh": {"pp": 2, "tp": 2},
        "zero": {"**": 1},
        "shard": rules,
        "pipeline": Pipeline("1f1b", cut=["blocks/1"]),
    }
    odd = Case("odd", replace(MODEL, layers=(MLP, ATTENTION)), Recipe(precision=wide, dtype="f32"), place)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(odd.script, "script", "exec"), names)
    assert names["case"] == odd
    exec(compile(CASE.script, "script", "exec"), {"__name__": "__main__"})
    assert "end='equal'" in capsys.readouterr().out


def test_the_oracle_has_no_code_of_fzeros() -> None:
    folder = Path(fuzz_meshes.__file__).parent
    for name in ("oracle", "model", "layers"):
        imports = [
            node
            for node in ast.walk(ast.parse((folder / f"{name}.py").read_text()))
            if isinstance(node, ast.ImportFrom)
        ]
        assert {str(node.module) for node in imports if str(node.module).startswith(("fzero", "lab"))} <= {
            f"lab.fuzz_meshes{end}" for end in ("", ".layers", ".model", ".case")
        }


@pytest.mark.parametrize("optimizer", sorted(optimizers.TABLE))
@pytest.mark.sampled(1)
def test_every_optimizer_has_a_reference(optimizer: str) -> None:
    assert check(replace(CASE, recipe=Recipe(optimizer, steps=3))).end == "equal"


# --- what is broken on purpose ----------------------------------------------------------------------------------------


def test_a_sum_that_misses_a_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = interpreter._complete

    def broken(transfers: Any) -> None:
        if transfers[0].op.axis == "tp" and transfers[0].op.kind == "all_reduce":
            transfers[-1].tensors[0] = torch.zeros_like(transfers[-1].tensors[0])
        sound(transfers)

    monkeypatch.setattr(interpreter, "_complete", broken)
    outcome = check(replace(CASE, place={"mesh": {"tp": 2}, "zero": 0, "shard": CUT}))
    assert (outcome.end, outcome.reason) == ("wrong", "loss")


def test_a_failing_case_is_shrunk_to_what_it_needs() -> None:
    """Of a case that fails wherever an attention's output is cut and parts of the batch are added."""

    def fails(case: Case) -> Outcome:
        leaves, shard = case.model.leaves(), case.place.get("shard", {})
        wrong = any(path.endswith("/o") for path in shard) and case.recipe.microbatches > 1 and case.axis("tp") > 1
        assert set(shard) <= set(leaves), "a rule of a leaf that is not there"
        return Outcome("wrong", "params") if wrong else Outcome("equal")

    case = next(case for n in range(2000) if fails(case := draw(0, n)).end == "wrong" and len(case.place) > 5)
    small = shrink(case, tries=2000, run=fails)
    rule = small.place["shard"]
    assert len(rule) == 1 == len(small.model.layers)
    assert small.place == {"mesh": {"tp": 2}, "zero": 0, "shard": rule}
    assert small.recipe == Recipe(microbatches=2, rows=2, steps=1)
    assert (small.model.head, small.model.encoder, small.model.aux) == ("values", (), ())


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (Recipe("momentum"), "params"), (Recipe("momentum", "f32"), "opt_state"),
        (Recipe("momentum", "f32", "bf16"), "opt_state"), (Recipe(clip={"clip_norm": 0.01}), "grad_norm"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_gradient_is_found_in_every_dtype(recipe: Recipe, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank's gradient is 5 % off."""
    sound = interpreter._complete

    def broken(transfers: Any) -> None:
        if transfers[0].op.kind in ("all_reduce", "reduce_scatter") and transfers[0].tensors[0].numel() > 8:
            transfers[-1].tensors[0] = transfers[-1].tensors[0] * 1.05
        sound(transfers)

    monkeypatch.setattr(interpreter, "_complete", broken)
    outcome = check(replace(CASE, recipe=recipe))
    assert (outcome.end, outcome.reason) == ("wrong", reason)


def test_a_product_in_shares_is_rounded_as_model_ranks_round_it() -> None:
    torch.manual_seed(0)
    a, b, bias = (torch.randn(*shape).bfloat16() for shape in ((8, 64), (64, 8), (8,)))
    halves = a[:, :32] @ b[:32] + a[:, 32:] @ b[32:]
    with oracle.SumsInShares(2):
        assert torch.equal(a @ b, halves)
        assert torch.equal(torch.addmm(bias, a, b), bias + halves)
        assert torch.equal(a.view(2, 4, 64) @ b.expand(2, 64, 8), halves.view(2, 4, 8))
        odd, wide = a[:, :63] @ b[:63], a.float() @ b.float()
    assert torch.equal(odd, a[:, :63] @ b[:63]), "63 do not divide"
    assert torch.equal(wide, a.float() @ b.float())
    assert not torch.equal(a @ b, halves)


@pytest.mark.acceptance
def test_sixteen_bits_over_tp_are_allowed_what_partial_sums_round() -> None:
    """Its embedding's gradient is six times as far from float64 as PyTorch's, and twice that of sums in halves."""
    assert check(draw(0, 1442)).end == "refused", "and equal after the remedies"


def test_a_wrong_gradient_over_tp_is_found_in_sixteen_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = interpreter._complete

    def broken(transfers: Any) -> None:
        if transfers[0].op.kind == "all_reduce" and transfers[0].tensors[0].numel() > 8:
            transfers[-1].tensors[0] = transfers[-1].tensors[0] * 1.25
        sound(transfers)

    place = {"mesh": {"tp": 2}, "zero": 0, "shard": CUT}
    case = replace(CASE, recipe=Recipe("momentum", "f32", "bf16"), place=place)
    assert check(case).end == "equal"
    monkeypatch.setattr(interpreter, "_complete", broken)
    assert check(case).end == "wrong"


def test_a_whole_leaf_is_not_told_to_be_whole() -> None:
    """The product with `o` comes to lie in parts by another leaf; it is brought together, and nothing is refused."""
    heads = {**ATTENTION.options, "heads": 4, "kv": 2, "head": 3, "fused": False, "norm": "none", "bias": False}
    heads |= {"mask": "causal", "qk_norm": True}
    model = Model(12, 4, 8, "tokens", "values", (Layer("attention", heads),), second="add")
    place = {"mesh": {"tp": 3}, "zero": 0, "shard": {"stem2": P(None, "tp")}, "sequence": "tp"}
    assert check(Case("by hand", model, Recipe(), place)).end == "equal"


def test_forward_work_that_reads_a_segment_of_both_phases() -> None:
    """Of a loss with two summands in 16 bits: a sum over `tp` followed a segment that held backward work already."""
    mixer = Layer("mixer", {"norm": "rms", "turned": False, "bias": True, "residual": True, "hidden": 12})
    mlp = Layer("mlp", {**PLAIN, "turned": True, "bias": False, "hidden": 24, "gated": True, "act": "gelu"})
    model = Model(8, 6, 16, "floats", "words", (mixer, mlp), aux=((1, "head"),), mean=True)
    narrow = Recipe("adamw", "f32", Precision(compute="fp16", loss_scale=LossScale(initial=64.0)), microbatches=2)
    place = {"mesh": {"pp": 2, "tp": 2}, "zero": 0, "shard": {"blocks/0/down": P(None, "tp")}}
    assert check(Case("by hand", model, narrow, place)).end == "equal"


def test_a_refusal_is_remedied_and_another_error_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "TABLE", ())
    place = {"mesh": {"tp": 2}, "zero": 0, "shard": {"blocks/0/norm": P("tp"), **CUT}}
    assert check(replace(CASE, place=place)).end == "unlisted"
    idle = refusals.Refusal("Keep it whole", lambda case, match: case)
    monkeypatch.setattr(refusals, "TABLE", (idle,))
    again = check(replace(CASE, place=place))
    assert (again.end, again.reason.partition(":")[0]) == ("unlisted", "remedied")

    def broken(*_: Any, **__: Any) -> Any:
        raise IndexError("index 3 out of range")

    monkeypatch.setattr(runs, "interpret", broken)
    crashed = check(CASE)
    assert (crashed.end, crashed.reason) == ("crashed", "IndexError: index N out of range")
    monkeypatch.setattr(runs, "interpret", lambda *a, **k: (_ for _ in ()).throw(fzero.VerifyError("[meaning] op 3")))
    assert check(CASE).end == "crashed"


def tp(n: int, rules: dict[str, P], **place: Any) -> dict[str, Any]:
    return {"mesh": {"dp": 2, "tp": n}, "zero": 1, "shard": rules, **place}


REFUSED: dict[str, Case] = {
    "needs all of it": replace(CASE, place=tp(2, {"blocks/0/norm": P("tp"), **CUT})),
    "in parts of that dim over an axis outside of it": replace(
        CASE, place={"mesh": {"tp": 2, "mp": 2}, "zero": 0, "shard": {
            "blocks/0/up": P(None, "tp"), "blocks/0/up_b": P("mp"), "blocks/0/down": P("tp", None)
        }},
    ),
    "keep the leaves of that product whole": Case("by hand", WIDE, Recipe(), tp(2, {"blocks/0/q": P(None, "tp")})),
    "as many numbered layers": replace(CASE, place={"mesh": {"pp": 3}, "zero": 0, "pipeline": "zb-v"}),
    "moments in blocks": replace(CASE, recipe=Recipe("adamw8bit", steps=1), place=tp(2, CUT)),
    "a whole matrix": replace(CASE, recipe=Recipe("muon", steps=1), place=tp(2, CUT)),
    "a multiple of 2 microbatches": replace(
        CASE, place={"mesh": {"pp": 2}, "zero": 0, "pipeline": Pipeline("interleaved", chunks=1)}
    ),
    "smallest cap": replace(CASE, place={"mesh": {"dp": 2}, "zero": 3, "gather_bytes": 64}),
    "stays on the device": replace(
        CASE, model=replace(MODEL, layers=(SCALAR, MLP)),
        place={"mesh": {"dp": 2}, "zero": 0, "offload": {"params/blocks/0/**": "cpu", "optimizer": "cpu"}},
    ),
}  # fmt: skip


def test_every_listed_refusal_has_a_case_that_runs_after_its_remedy() -> None:
    outcomes = {name: check(case) for name, case in REFUSED.items()}
    assert [outcome for name, outcome in outcomes.items() if outcome.end != "refused" or name not in outcome.what] == []
    seen = [any(refusals.matches(row, outcome.what) for outcome in outcomes.values()) for row in refusals.TABLE]
    assert all(seen), [row.pattern for row, found in zip(refusals.TABLE, seen, strict=True) if not found]


# --- runs and checkpoints ---------------------------------------------------------------------------------------------


def test_a_run_goes_on_where_its_file_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs" / "out.jsonl"
    command = ["--meshes", "--seed", "25", "--out", str(file)]
    assert main([*command, "--count", "1"]) == 0
    file.write_text(file.read_text() + '\n{"case": "25:1", "en')
    assert main([*command, "--count", "2"]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    assert [line["case"] for line in lines] == ["25:0", "25:1"]
    assert "2 cases" in capsys.readouterr().out
    file.with_name("out.jsonl.now").write_text("checked 25:2")
    assert main([*command, "--count", "3"]) == 1
    assert "crashed: the process ended while the case was checked" in capsys.readouterr().out
    assert not read(file).good
    assert main(["--meshes", "--case", "25:0"]) == 0
    assert "case = Case(name='25:0'" in capsys.readouterr().out


@pytest.mark.acceptance  # test_fuzz has the same of a short case
def test_lines_of_another_commit_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What failed there may be mended, and what passed broken: their cases run again, and only these count."""
    file = tmp_path / "out.jsonl"
    command = ["--meshes", "--seed", "25", "--count", "1", "--out", str(file), "--jobs", "1", "--commit"]
    part = file.with_name("out.jsonl.0")
    old = {"case": "25:0", "end": "crashed", "reason": "", "what": "", "seconds": 0.0, "commit": "one"}
    part.write_text(json.dumps(old))
    part.with_name("out.jsonl.0.now").write_text("checked 25:1\none")
    assert main([*command, "two"]) == 0
    assert main([*command, "two"]) == 0
    kept = [json.loads(line) for line in part.read_text().splitlines()]
    assert [(line["case"], line["end"], line["commit"]) for line in kept] == [
        ("25:0", "crashed", "one"),
        ("25:0", "equal", "two"),
    ]
    assert main([*command, "one"]) == 1
    assert main(command[:-1]) == 1, "without a commit all lines count"


@pytest.mark.parametrize("number", range(200))
@pytest.mark.sampled(1)
def test_a_checkpoint_goes_to_another_mesh_in_bits_and_trains_on(number: int, folder: Path) -> None:
    first, second = checkpoints.draw_pair(0, number)
    outcome = checkpoints.exchange(first, second, folder)
    assert outcome.end == "equal", (outcome, first, second)


def test_a_bit_that_is_lost_on_the_way_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = checkpoints.draw_pair(0, 10)
    sound = checkpoints._loaded

    def broken(plan: Any, rank: int, homes: Any, saved: Path) -> None:
        sound(plan, rank, homes, saved)
        if rank == 0:
            next(x for x in homes.in_memory.values() if x.is_floating_point() and x.numel()).view(-1)[:1].neg_()

    monkeypatch.setattr(checkpoints, "_loaded", broken)
    one, two = (replace(case, place=_at_home(case.place)) for case in (first, second))
    assert checkpoints.exchange(one, two, folder).reason == "bits"


def _at_home(place: Any) -> dict[str, Any]:
    return {name: value for name, value in place.items() if name not in ("offload", "nvme_path", "update_on")}
