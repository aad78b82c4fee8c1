"""The differential fuzzer: a seeded part of it, its tables, and that it finds and shrinks what is broken on purpose."""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import gloo, values

import fzero
from fzero import tree
from fzero.capture.ambient_rng import Keyed
from fzero.codegen import bind, out_forms
from fzero.errors import FzeroError
from fzero.random import key
from lab.fuzz import Case, Outcome, check, draw, run, runs, shrink
from lab.fuzz.__main__ import main
from lab.fuzz.case import Options
from lab.fuzz.check import apart, check_together
from lab.fuzz.operands import Draw
from lab.fuzz.ops import control
from lab.fuzz.options import draw_options
from lab.fuzz.report import Report, lost, read
from lab.fuzz.tables import GROUPS, KEYED
from lab.fuzz.values import Used

aten = torch.ops.aten
ROWS = {f"{group}/{name}": row for group, (_, rows) in {**GROUPS, **KEYED}.items() for name, row in rows.items()}
BODY = ('v0 = torch.tanh(p["w0"])', 'v1 = b["x0"].sin()', "v2 = v0 @ v0.t()", "v3 = v1.cumsum(0)", "v2[0].mul_(2.0)")
CASE = Case(
    "by hand",
    params=(("w0", "normal(0, (2, 3))"), ("w1", "normal(1, (2,))")),
    batch=(("x0", "normal(100 + rank, ({parts} * 2, 2))"), ("i0", "integers(300 + rank, ({parts}, 2))")),
    body=BODY,
    terms=("(v2 * wave(v2)).sum()", "v3.mean()", 'p["w1"].sum()'),
)
TRAINING = Options("training", 2, {"optimizer": "optim.sgd(0.1)", "microbatches": "2"}, {"zero": "1"})


def test_random_losses_have_eagers_numbers() -> None:
    report = run(range(8), seed=1)
    assert report.failed == []
    assert report.ends["equal"] >= 6
    assert len(report.aten) >= 60
    assert len(report.rows) >= 30


@pytest.fixture(scope="module")
def modules() -> set[type]:
    """Draws every row of the tables; the modules that were made."""
    never, found = [], set()
    for name, row in ROWS.items():
        for number in range(40):
            made = _operands(random.Random(f"{name} {number}"))
            try:
                with Keyed(key(0)):
                    for line in row(made).split("\n"):
                        made.add(line)
            except Exception:
                continue
            used = [value.module for value in made.names.values() if isinstance(value, Used)]
            found |= {type(module) for whole in used for module in whole.modules()}
            break
        else:
            never.append(name)
    assert never == []
    return found


def _operands(rng: random.Random) -> Draw:
    made = Draw(rng, draw_options(rng))
    made.names |= {"p": {}, "b": {}}
    shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 4)))
    for n, given in enumerate((shape, (2, 3), (4,), (1, 2, 3))):
        made.leaf("p", f"w{n}", f"normal({n}, {given})")
    made.leaf("b", "i0", "integers(300 + rank, (3, 2))")
    for line in ('p["w1"] * 1.5', 'p["w0"] > 0.1', 'torch.complex(p["w1"], p["w1"].sin())', 'p["w2"].sum()'):
        made.add(line)
    return made


def test_every_row_can_be_drawn_and_there_are_sixty_modules(modules: set[type]) -> None:
    own = {kind for kind in modules if kind.__module__.startswith("torch.nn.modules")}
    assert len(own) >= 60
    assert len(ROWS) - sum("/" in name and name.startswith(("modules/", "dropping/")) for name in ROWS) >= 120


def test_a_case_is_the_same_whenever_it_is_drawn_and_runs_from_its_script() -> None:
    first, second = draw(3, 17), draw(3, 17)
    assert first == second
    assert first.source != draw(3, 18).source
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(first.script, "script", "exec"), names)
    assert torch.isfinite(names["loss"](names["params"], names["batch"](0)))
    assert check(replace(CASE, options=replace(TRAINING, interpret=True))).end == "equal"


@pytest.mark.parametrize("options", [Options(), TRAINING], ids=["gradients", "training"])
def test_a_kernel_that_is_wrong_is_found_and_shrunk_to_its_line(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = out_forms.out_form
    monkeypatch.setattr(out_forms, "out_form", lambda op: form(aten.sigmoid.default if op is aten.tanh.default else op))
    outcome = check(replace(CASE, options=options))
    assert (outcome.end, outcome.reason) == ("wrong", "eager")
    small = shrink(replace(CASE, options=options), outcome, tries=60)
    assert [line for line in small.body if "tanh" in line] == list(small.body)
    assert small.options == Options()
    assert check(small).end == "wrong"


def test_bits_that_differ_between_stages_or_executors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.fuzz import runs

    sound = runs.interpreted
    monkeypatch.setattr(runs, "interpreted", lambda *a: {n: x + (n == "loss") for n, x in sound(*a).items()})
    assert check(replace(CASE, options=Options(interpret=True))).reason == "interpreter"
    bound, calls = runs.bound, []

    def second(*given: Any) -> Any:
        calls.append(given)
        return {n: x + (n == "loss" and len(calls) == 2) for n, x in bound(*given).items()}

    monkeypatch.setattr(runs, "bound", second)
    outcome = check(replace(CASE, options=TRAINING))
    assert (outcome.end, outcome.reason) == ("wrong", "stages")


def test_a_refusal_has_its_reason_and_another_error_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = check(replace(CASE, body=(*BODY, "v4 = v0 * v0.sum().item()"), terms=("v4.sum()",)))
    assert refused.end == "refused"
    assert "depend on aten._local_scalar_dense.default" in refused.reason
    assert "by hand" not in refused.reason

    def broken(*_: Any) -> Any:
        raise IndexError("index 3 out of range")

    monkeypatch.setattr(bind, "bind", broken)
    crashed = check(CASE)
    assert (crashed.end, crashed.reason) == ("crashed", "IndexError: index N out of range")


@pytest.mark.parametrize("name", control.DYNAMIC)
def test_what_is_known_only_when_it_runs_is_refused(name: str) -> None:
    made = _operands(random.Random(name))
    body = (*made.body, f"v9 = {control.DYNAMIC[name](made)}")
    outcome = check(Case(name, (), tuple(made.params), tuple(made.batch), body, ("v9.sum() * 1.0", 'p["w0"].sum()')))
    assert outcome.end == "refused", outcome


def test_losses_in_one_program_have_the_outcomes_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = replace(CASE, body=(*BODY, "v4 = v0 * v0.sum().item()"), terms=("v4.sum()",))
    cases = [CASE, refused, *(case for n in range(3) if not apart(case := draw(7, n)))]
    assert check_together(cases) == [check(case) for case in cases]
    form = out_forms.out_form
    monkeypatch.setattr(out_forms, "out_form", lambda op: form(aten.sigmoid.default if op is aten.tanh.default else op))
    assert [outcome.end for outcome in check_together(cases)][:2] == ["wrong", "refused"]
    other = replace(CASE, body=tuple(line.replace("tanh", "sin") for line in BODY))
    monkeypatch.setattr(sys.modules["lab.fuzz.check"], "check", lambda case: Outcome("equal"))
    assert [(o.end, o.reason) for o in check_together([CASE, other])] == [("wrong", "together"), ("equal", "")]


def test_a_run_goes_on_where_its_file_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs" / "out.jsonl"
    command = ["--seed", "5", "--out", str(file)]
    assert main([*command, "--count", "2"]) == 0
    file.write_text(file.read_text() + '\n{"case": "5:2", "en')
    assert main([*command, "--count", "3"]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    assert sorted(line["case"] for line in lines) == ["5:0", "5:1", "5:2"]
    assert "3 cases" in capsys.readouterr().out
    file.with_name("out.jsonl.now").write_text("checked 5:1 5:3 5:4")
    report = Report()
    assert lost(file, read(file)) == ([], {"5:3", "5:4"}), "one of them: each apart"
    file.with_name("out.jsonl.now").write_text("drawn 5:3")
    assert lost(file, report)[0][0]["end"] == "undrawn"
    file.with_name("out.jsonl.now").write_text("drawn 5:3\nanother")
    assert lost(file, report) == ([], set()), "at another commit"
    file.with_name("out.jsonl.now").write_text("checked 5:3")
    assert main([*command, "--count", "4"]) == 1
    assert "crashed: the process ended while the case was checked" in capsys.readouterr().out
    assert main(["--case", "5:1"]) == 0
    assert "def loss(p, b):" in capsys.readouterr().out


@pytest.mark.acceptance
def test_lines_of_another_commit_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What failed there may be mended, and what passed broken: their cases run again, and only these count."""
    file = tmp_path / "out.jsonl"
    part = file.with_name("out.jsonl.0")
    command = ["--seed", "5", "--count", "1", "--out", str(part), "--commit"]
    old = {"case": "5:0", "end": "crashed", "reason": "", "what": "", "seconds": 0.0, "commit": "one"}
    part.write_text(json.dumps(old))
    part.with_name("out.jsonl.0.now").write_text("checked 5:1\none")
    in_a_process = ["--seed", "5", "--count", "1", "--out", str(file), "--jobs", "1", "--commit", "two"]
    assert main(in_a_process) == 0
    assert main([*command, "two"]) == 0
    kept = [json.loads(line) for line in part.read_text().splitlines()]
    assert [(line["case"], line["end"], line["commit"]) for line in kept] == [
        ("5:0", "crashed", "one"),
        ("5:0", "equal", "two"),
    ]
    assert main([*command, "one"]) == 1
    assert main(command[:-1]) == 1, "without a commit all lines count"


# --- real ranks -------------------------------------------------------------------------------------------------------


def on_real_ranks(cases: list[Case], transfers: str) -> list[dict[str, torch.Tensor]]:
    """The state and the metrics that this process, a rank of two, has after a step of each case."""
    found = []
    for case in cases:
        made = runs.prepared(case)
        state = fzero.init(made.names["params"], fzero.Spec(**made.fields, transfers=transfers))
        state = fzero.step(state, made.batches[int(os.environ["RANK"])])
        paths, leaves, _ = tree.flatten(fzero.unshard(state.tree))
        found.append(
            {**dict(zip(paths, leaves, strict=True)), **dict(zip(*tree.flatten(state.metrics)[:2], strict=True))}
        )
    return found


def two_ranks(seed: int, count: int) -> list[tuple[Case, dict[str, torch.Tensor]]]:
    """Training steps on two ranks without a key, and what the executor makes of them in one process."""
    found: list[tuple[Case, dict[str, torch.Tensor]]] = []
    number = 0
    while len(found) < count:
        case, number = draw(seed, number), number + 1
        if case.options.form == "training" and case.options.world == 2 and not case.options.keyed:
            made = runs.prepared(case)
            try:
                found.append((case, runs.bound(made, runs.lowered(made))))
            except FzeroError:  # refused alike
                continue
    return found


def differing_transports(seed: int, count: int) -> list[str]:
    """The cases and leaves whose bits shared memory or messages change."""
    expected = two_ranks(seed, count)
    wrong = []
    for transfers in ("shared", "p2p"):
        for rank in values(
            gloo(2, on_real_ranks, [case for case, _ in expected], transfers, timeout=600.0 + 60 * count)
        ):
            for (case, own), other in zip(expected, rank, strict=True):
                named = {name: x for name, x in own.items() if name in other}
                assert len(named) > 1
                wrong += [f"{case.name} {transfers} {n}" for n, x in named.items() if not runs.same_bits(x, other[n])]
    return wrong


def test_transports_have_the_executors_bits() -> None:
    assert differing_transports(seed=2, count=1) == []
