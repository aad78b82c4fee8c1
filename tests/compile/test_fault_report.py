"""A program of fzero's own that the verifier refuses: the message says whose fault it is; a report shows it again."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch

import fzero
from fzero import P, cli, private_folder
from fzero.compile import checked, fault_report
from fzero.compile.lowered import Lowered
from fzero.ir import segment_text
from fzero.ir.program import Program
from fzero.ir.records import Ref
from fzero.ir.segments import digest
from lab.mutate.edits import drop, find, put, replaced

PLACED: dict[str, dict[str, Any]] = {
    "zero 3": {"zero": 3, "microbatches": 2, "reduce": "each", "clip_norm": 1.0},
    "bf16, recomputed": {"precision": "bf16", "remat": "full", "zero": 2},
    "a pipeline": {"mesh": {"pp": 2}, "microbatches": 2, "pipeline": "1f1b"},
    "tp": {"mesh": {"tp": 2}, "shard": {"layers/*/w": P(None, "tp"), "layers/*/b": P("tp")}, "clip_norm": 1.0},
    "offloaded": {"offload": {"**": "nvme"}, "nvme_path": "/nvme", "zero": 3},
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FZERO_CACHE", str(tmp_path / "cache"))


def lowered(**options: Any) -> Lowered:
    one = cases.spec(**options)
    return fzero.lower(one, cases.layers(), cases.batch(4 * one.microbatches), world_size=2)


def without_a_wait(program: Program) -> Program:
    return drop(program, find(program, lambda op: op.is_wait)[0])


def without_a_division(program: Program) -> Program:
    at = find(program, lambda op: op.reduces and op.divisor > 1)[0]
    return put(program, at, program.ops[at].with_attrs(divisor=1))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the way to a program break it, as a faulty pass would."""
    lower = checked.lower_step

    def breaks(edit: Callable[[Program], Program]) -> None:
        def worse(*args: Any) -> Lowered:
            made = lower(*args)
            return replace(made, programs={role: edit(program) for role, program in made.programs.items()})

        monkeypatch.setattr(checked, "lower_step", worse)

    return breaks


def refused(**options: Any) -> str:
    with pytest.raises(fzero.VerifyError) as caught:
        lowered(**options)
    return str(caught.value)


def file_in(message: str) -> Path:
    found = re.search(r"fzero verify (\S+\.json) shows it again", message)
    assert found, message
    return Path(found[1])


@pytest.mark.parametrize("name", PLACED)
def test_programs_come_back_from_a_report(name: str) -> None:
    programs = lowered(**PLACED[name]).roles
    again = fault_report.read(fault_report.write(fault_report.Report("nothing", {"zero": "3"}, programs)))
    assert again.programs == programs
    assert {k for p in again.programs.values() for k in p.segments} == {
        k for p in programs.values() for k in p.segments
    }
    for program in again.programs.values():
        for key, gm in program.segments.items():
            assert digest(gm) == key
    fzero.verify(again.programs)


@pytest.mark.parametrize("name", ["zero 3", "a pipeline"])
def test_a_fault_is_told_as_ours_and_shown_again(
    name: str, broken: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    broken(without_a_wait)
    message = refused(**PLACED[name])
    first, second = message.split("\n")
    assert first.startswith("[lifetimes] op ")
    assert second.startswith("This is a fault of fzero, not of the step")
    other = {"zero 3": "reduce='end'", "a pipeline": "pipeline='"}[name]
    assert f"try {other}" in second
    report = fault_report.read(file_in(message))
    assert report.what == first
    assert report.facts["microbatches"] == "2"
    assert "layers/0/w f32[64, 64]" in report.facts["leaves"]
    with pytest.raises(fzero.VerifyError) as plain:
        fzero.verify(report.programs)
    assert str(plain.value) == first, "what a user verifies by hand is told plainly"
    assert cli.main(["verify", str(file_in(message))]) == 1
    assert f"now: {first}" in capsys.readouterr().out


def test_what_is_tried_makes_another_program(broken: Callable[..., None]) -> None:
    """Here the fault is in reductions of each microbatch: the remedy that is named has none."""

    def breaks(program: Program) -> Program:
        return without_a_division(program) if any(op.reduces and op.microbatch for op in program.ops) else program

    broken(breaks)
    message = refused(**PLACED["zero 3"])
    assert "computes something else" in message
    assert "try reduce='end'" in message
    lowered(**{**PLACED["zero 3"], "reduce": "end"})


def test_a_fault_of_a_step_leaves_the_state(broken: Callable[..., None]) -> None:
    spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.sgd(0.1), microbatches=2)
    state = fzero.init({"w": torch.ones(3)}, spec)
    broken(lambda program: drop(program, find(program, lambda op: op.is_update)[0]))
    with pytest.raises(fzero.VerifyError, match="fault of fzero") as caught:
        fzero.step(state, torch.ones(2, 3))
    assert file_in(str(caught.value)).exists()
    assert state.params["w"].full().tolist() == [1, 1, 1]


def test_a_fault_before_there_is_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any) -> Lowered:
        raise fzero.VerifyError("[sharding] mm: no rule lets it")

    monkeypatch.setattr(checked, "lower_step", refuse)
    message = refused(**PLACED["tp"])
    assert message.startswith("[sharding] mm: no rule lets it\nThis is a fault of fzero")
    assert cli.main(["verify", str(file_in(message))]) == 1
    assert "before there was a program" in capsys.readouterr().out


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EROFS, None])
def test_a_disk_that_takes_nothing_hides_no_fault(
    why: int | None, broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken(without_a_wait)
    if why is None:  # the cache's place is a file
        (tmp_path / "file").touch()
        monkeypatch.setenv("FZERO_CACHE", str(tmp_path / "file" / "cache"))
    else:

        def fails(*_: Any) -> None:
            raise OSError(why, {errno.ENOSPC: "No space left on device", errno.EROFS: "Read-only file system"}[why])

        monkeypatch.setattr(private_folder, "replace", fails)
    message = refused(zero=3)
    assert message.startswith("[lifetimes]")
    said = {errno.ENOSPC: "No space left on device", errno.EROFS: "Read-only file system", None: "Not a directory"}
    assert f"no report of it could be written ({said[why]})" in message


def test_the_last_reports_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_report, "KEPT", 3)
    files = [fault_report.write(fault_report.Report(str(n), {}, {})) for n in range(5)]
    assert sorted(p.name for p in fault_report.folder().iterdir()) == sorted(p.name for p in files[-3:])
    assert fault_report.write(fault_report.Report("4", {}, {})) == files[-1], "one fault, one file, on any rank"
    monkeypatch.setattr(fault_report, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="bytes"):
        fault_report.write(fault_report.Report("5", {}, {}))


def test_a_file_that_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = lowered(zero=3).roles
    good = json.loads(fault_report.write(fault_report.Report("x", {}, program)).read_text())
    key = next(iter(good["segments"]))

    def node(**fields: Any) -> Any:
        nodes = [{**n} for n in good["segments"][key]]
        next(n for n in nodes if n["op"] == "call_function").update(fields)
        return {**good, "segments": {**good["segments"], key: nodes}}

    damaged = [
        [], {}, {**good, "header": "fzero report 9"}, {**good, "programs": {"0": ["banana"]}}, {**good, "segments": 3},
        node(target="os.system"), node(target="os.system.default"), node(args=[{"node": 999}]),
        node(args=[{"dtype": "f33"}]), node(args=[{"layout": "save"}]), node(args=[{"nothing": 1}]), node(args=[1]),
    ]  # fmt: skip
    file = tmp_path / "report.json"
    for content in damaged:
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="is no report of fzero's") as caught:
            pytest.fail(f"{fault_report.read(file)}")
        assert not re.search(r"indices|object|subscript|: '\w+'$", str(caught.value)), "Python's own words"
    file.write_bytes(b"\x80\x04K\x01.")
    assert cli.main(["verify", str(file)]) == 2
    assert "is no report of fzero's" in capsys.readouterr().err


def test_a_pipe_is_no_report_and_a_report_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="it is no file"):
        fault_report.read(tmp_path / "pipe")
    content = {"header": fault_report.HEADER, "what": ["\x1b[2J"], "facts": {"\x1b]0;a": ["\x07"]}}
    (tmp_path / "it").write_text(json.dumps({**content, "programs": {}, "segments": {}}))
    assert cli.main(["verify", str(tmp_path / "it")]) == 1
    assert capsys.readouterr().out.replace("\n", "").isprintable()
    (tmp_path / "it").write_text(json.dumps({**content, "programs": {}, "segments": {}, "facts": []}))
    with pytest.raises(ValueError, match="is no report of fzero's"):
        fault_report.read(tmp_path / "it")


def test_an_argument_of_every_kind_comes_back() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x0")
    args = (x, 1, -0.0, float("inf"), True, None, "max", [1, (2, x)], slice(None, 2, None), 1 + 2j, torch.bfloat16)
    kwargs = {"dtype": torch.int64, "layout": torch.strided, "device": torch.device("cpu"),
              "memory_format": torch.channels_last}  # fmt: skip
    node = graph.call_function(torch.ops.aten.add.Tensor, args, kwargs)
    graph.output([node, None])
    again = segment_text.from_data(json.loads(json.dumps(segment_text.to_data(torch.fx.GraphModule({}, graph)))))
    _, found, out = again.graph.nodes
    assert repr(found.args) == repr(node.args)
    assert repr(found.kwargs) == repr(node.kwargs)
    assert repr(out.args) == "([add_tensor, None],)"


def test_a_reference_is_replaced_where_the_report_says(broken: Callable[..., None]) -> None:
    """Another fault, of meaning: the report tells the same op."""

    def breaks(program: Program) -> Program:
        at = find(program, lambda op: op.gathers)[0]
        names = [n for n, b in program.buffers.items() if b.sharded and b.kind == "optimizer"]
        like = next(
            n for n in names if program.buffers[n].shape == program.buffers[program.ops[at].reads[0].name].shape
        )
        return put(program, at, replaced(program.ops[at], "reads", 0, Ref(like)))

    broken(breaks)
    message = refused(zero=3)
    with pytest.raises(fzero.VerifyError) as again:
        fzero.verify(fault_report.read(file_in(message)).programs)
    assert str(again.value) == message.split("\n")[0]
