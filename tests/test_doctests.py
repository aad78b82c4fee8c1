"""Every example in a docstring runs, and every one in docs/."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import fzero

HOW = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
MODULES = sorted(m.name for m in pkgutil.walk_packages(fzero.__path__, "fzero.") if "__main__" not in m.name)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=HOW, extraglobs={"torch": __import__("torch")})
    assert failed == 0


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.stem)
def test_documents_run(path: Path) -> None:
    failed, _ = doctest.testfile(str(path), module_relative=False, optionflags=HOW, encoding="utf-8")
    assert failed == 0
