"""Notebooks: what objects show of themselves, and the tour, executed from its first cell to its last."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import cases
import pytest
import torch

import fzero

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "examples" / "tour.ipynb"


def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel of this interpreter, in an empty folder; the three objects are shown as tables."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (pip install fzero[test])")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(TOUR, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    tables = [data["text/html"] for data in shown if "text/html" in data]
    assert len(tables) == 3
    assert all("<table>" in table for table in tables)


def test_the_tour_is_kept_without_outputs() -> None:
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    assert [cell["outputs"] for cell in cells if cell.get("outputs")] == []


def well_formed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{html}</div>")


def test_a_lowered_step_and_its_program_are_tables() -> None:
    lowered = cases.lowered(world=4, zero=3)
    program = well_formed(lowered.program._repr_html_())
    rows = program.findall("./table/tr")
    assert len(rows) == 1 + min(100, len(lowered.program.ops))
    assert rows[1].findall("td")[4].text == lowered.program.ops[0].why
    text = "".join(well_formed(lowered._repr_html_()).itertext())
    assert f"{lowered.memory.peak:,}" in text
    assert all(choice in text for choice in lowered.choices)


def test_a_state_shows_its_leaves_on_each_rank_alone_and_after_it_was_donated() -> None:
    """Nothing is gathered: a rank that shows its state while the others do not must not wait."""

    def shown(state: fzero.State) -> list[str]:
        rows = well_formed(state._repr_html_()).findall("./table/tr")
        return [str(row.findall("td")[0].text) for row in rows[1:]]

    spec = fzero.Spec(loss=lambda p, b: (b @ p["a<b"]).mean(), optimizer=fzero.optim.adamw(1e-3), zero=3)
    state = fzero.init({"a<b": torch.ones(8, 8)}, spec)
    after = fzero.step(state, torch.ones(2, 8))
    assert shown(after) == [leaf.path for leaf in fzero.tree.flatten(after.tree)[1]]
    assert "params/a<b" in shown(after)
    assert shown(state) == shown(after)
    assert "(" in str(well_formed(state._repr_html_()).findtext("./p/b"))


def test_a_table_says_how_many_rows_it_leaves_out() -> None:
    lowered = cases.lowered(world=2, params=cases.layers(depth=12), zero=3)
    assert len(lowered.program.ops) > 100
    assert f"{len(lowered.program.ops) - 100:,} more rows are not shown" in lowered.program._repr_html_()
