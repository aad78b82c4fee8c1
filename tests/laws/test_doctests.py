"""Every example in a docstring runs, and every one in docs/."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
from pathlib import Path

import pytest
from pages import DOCS, page_id

import fzero

HOW = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = sorted(m.name for m in pkgutil.walk_packages(fzero.__path__, "fzero.") if "__main__" not in m.name)


def needs_accelerate(name: str) -> None:
    """Skips what makes a Trainer where transformers' Trainer cannot be made."""
    if "trainer" in name and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (pip install fzero[hf])")


def holds_an_example(name: str) -> bool:
    origin = importlib.util.find_spec(name).origin  # type: ignore[union-attr]
    return ">>>" in Path(str(origin)).read_text(encoding="utf-8")


def test_every_module_can_be_imported() -> None:
    for name in MODULES:
        importlib.import_module(name)


@pytest.mark.parametrize("name", [name for name in MODULES if holds_an_example(name)])
@pytest.mark.sampled(20)
def test_examples_run(name: str) -> None:
    needs_accelerate(name)
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=HOW, extraglobs={"torch": __import__("torch")})
    assert failed == 0


@pytest.mark.parametrize("path", [p for p in DOCS if ">>>" in p.read_text(encoding="utf-8")], ids=page_id)
@pytest.mark.sampled(4)
def test_documents_run(path: Path) -> None:
    needs_accelerate(path.stem)
    failed, _ = doctest.testfile(str(path), module_relative=False, optionflags=HOW, encoding="utf-8")
    assert failed == 0
