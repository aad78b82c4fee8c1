"""Notebooks: what objects show of themselves, and the tour, executed from its first cell to its last."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import cases
import pytest
import torch

import fzero
from fzero.capture import provenance

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


def test_a_cell_is_named_as_ipython_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is a number under /tmp, or none."""
    compilers = [pytest.importorskip("ipykernel.compiler").XCachingCompiler()]
    compilers += [pytest.importorskip("IPython.core.compilerop").CachingCompiler()]
    for compiler in compilers:
        text = "def loss(params, batch):\n    return (batch @ params['w'][:2]).sum()\n"
        space: dict[str, Any] = {}
        exec(compile(text, compiler.cache(text, 7), "exec"), space)
        shell = SimpleNamespace(compile=compiler)
        monkeypatch.setitem(sys.modules, "IPython.core.getipython", SimpleNamespace(get_ipython=lambda s=shell: s))
        state = fzero.init({"w": torch.ones(3, 2)}, fzero.Spec(loss=space["loss"], optimizer=fzero.optim.sgd(0.1)))
        with pytest.raises(RuntimeError, match=r"^In\[7\]:2: aten.mm.default of"):
            fzero.step(state, torch.ones(4, 3))
        assert provenance.defined_at(space["loss"]) == "loss (In[7]:1)"


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
    assert "donated to fzero.step" in str(well_formed(state._repr_html_()).findtext("./p/b"))
    assert repr(after) == "State(after 1 step: 4 leaves, mesh dp=1)"
    assert repr(state).startswith(
        "State(after 0 steps: 4 leaves, mesh dp=1, which was donated to fzero.step at step 1: "
    )


def test_a_table_says_how_many_rows_it_leaves_out() -> None:
    lowered = cases.lowered(world=2, params=cases.layers(depth=12), zero=3)
    assert len(lowered.program.ops) > 100
    assert f"{len(lowered.program.ops) - 100:,} more rows are not shown" in lowered.program._repr_html_()
