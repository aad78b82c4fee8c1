"""Every op of torch's operator database, up to ten samples each in float32 and float64: right, or refused.

`FZERO_OPDB=lines.jsonl` keeps what was found, to go on after an interruption; `FZERO_UPDATE_OPS=1` writes docs/ops.md.
"""

import os
from pathlib import Path

import opdb
import opdb_table
import pytest

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(6 * 3600)]


def test_every_op_is_right_or_refused(tmp_path: Path) -> None:
    out = Path(os.environ.get("FZERO_OPDB", tmp_path / "opdb.jsonl"))
    opdb.whole(out, list(opdb.OPS), opdb.SAMPLES)
    lines = {key: line for key, line in opdb.finished(out).items() if not key.endswith("...")}
    if "FZERO_UPDATE_OPS" in os.environ:
        opdb_table.write(lines.values())
    assert not [line for line in lines.values() if line["status"] not in opdb_table.FINE]
    assert {key.split("|")[0] for key in lines} == {name for name, op in opdb.OPS.items() if opdb.dtypes_of(op)}
