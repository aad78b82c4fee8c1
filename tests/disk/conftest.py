"""What the tests of files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fzero.disk import direct


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder on a disk; the temporary directory is memory on some systems."""
    fd = os.open(tmp_path, os.O_RDONLY)
    kind = direct.in_memory(fd)
    os.close(fd)
    if kind:
        pytest.skip(f"{tmp_path} lies in memory ({kind}): run with --basetemp on a disk")
    return tmp_path
