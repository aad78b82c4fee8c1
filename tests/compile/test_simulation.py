"""The picture of a simulated step says what the simulation says: by lane, by role, and of the memory."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero import cli, optim
from fzero.compile.lowered import Lowered
from fzero.compile.simulation import RANK
from fzero.hardware import load

SVG = "{http://www.w3.org/2000/svg}"


def lowered(layers: int = 3, **fields: Any) -> Lowered:
    params = {"blocks": [{"w": torch.empty(256, 256)} for _ in range(layers)]}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for block in p["blocks"]:
            x = torch.tanh(x @ block["w"])
        return x.square().mean()

    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-3), **fields)
    return fzero.lower(spec, params, torch.empty(64, 256), world_size=4)


CASES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 4}, "zero": 3, "remat": "full"},
    "offload": {"mesh": {"dp": 4}, "offload": "optimizer", "update_on": "device"},
    "pp": {"mesh": {"pp": 2, "dp": 2}, "zero": 1, "microbatches": 4, "layers": 4},
}


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest) -> tuple[Lowered, fzero.Simulation]:
    found = lowered(**CASES[request.param])
    return found, fzero.simulation(found, load("h100"))


def test_spans_are_the_work_of_the_lanes(made: tuple[Lowered, fzero.Simulation]) -> None:
    """On a lane one thing at a time, in the step; what a lane works adds up to the figures of `fzero.simulate`."""
    found, picture = made
    assert picture.seconds == max(fzero.simulate(found, load("h100"), rank).seconds for rank in range(4))
    for role in picture.roles.values():
        assert sum(s.stop - s.start for s in role.spans if not s.lane) == pytest.approx(role.time.compute)
        for lane, spans in role.lanes.items():
            assert all(a.stop <= b.start + 1e-12 for a, b in itertools.pairwise(spans)), lane
            assert all(0 <= s.start < s.stop <= role.time.seconds + 1e-12 for s in spans), lane
            shown = {role.program.ops[s.op].kind for s in spans}
            assert (shown <= {"run", "update"}) == (lane == RANK), (lane, shown)


def test_work_in_a_queue_takes_as_long_as_it_is_said_to(made: tuple[Lowered, fzero.Simulation]) -> None:
    """Beside compute a span may be stretched by `hidden`; it is never shorter than its seconds, and all are there."""
    _, picture = made
    for role in picture.roles.values():
        for lane, busy in role.time.busy.items():
            if lane.endswith("in"):  # a message is drawn where it is sent
                continue
            total = sum(s.stop - s.start for s in role.lanes[lane])
            assert busy * (1 - 1e-9) <= total <= busy * 1.2


def test_the_memory_is_that_of_the_program(made: tuple[Lowered, fzero.Simulation]) -> None:
    """Its highest point lies within the planned peak, and above nine tenths of it; times never go back."""
    found, picture = made
    for number, role in picture.roles.items():
        most = max(held for _, held in role.memory)
        peak = found.memories[number].peak
        assert 0.9 * peak <= most <= peak
        assert all(a[0] <= b[0] for a, b in itertools.pairwise(role.memory))


def test_a_trace_for_perfetto(made: tuple[Lowered, fzero.Simulation]) -> None:
    """Read back: a process for each role, a thread for each lane, all spans in microseconds, counters of memory."""
    _, picture = made
    events = json.loads(picture.json())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"role {number}" for number in picture.roles}
    for number, role in picture.roles.items():
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == number]
        assert len(slices) == len(role.spans)
        assert max(e["ts"] + e["dur"] for e in slices) <= role.time.seconds * 1e6 * (1 + 1e-9)
        threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == number}
        assert set(threads.values()) == set(role.lanes)
        assert {threads[e["tid"]] for e in slices if e["cat"] == "all_gather"} <= {"wire dp"}
        counted = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == number]
        assert max(counted) == max(held for _, held in role.memory)


def test_a_drawing(made: tuple[Lowered, fzero.Simulation]) -> None:
    """It parses; each lane of each role has its row, and rows hold rectangles inside the picture."""
    _, picture = made
    root = ET.fromstring(picture.svg())
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert texts[0].endswith("s a step (predicted)")
    for number, role in picture.roles.items():
        for lane in role.lanes:
            assert f"role {number} {lane}" in texts
    rects = list(root.iter(f"{SVG}rect"))
    assert len(rects) > sum(len(role.lanes) for role in picture.roles.values())
    assert all(0 <= float(r.attrib["x"]) <= float(root.attrib["width"]) for r in rects)
    assert len(list(root.iter(f"{SVG}polygon"))) == len(picture.roles)


def test_what_has_no_rate_is_refused() -> None:
    with pytest.raises(fzero.SpecError, match="transfers of a kind without a rate: "):
        fzero.simulation(lowered(**CASES["dp"]), fzero.cost.rates.H100)


PROBLEM = """
import fzero, torch

def problem():
    spec = fzero.Spec(loss=lambda p, b: (b @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1), zero=3)
    return spec, {"w": torch.empty(64, 64, device="meta")}, torch.empty(8, 64, device="meta")
"""


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, svg, trace = (tmp_path / name for name in ("of_mine.py", "step.svg", "step.json"))
    file.write_text(PROBLEM, encoding="utf-8")
    asked = [
        "plan",
        f"{file}:problem",
        "--ranks",
        "2",
        "--hardware",
        "h100",
        "--picture",
        str(svg),
        "--trace",
        str(trace),
    ]
    assert cli.main(asked) == 0
    assert "(predicted)" in capsys.readouterr().out
    assert ET.parse(svg).getroot().tag == f"{SVG}svg"
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
