"""Types and docstrings of the public API, as an editor shows them. `make lint` checks the uses themselves."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
from pages import FOLDER, ROOT

USES = ROOT / "tests" / "support" / "typed_uses.py"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    monkeypatch.syspath_prepend(str(FOLDER / "_ext"))
    found: dict[str, list[str]] = importlib.import_module("fzero_site").public_names()
    return found


def test_each_public_name_has_a_typed_use(names: dict[str, list[str]]) -> None:
    text = USES.read_text(encoding="utf-8")
    missing = [f"{m}.{n}" for m in names for n in names[m] if not re.search(rf"\b{m.rpartition('.')[2]}\.{n}\b", text)]
    assert missing == []


def described(parameter: str, doc: str) -> bool:
    """Whether a docstring has an entry for a parameter, "name: text" or "name, other: text", where editors look."""
    return re.search(rf"(?:^|[\s,]){parameter}(?:,\s+\w+)*:\s", doc) is not None


def test_each_parameter_of_a_public_function_has_an_entry(names: dict[str, list[str]]) -> None:
    missing = []
    for module in names:
        there = importlib.import_module(module)
        for name in names[module]:
            thing = getattr(there, name)
            if inspect.isfunction(thing):
                parameters = [p for p in inspect.signature(thing).parameters.values() if p.kind != p.VAR_KEYWORD]
                missing += [
                    f"{module}.{name}({p.name})" for p in parameters if not described(p.name, thing.__doc__ or "")
                ]
    assert missing == []


def test_an_entry_is_told_from_a_word() -> None:
    assert described("size", "Returns it.\n\n    size, dim: of the batch.")
    assert not described("size", "Returns the size of it. resize: what")
