"""`fzero explain`: what it says equals what the program, the account and the simulation say."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import cases
import pytest
import torch

import fzero
from benchmarks import lower_large
from fzero import cli
from fzero.cost.memory import SHOWN, account
from fzero.cost.step_time import op_spans
from fzero.explain import as_page, drawings
from fzero.explain.as_page import page
from fzero.explain.as_text import leaf_report, program_report, roles_of
from fzero.explain.explain_command import role_of
from fzero.explain.exposure import in_flight, most_exposed
from fzero.explain.held import at_fullest
from fzero.explain.leaf_road import road
from fzero.explain.pass_changes import kinds, ops_of, pass_changes
from fzero.explain.subject import Subject, read
from fzero.hardware import load
from fzero.ir.program import wire_bytes
from fzero.ir.records import DEVICE

PROBLEM = """
import cases, fzero

def problem():
    return cases.spec(zero=3), cases.layers(depth=4), cases.batch(16)

def phased():
    optimizer = fzero.optim.onebit_adam(1e-2, warmup_steps=5)
    return cases.spec(zero=0, optimizer=optimizer), cases.layers(depth=2), cases.batch(16)
"""


@pytest.fixture(scope="module")
def lowered() -> fzero.Lowered:
    return cases.lowered(world=4, params=cases.layers(depth=4), zero=3)


@pytest.fixture(scope="module")
def pipelined() -> fzero.Lowered:
    return cases.lowered(
        world=None, params=cases.layers(depth=4), mesh={"pp": 2, "dp": 2}, microbatches=2, pipeline="1f1b"
    )


def spans_of(lowered: fzero.Lowered) -> dict[int, list[tuple[float, float]]]:
    return op_spans(lowered.programs, load("h100").rates(lowered.plan.mesh))


@pytest.fixture
def problem(tmp_path: Path) -> str:
    (tmp_path / "problem.py").write_text(PROBLEM)
    return f"{tmp_path / 'problem.py'}:problem"


def test_the_rows_of_the_fullest_op_add_up_to_the_account_by_kind(lowered: fzero.Lowered) -> None:
    """Each kind, but for what the account adds as "other": holes of the arena. Also where the op needs a workspace."""
    op = account(lowered.program).op
    ops = list(lowered.program.ops)
    ops[op] = ops[op].with_attrs(workspace=ops[op].workspace + 4096, heap=512)
    for program in (lowered.program, replace(lowered.program, ops=tuple(ops))):
        found = Counter[str]()
        for held in at_fullest(program):
            found[held.kind] += held.nbytes
        at = account(program)
        assert {kind: found[kind] for kind in at if kind != "other"} == {
            kind: at[kind] for kind in at if kind != "other"
        }
    assert any(held.count == 4 and held.name == "params:layers.*" for held in at_fullest(program))


def test_the_spans_of_ops_end_with_the_simulated_step(lowered: fzero.Lowered, pipelined: fzero.Lowered) -> None:
    for one in (lowered, pipelined):
        machine = load("h100")
        for role, spans in spans_of(one).items():
            rank = next(rank for rank, program in one.roles.items() if program is one.programs[role])
            simulated = fzero.simulate(one, machine, rank)
            assert len(spans) == len(one.programs[role].ops)
            assert spans[-1][1] == simulated.seconds
            assert all(a[1] == b[0] for a, b in pairwise(spans))
            exposed = sum(f.exposed or 0.0 for f in in_flight(one.programs[role], spans))
            assert exposed == pytest.approx(sum(simulated.waited.values()))


def test_every_transfer_has_its_bytes_and_its_wait(lowered: fzero.Lowered) -> None:
    program = lowered.program
    found = in_flight(program)
    assert sum(f.nbytes for f in found) == sum(wire_bytes(program, op) for op in program.ops)
    for one in found:
        assert program.ops[one.wait].is_wait
        assert program.ops[one.wait].target == program.ops[one.op].target
        assert one.computed == sum(op.computes for op in program.ops[one.op : one.wait])
    assert all(f.computed == 0 for f in most_exposed(found)), "without seconds: beside which nothing computes"


def test_without_overlap_every_transfer_is_exposed(lowered: fzero.Lowered) -> None:
    blocking = cases.lowered(world=4, params=cases.layers(depth=4), zero=3, overlap=False)
    overlapping, waiting = (most_exposed(in_flight(one.program), 1000) for one in (lowered, blocking))
    assert len(waiting) == len(in_flight(blocking.program)) > len(overlapping)


def test_the_changes_of_the_passes_lead_from_the_naive_program_to_the_last(lowered: fzero.Lowered) -> None:
    ops = kinds(ops_of(lowered.naive))
    for change in pass_changes(lowered):
        ops = ops - change.removed + change.added
    assert ops == kinds(ops_of(lowered.program))
    assert pass_changes(lowered)[-1].sent == sum(wire_bytes(lowered.program, op) for op in lowered.program.ops)


def test_of_a_very_large_program_the_counts_of_the_record_are_taken(
    lowered: fzero.Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fzero.explain.pass_changes.MOST_OPS", 10)
    ops = kinds(ops_of(lowered.naive))
    for change in pass_changes(lowered):
        assert change.sent is None
        ops = ops - change.removed + change.added
    assert ops == kinds(ops_of(lowered.program))


def test_of_a_large_pipeline_each_role_has_its_own_record(
    pipelined: fzero.Lowered, monkeypatch: pytest.MonkeyPatch
) -> None:
    rerun = [sum((Counter(change.added) for change in pass_changes(pipelined, role)), Counter()) for role in (0, 1)]
    monkeypatch.setattr("fzero.explain.pass_changes.MOST_OPS", sum(len(p.ops) for p in pipelined.programs.values()) - 1)
    for role in (0, 1):
        ops = kinds(ops_of(pipelined.naive))
        changes = pass_changes(pipelined, role)
        for change in changes:
            assert change.sent is None
            ops = ops - change.removed + change.added
        assert ops == kinds(ops_of(pipelined.programs[role]))
        assert sum((Counter(change.added) for change in changes), Counter()) <= rerun[role]


def test_the_road_of_a_leaf_is_every_op_with_its_bucket(lowered: fzero.Lowered) -> None:
    program = lowered.program
    found = road(lowered.programs, "layers/2/w")
    refs = {i: (*op.reads, *op.writes) for i, op in enumerate(program.ops)}
    of_bucket = {i for i, of in refs.items() for ref in of if program.buffers[ref.name].bucket == "layers.2"}
    assert {touch.index for touch in found.touches} == of_bucket, "here every op that names the bucket names the matrix"
    kinds_of = [touch.op.kind for touch in found.touches]
    assert kinds_of.count("all_gather") >= 1
    assert kinds_of.count("reduce_scatter") == 1
    assert kinds_of.count("update") == 1
    assert {b.entry for b in found.at_rest} == {"params", "opt_state/momentum"}
    assert {b.entry for b in road(lowered.programs, "params/layers/2/w").at_rest} == {"params"}
    assert all(b.sharded == "dp" and b.nbytes * 4 == program.buckets["layers.2"].length * 4 for b in found.at_rest)


def test_a_bias_and_its_matrix_are_told_apart_in_one_bucket(lowered: fzero.Lowered) -> None:
    """An op with elements of one leaf only is of its road only."""
    ops = list(lowered.program.ops)
    first, matrix = next(
        (i, r)
        for i, op in enumerate(ops)
        for r in op.reads
        if r.shape == (64, 64) and r.name.startswith("params:layers.1")
    )
    alone = {0: replace(lowered.program, ops=(*ops[:first], replace(ops[first], reads=(matrix,)), *ops[first + 1 :]))}
    assert first in {touch.index for touch in road(alone, "layers/1/w").touches}
    assert first not in {touch.index for touch in road(alone, "layers/1/b").touches}
    at, bias = next(
        (i, r)
        for i, op in enumerate(ops)
        for r in op.reads
        if r.shape == (64,) and r.name.startswith("params:layers.1")
    )
    ops[at] = replace(ops[at], reads=(bias,))
    programs = {0: replace(lowered.program, ops=tuple(ops))}
    assert at in {touch.index for touch in road(programs, "layers/1/b").touches}
    assert at not in {touch.index for touch in road(programs, "layers/1/w").touches}
    assert at in {touch.index for touch in road(lowered.programs, "layers/1/w").touches}


def test_a_leaf_of_another_role_is_found_and_one_that_is_not_there_is_an_error(pipelined: fzero.Lowered) -> None:
    last = road(pipelined.programs, "layers/3/w")
    assert last.role == 1
    assert "of role 1" in leaf_report(pipelined.programs[1], last, pipelined)
    with pytest.raises(fzero.SpecError, match=r"no leaf 'layer/3/w'.*Did you mean 'layers/3/w'"):
        road(pipelined.programs, "layer/3/w")


def test_the_text_of_a_program_says_the_same_as_the_spec(lowered: fzero.Lowered, tmp_path: Path) -> None:
    """But for what only the spec knows: passes, seconds, the layout over tensor dims."""
    (tmp_path / "program.txt").write_text(str(lowered.program))
    subject = read(str(tmp_path))
    text = program_report(subject.programs[0], None, None, 0)
    assert program_report(lowered.program, None, lowered, 0).startswith(text)
    assert "PASSES" not in text


def test_the_command_prints_and_writes(problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", problem, "--ranks", "4", "--hardware", "h100"]) == 0
    printed = capsys.readouterr().out
    for words in ("4 ranks, mesh dp=4", "MEMORY:", "TRANSFERS:", "exposed for longest", "PASSES", "schedule_gathers"):
        assert words in printed
    assert cli.main(["explain", problem, "--ranks", "4", "--leaf", "layers/3/w"]) == 0
    assert "sharded: a slice of each of 4 ranks of dp" in capsys.readouterr().out
    assert cli.main(["explain", problem, "--ranks", "4", "--html", str(tmp_path / "x.html"), "--leaf", "z"]) == 0
    assert "The road of z" in (tmp_path / "x.html").read_text()


def test_the_command_takes_a_phase(problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Signs are exchanged in the second phase of 1-bit Adam only."""
    phased = problem.replace(":problem", ":phased")
    for arguments, coded in (([], False), (["--phase", "warmup"], False), (["--phase", "coded"], True)):
        assert cli.main(["explain", phased, "--ranks", "4", *arguments]) == 0
        assert ("all_to_all" in capsys.readouterr().out) is coded


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{problem}"], "say how many ranks there are, as --ranks 64"),
        (["{problem}", "--ranks", "3"], "a batch of 16 rows cannot be divided over 3 data ranks"),
        (["{problem}", "--ranks", "0"], "--ranks 0: needed a positive int"),
        (["{problem}", "--ranks", "4", "--role", "2"], "there are the roles 0"),
        (["{folder}"], "there is no program.txt in this folder"),
        (["{folder}/problem.py"], "needed the text of a program"),
        (["{folder}/gone.py:problem"], "gone.py; needed FILE.py:FUNCTION"),
        (["{folder}/gone"], "there is no file {folder}/gone; needed FILE.py:FUNCTION"),
        (["{folder}/wrong.py:of_value"], "wrong.py:3: ValueError: mine"),
        (["{folder}/wrong.py:of_key"], "wrong.py:5: KeyError: 'x'"),
        (["{folder}/wrong.py:two"], "it returned tuple of 2; needed (spec, params_like, batch_like)"),
        (["{folder}/cut.txt"], "is not understood"),
        (["{folder}/whole.txt", "--hardware", "h100"], "holds no segments"),
        (["{folder}/whole.txt", "--ranks", "4"], "--ranks 4: a program says its mesh"),
        (["{folder}/whole.txt", "--phase", "coded"], "the text of a program is of one phase"),
        (["{problem}", "--ranks", "4", "--phase", "coded"], "neither the optimizer nor the step has phases"),
    ],
)
def test_what_cannot_be_explained_is_said(
    arguments: list[str], said: str, problem: str, tmp_path: Path, lowered: fzero.Lowered,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "whole.txt").write_text(str(lowered.program))
    (tmp_path / "wrong.py").write_text(
        "import fzero\ndef of_value():\n    raise ValueError('mine')\ndef of_key():\n    return {}['x']\n"
        "def two():\n    return 1, 2\n"
    )
    (tmp_path / "cut.txt").write_text(str(lowered.program).replace("all_gather params", "all_gather [", 1))
    assert cli.main(["explain", *(word.format(problem=problem, folder=tmp_path) for word in arguments)]) == 2
    assert said.format(folder=tmp_path) in capsys.readouterr().err


def data_of(html: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(html.split('id="data">')[1].split("</script>")[0])
    return found


def test_the_page_holds_every_op_and_well_formed_drawings(lowered: fzero.Lowered, pipelined: fzero.Lowered) -> None:
    for one in (lowered, pipelined):
        spans = spans_of(one)
        html = page(Subject("test", one.programs, one), 0, spans[0], "h100")
        content, program = data_of(html), one.programs[0]
        texts, buffers = content["texts"], content["buffers"]
        assert [texts[op[0]] for op in content["ops"]] == [op.kind for op in program.ops]  # type: ignore[index,attr-defined]
        assert [texts[op[3]] for op in content["ops"]] == [op.why for op in program.ops]  # type: ignore[index,attr-defined]
        for op, shown in zip(program.ops, content["ops"], strict=True):  # type: ignore[call-overload]
            assert {buffers[n][0] for n in shown[1]} == {ref.name for ref in op.reads}  # type: ignore[index]
        for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
            ElementTree.fromstring(svg)
        assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in html


@pytest.mark.acceptance
def test_the_page_of_a_405b_plan_is_small() -> None:
    """All 126 layers on 16,384 ranks: under 5 MB, with each op of the role and the peaks of all 16."""
    subject = read(f"{lower_large.__file__}:problem")
    assert subject.world_size == 16_384
    spans = spans_of(subject.lowered)  # type: ignore[arg-type]
    role = role_of(subject, None)
    html, program = page(subject, role, spans[role], "h100"), subject.programs[role]
    assert len(html.encode()) < 5_000_000
    assert len(data_of(html)["ops"]) == len(program.ops)  # type: ignore[arg-type]
    assert "on 16,384 ranks" in html
    assert f"{role} of 16; peaks: {roles_of(subject.accounts)}" in html
    assert "prefetch, roles 0 to 15 " in html
    layers = {slot.path.split("/")[1] for p in subject.programs.values() for b in p.buckets.values()
              for slot in b.slots if slot.path.startswith("blocks/")}  # fmt: skip
    assert len(layers) == 126
    assert subject.accounts[role].peak < 0.88 * 80e9  # it fits the machine that it is for
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)


def test_names_of_leaves_cannot_end_the_script() -> None:
    """A name is text in the page, never markup."""
    params = {"</script><b>": torch.empty(8, 8, device="meta")}
    spec = fzero.Spec(loss=lambda p, x: (x @ p["</script><b>"]).mean(), optimizer=fzero.optim.sgd(0.1), zero=3)
    lowered = fzero.lower(spec, params, torch.empty(4, 8), world_size=2)
    html = page(Subject("<i>", lowered.programs, lowered), 0)
    assert "<b>" not in html
    assert html.count("</script>") == 2
    assert "<i>" not in html.replace('<i style="', "")


def test_a_page_of_very_many_ops_is_cut_and_says_so(lowered: fzero.Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(as_page, "MOST_OPS", 10)
    content = as_page.data(lowered.program, None)
    count = len(lowered.program.ops)
    assert content["cut"] == [5, count - 5]
    assert len(content["ops"]) == 10


def test_the_memory_drawing_is_as_high_as_the_live_bytes(lowered: fzero.Lowered) -> None:
    """Its kinds add up to what the program's text calls live."""
    program = lowered.program
    kinds_of = [*dict.fromkeys(SHOWN.values()), "other"]
    total = [sum(column) for column in zip(*(drawings.kind_bytes(program, kind) for kind in kinds_of), strict=True)]
    live = [int(n.replace(",", "")) for n in re.findall(r"live ([\d,]+)", str(program))]
    assert all(buffer.space == DEVICE for buffer in program.buffers.values())
    assert total == live
