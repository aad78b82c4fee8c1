"""A profiled step is the step: same bits, same checks; what is written agrees with the program op by op."""

from __future__ import annotations

import importlib
import json
import logging
import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import gloo, same_bits, values

import fzero
from fzero.ir.liveness import live_bytes
from fzero.ir.program import wire_bytes
from fzero.ir.records import PERSISTENT
from fzero.profile.charts import bytes_text, time_text
from fzero.profile.chrome_trace import merge
from fzero.profile.span_rows import Span, rows

STARTS = ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_small")
OUT = 'o<&">t'  # a name that a page must quote


def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
    h = batch
    for layer in params["layers"]:
        h = torch.tanh(h @ layer["w"] + layer["b"])
    return (h @ params[OUT]).square().mean()


def params(key: torch.Tensor) -> Any:
    k = fzero.random.split(key, 4)
    layers = [{"w": fzero.random.normal(i, (64, 64)) / 8, "b": torch.zeros(64)} for i in k[:3]]
    return {"layers": layers, OUT: fzero.random.normal(k[3], (64,))}


def spec(**options: Any) -> fzero.Spec:
    return fzero.Spec(**{"loss": loss, "optimizer": fzero.optim.adamw(1e-2), "clip_norm": 1.0, **options})


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))


def leaves(state: fzero.State) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in fzero.tree.flatten(fzero.unshard(state.tree))[1]]


def profiled(folder: Path, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], fzero.State, fzero.State]:
    """Two steps, the second one plain and profiled: leaves of both, the state that was given, the one that came."""
    plain, old = (fzero.step(fzero.init(params, spec(**options)), batch()) for _ in range(2))
    plain = fzero.step(plain, batch(1))
    new = fzero.profile(old, batch(1), folder)
    return leaves(plain), leaves(new), old, new


def files(folder: Path, rank: int = 0) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The trace, the numbers and the page."""
    read = [(folder / f"rank{rank}.{name}").read_text() for name in ("trace.json", "json", "html")]
    return json.loads(read[0]), json.loads(read[1]), read[2]


def slices(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Complete events by lane, rows of one lane together."""
    by: dict[str, list[dict[str, Any]]] = {}
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            by.setdefault(event["cat"], []).append(event)
    return by


def check_against(program: fzero.Program, found: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Every op has one event in the lane of its kind, every transfer one in its own; bytes are the program's."""
    lane = {"run": "compute", "update": "compute", "wait": "waiting"}
    by = slices(found)
    own = {e["args"]["op"]: e for name in ("compute", "waiting", "starts and frees") for e in by.get(name, [])}
    assert Counter(lane.get(op.kind, "starts and frees") for op in program.ops) == Counter(
        e["cat"] for e in own.values()
    )
    assert sorted(own) == list(range(len(program.ops)))
    (step,) = (e for e in by["step"] if e["name"].startswith("step"))
    ends = [e["ts"] for e in by["step"]] + [step["ts"]]
    assert min(ends) == step["ts"]
    clock = step["ts"]
    for i, op in enumerate(program.ops):
        event, row = own[i], numbers["ops"][i]
        assert event["dur"] >= 0
        assert event["ts"] >= clock - 1e-3  # ops follow one another; microseconds, in ns
        clock = event["ts"] + event["dur"]
        assert row["kind"] == op.kind
        assert row["duration_us"] == pytest.approx(event["dur"], abs=1e-3)
        assert row.get("wire_bytes", 0) == event["args"].get("wire_bytes", 0) == wire_bytes(program, op)
        assert event["args"]["text"] == fzero.ir.program.op_text(op)
    assert clock <= step["ts"] + step["dur"] + 1e-3
    transfers = [e for kind in STARTS for e in by.get(kind, [])]
    assert sorted(e["args"]["op"] for e in transfers) == [i for i, o in enumerate(program.ops) if o.kind in STARTS]
    for event in transfers:
        start, wait = program.ops[event["args"]["op"]], program.ops[event["args"]["wait"]]
        assert (wait.kind, wait.reads[0].name) == ("wait", start.writes[0].name)
        assert event["args"]["wait"] > event["args"]["op"]
        assert event["args"]["wire_bytes"] == wire_bytes(program, start)
        assert event["args"]["via"] == program.transport
        ended = own[event["args"]["wait"]]
        assert event["ts"] == own[event["args"]["op"]]["ts"]
        assert event["ts"] + event["dur"] == pytest.approx(ended["ts"] + ended["dur"], abs=1e-2)
    assert numbers["sent_bytes"] == sum(wire_bytes(program, op) for op in program.ops)
    assert sum(numbers["shares_us"].values()) == pytest.approx(numbers["step_us"])
    assert all(us >= 0 for us in numbers["shares_us"].values())


@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "remat": "full", "precision": "bf16"}])
def test_a_profiled_step_is_the_step(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, new, old, state = profiled(tmp_path / "new" / "folder", **options)
    assert all(same_bits(a, b) for a, b in zip(plain, new, strict=True))
    assert state.step == 2
    assert state.program.digest == files(tmp_path / "new" / "folder")[1]["program"]
    with pytest.raises(fzero.DonatedError, match=r"donated to fzero\.step at step 2"):
        fzero.profile(old, batch(), tmp_path)
    assert not list(tmp_path.glob("rank*"))  # it was refused before anything was written


def test_the_files_agree_with_the_program(tmp_path: Path) -> None:
    *_, state = profiled(tmp_path)
    found, numbers, _ = files(tmp_path)
    check_against(state.program, found, numbers)
    assert (numbers["step"], numbers["rank"], numbers["mesh"], numbers["batch"]) == (2, 0, {"dp": 1}, ["f32[16, 64]"])


def test_memory_planned_and_measured(tmp_path: Path) -> None:
    """Planned bytes are the account's at every op; measured ones are what is held, plus what the allocator gave."""

    def with_a_convolution(p: Any, x: torch.Tensor) -> torch.Tensor:  # whose result the allocator gives
        return loss(p, x) + F.conv1d(x[:, None], p["layers"][0]["w"][:, None, :3]).sin().mean()

    *_, state = profiled(tmp_path, clip_norm=None, loss=with_a_convolution)
    found, numbers, _ = files(tmp_path)
    program, (lowered,) = state.program, state.runtime.programs.values()
    needs = [op.workspace + op.heap for op in program.ops]
    levels = [level + need for level, need in zip(live_bytes(program.ops, program.buffers), needs, strict=True)]
    assert [row["planned_bytes"] for row in numbers["ops"]] == levels
    assert numbers["planned_peak_bytes"] == lowered.memory.peak
    held = sum(b.nbytes for b in program.buffers.values() if b.kind in PERSISTENT)
    assert held + program.arena_bytes <= numbers["held_bytes"] <= 1.05 * (held + program.arena_bytes)
    measured = [row["measured_bytes"] for row in numbers["ops"]]
    assert min(measured) >= numbers["held_bytes"]
    assert max(measured) <= numbers["measured_peak_bytes"] <= 1.05 * lowered.memory.peak
    heaps = {i: op.heap for i, op in enumerate(program.ops)}
    assert max(heaps.values()) > 10_000
    assert all(abs(measured[i] - numbers["held_bytes"] - heap) < 100 for i, heap in heaps.items())
    counters = [e for e in found["traceEvents"] if e["ph"] == "C"]
    assert max(e["args"]["bytes"] for e in counters if e["name"] == "planned bytes") == max(levels)
    assert max(e["args"]["bytes"] for e in counters if e["name"] == "measured bytes") == max(measured)


def test_the_page_holds_the_figures(tmp_path: Path) -> None:
    """It is one well-formed file; boxes lie where the ops were, the stack of planned memory has the planned height."""
    *_, state = profiled(tmp_path)
    _, numbers, text = files(tmp_path)
    root = ET.fromstring(text)
    assert not re.search(r"(?:src|href)=|https?://|url\(|@import", text)
    said = " ".join("".join(root.itertext()).split())
    for figure in (numbers["planned_peak_bytes"], numbers["measured_peak_bytes"], numbers["sent_bytes"]):
        assert bytes_text(figure) in said
    assert time_text(numbers["step_us"] * 1e3) in said
    assert "f32[16, 64]" in said
    assert "backward layers.1" in said
    assert " ".join(str(state.program).split()) in said
    boxes = {
        box.get("title", ""): box.get("style", "") for box in root.iter("div") if "box" in (box.get("class") or "")
    }
    assert len(boxes) == len(state.program.ops)  # a world of one has no transfers
    for row in numbers["ops"]:
        (style,) = (style for title, style in boxes.items() if f"\nop {row['op']}\n" in title)
        left, width = map(float, re.findall(r"(?:left|width):([\d.]+)%", style))
        assert left == pytest.approx(100 * row["start_us"] / numbers["step_us"], abs=1e-4)
        assert width == pytest.approx(100 * row["duration_us"] / numbers["step_us"], abs=1e-4)
    (svg,) = (one for one in root.iter("svg"))
    _, _, wide, high = map(float, svg.get("viewBox", "").split())
    assert wide == pytest.approx(numbers["step_us"], abs=1e-2)
    paths = {path.get("class"): path.get("d", "") for path in svg}
    tops = [min(float(y) for _, y in points(d)) for name, d in paths.items() if not (name or "").startswith("line")]
    assert high - min(tops) == pytest.approx(max(row["planned_bytes"] for row in numbers["ops"]), abs=1)
    assert high - min(y for _, y in points(paths["line measured"])) == pytest.approx(
        max(row["measured_bytes"] for row in numbers["ops"]), abs=1
    )
    assert all(0 <= x <= wide + 1e-3 for d in paths.values() for x, _ in points(d))


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def test_rows_of_a_lane_do_not_overlap() -> None:
    spans = [Span(str(i), start, stop, "") for i, (start, stop) in enumerate([(0, 9), (1, 3), (2, 4), (4, 5), (9, 9)])]
    found = rows(spans)
    assert [[s.name for s in row] for row in found] == [["0", "4"], ["1", "3"], ["2"]]


# --- what must not happen ---------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_told_before_the_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = fzero.init(params, spec())
    before = leaves(state)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", None):
        with pytest.raises(fzero.FzeroError, match=r"cannot be written .* No step was taken .* name another folder"):
            fzero.profile(state, batch(), folder)  # type: ignore[arg-type]
    assert all(same_bits(a, b) for a, b in zip(before, leaves(state), strict=True))
    assert fzero.profile(state, batch(), tmp_path / "folder").step == 1


def test_what_step_refuses_profile_refuses(tmp_path: Path) -> None:
    state = fzero.init(params, spec(nonfinite="raise"))
    with pytest.raises(fzero.TreeError, match=r"fzero\.profile needs the State that fzero\.init returned, got dict"):
        fzero.profile({}, batch(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(fzero.TreeError, match="requires grad"):
        fzero.profile(state, batch().requires_grad_(), tmp_path)
    with pytest.raises(fzero.NonFiniteError, match="step 1 are not finite"):
        fzero.profile(state, batch() * float("inf"), tmp_path)
    assert fzero.profile(state, batch(), tmp_path).step == 1


def test_a_failure_to_write_does_not_lose_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(record: Any) -> str:
        raise OSError("No space left on device")

    monkeypatch.setattr(importlib.import_module("fzero.profile"), "page", full)
    with caplog.at_level(logging.WARNING, logger="fzero"):
        state = fzero.profile(fzero.init(params, spec()), batch(), tmp_path)
    assert state.step == 1
    assert "a profile of step 1 was not written" in caplog.text
    assert "No space left" in caplog.text


def test_beside_another_profiler_there_are_times_without_memory(tmp_path: Path) -> None:
    state = fzero.init(params, spec())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as other:
        state = fzero.profile(state, batch(), tmp_path)
    assert len(other.events()) > 0
    _, numbers, text = files(tmp_path)
    assert numbers["measured_peak_bytes"] is None
    assert "measured_bytes" not in numbers["ops"][0]
    assert "not measured: another profiler was at work" in text
    assert state.step == 1


# --- two ranks --------------------------------------------------------------------------------------------------------


def _two(folder: str) -> tuple[bool, str, str]:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
    options = {"zero": 3, "prefetch": 2}
    plain, old = (fzero.step(fzero.init(params, spec(**options)), batch()) for _ in range(2))
    rank = torch.distributed.get_rank()
    bad = Path(folder) / "file" if rank == 1 else Path(folder)
    bad_error = ""
    if rank == 1:
        bad.write_text("")
    try:
        fzero.profile(old, batch(1 + rank), bad)
    except fzero.FzeroError as error:
        bad_error = f"{type(error).__name__}: {error}"
    plain = fzero.step(plain, batch(1 + rank))
    new = fzero.profile(old, batch(1 + rank), folder)
    equal = all(same_bits(a, b) for a, b in zip(leaves(plain), leaves(new), strict=True))
    return equal, bad_error, str(new.program)


def test_two_ranks(tmp_path: Path) -> None:
    """Bits, files and transfers on real ranks; a folder that one rank cannot write stops all before the step."""
    (equal0, error0, text), (equal1, error1, _) = values(gloo(2, _two, str(tmp_path)))
    assert equal0
    assert equal1
    assert error0.startswith("DisagreementError: rank 1 failed before the start of a profile of step 2: FzeroError: ")
    assert error1.startswith("FzeroError: ")
    program = fzero.parse(text)
    both = [files(tmp_path, rank) for rank in (0, 1)]
    for found, numbers, html in both:
        check_against(program, found, numbers)
        assert numbers["sent_bytes"] > 0
        assert len(numbers["transfers"]) == sum(op.transfers for op in program.ops)
        ET.fromstring(html)
    spans = []
    for found, _, _ in both:
        (step,) = (e for e in slices(found)["step"] if e["name"] == "step 2")
        spans.append((step["ts"], step["ts"] + step["dur"]))
    assert max(begin for begin, _ in spans) < min(end for _, end in spans)  # one clock: the steps were at one time
    merged = json.loads(merge(tmp_path).read_text())["traceEvents"]
    assert Counter(e["pid"] for e in merged if e["ph"] == "X").keys() == {0, 1}
    assert len(merged) == sum(len(found["traceEvents"]) for found, _, _ in both)
