"""The documentation: code runs, links lead somewhere, each page can be reached, and lists are complete."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, FOLDER, ROOT, blocks, dead_links, listed, page_id, sentences, slugs, words

import fzero
from fzero.cli import COMMANDS
from fzero.ir.kinds import OPS
from fzero.ir.records import KINDS

READMES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "fzero").rglob("README.md"))]
SENTENCE = 30  # words


def program(path: Path) -> str:
    """The ```python of a page without prompts, as one program; what has prompts runs in test_doctests.py."""
    found = blocks(path.read_text(encoding="utf-8"), "python")
    return "\n".join(code for code in found if not code.lstrip().startswith(">>>"))


@pytest.mark.parametrize("path", [p for p in DOCS if program(p)], ids=page_id)
@pytest.mark.sampled(8)
def test_the_code_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file in an empty folder: a name that changed, or a line that was forgotten, fails."""
    code = program(path)
    if "transformers" in code and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed (pip install fzero[hf])")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    space: dict[str, Any] = {"__name__": "train"}
    exec(compile(code, str(tmp_path / "train.py"), "exec"), space)


@pytest.mark.parametrize("path", [*DOCS, *READMES], ids=page_id)
def test_python_without_prompts_compiles(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for code in [*blocks(text, "python"), *blocks(text, "py")]:
        if not code.lstrip().startswith(">>>"):
            compile(code, str(path), "exec")


@pytest.mark.parametrize("path", [*DOCS, *READMES], ids=page_id)
def test_links_lead_somewhere(path: Path) -> None:
    assert list(dead_links(path)) == []


def test_every_page_is_in_the_tree_of_pages() -> None:
    found, todo = set(), [FOLDER / "index.md"]
    while todo:
        page = todo.pop()
        if page not in found:
            found.add(page)
            todo += [page for page in listed(page) if page.exists()]
    assert [page_id(page) for page in DOCS if page not in found] == []


@pytest.mark.parametrize("path", DOCS, ids=page_id)
def test_sentences_are_short(path: Path) -> None:
    long = [s for s in sentences(path.read_text(encoding="utf-8")) if words(s) > SENTENCE]
    assert long == []


def test_the_tables_of_the_reference_are_complete() -> None:
    """A new field, command, op kind or kind of buffer has a row."""
    spec, cli, grammar = (
        (FOLDER / "reference" / f"{name}.md").read_text(encoding="utf-8") for name in ("spec", "cli", "grammar")
    )
    assert [f.name for f in fields(fzero.Spec) if f"`{f.name}`" not in spec] == []
    assert [name for name in COMMANDS if f"`fzero {name}" not in cli] == []
    assert [kind for kind in (*OPS, *KINDS) if f"`{kind}`" not in grammar] == []


def test_every_public_name_has_a_docstring_and_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER / "_ext"))
    site = importlib.import_module("fzero_site")
    assert site.undocumented() == []
    assert set(fzero.__all__) - set(site.public_names()["fzero"]) <= set(sys.modules["fzero"].__dict__) | {"interop"}
    index = (FOLDER / "reference" / "api.md").read_text(encoding="utf-8")
    assert [module for module in site.API if f"generated/api/{module}\n" not in index] == []
    modules = {name for name in fzero.__all__ if f"fzero.{name}" in sys.modules}
    assert modules - {"plan", "profile", "verify"} == {m.removeprefix("fzero.") for m in site.API if m != "fzero"}


def test_public_names_and_their_parameters_stay(
    monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    """What users have written goes on to run: a line that vanishes, or a parameter of one, breaks it."""
    monkeypatch.syspath_prepend(str(FOLDER / "_ext"))
    lines = []
    for module, names in importlib.import_module("fzero_site").public_names().items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            given = ""
            foreign = inspect.isclass(value) and any("transformers" in kind.__module__ for kind in value.__mro__)
            if inspect.isfunction(value) or (dataclasses.is_dataclass(value) and not foreign):
                given = f"({', '.join(inspect.signature(value).parameters)})"
            lines.append(f"{module}.{name}{given}")
    golden("public_names", "\n".join(sorted(lines)))


def test_there_are_twenty_questions_each_with_a_link() -> None:
    text = (FOLDER / "questions.md").read_text(encoding="utf-8")
    asked = [part for part in text.split("\n") if part[:1].isdigit()]
    assert len(asked) == 20
    assert text.count("](") >= 20


def test_a_dead_link_a_dead_anchor_and_a_long_sentence_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`, three\n\n[a](gone.md) [b](#nothing) [c](#one-two-three) [d](https://x.org)\n")
    assert list(dead_links(page)) == ["gone.md: there is no such file", "#nothing: there is no such heading"]
    assert slugs(page.read_text()) == {"one-two-three"}
    assert [words(s) for s in sentences("one two `three four`.\nFive six\n\n| a | b |\n\n" + "x " * 31)] == [3, 2, 31]
