"""Every foreign model whose library is installed: equal to eager PyTorch within 1e-5, or refused with a remedy.

`FZERO_FOREIGN=lines.jsonl` keeps what was found, to go on after an interruption; `FZERO_UPDATE_FOREIGN=1` writes
docs/foreign.md, and then needs all the libraries (CONTRIBUTING.md).
"""

import os
from pathlib import Path

import pytest
from foreign import runs, sources, table

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(6 * 3600)]


def test_every_model_is_equal_or_refused(tmp_path: Path) -> None:
    out = Path(os.environ.get("FZERO_FOREIGN", tmp_path / "foreign.jsonl"))
    here = [source for source in sources.SOURCES if sources.installed(source)]
    lines = runs.whole(out, [key for source in here for key in sources.keys(source)])
    if "FZERO_UPDATE_FOREIGN" in os.environ:
        assert here == list(sources.SOURCES), "the table is of all libraries"
        table.write(lines.values())
    assert not [line for line in lines.values() if line["status"] not in table.FINE]


def test_the_table_names_every_model() -> None:
    rows = set(table.DOCS.read_text().splitlines())
    named = {row.split("|")[1].strip() for row in rows if row.startswith("| ")}
    here = [source for source in sources.SOURCES if sources.installed(source)]
    assert {key.partition("/")[2] for source in here for key in sources.keys(source)} <= named
