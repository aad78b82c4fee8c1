"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fzero

MODULES = sorted(m.name for m in pkgutil.walk_packages(fzero.__path__, "fzero.") if "__main__" not in m.name)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(
        module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, extraglobs={"torch": __import__("torch")}
    )
    assert failed == 0
