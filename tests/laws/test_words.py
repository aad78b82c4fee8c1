"""The pages use the field's terms: no phrase of the word list in CONTRIBUTING.md comes back.

The list is the table under "Words"; what stands there in code style, in its second column, is refused.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import DOCS, ROOT, page_id

LIST = ROOT / "CONTRIBUTING.md"
PAGES = [ROOT / "README.md", LIST, *DOCS]


def phrases(page: str) -> list[str]:
    """The phrases to avoid: the code of the second column of the table under "Words"."""
    rows = page.split("\n## Words\n")[1].split("\n## ")[0].split("\n|")[3:]
    return [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row.split("|")[1])]


def prose(page: str) -> str:
    """A page without its code and the word list, each run of spaces and line ends as one space."""
    page = re.sub(r"\n## Words\n.*?(?=\n## )", "", page, flags=re.DOTALL)
    page = re.sub(r"^( *)```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    return " ".join(page.split())


def uses(page: str, avoided: list[str]) -> list[str]:
    """The places at which a page uses a phrase, each with some words around it."""
    text = prose(page)
    return [
        text[max(0, hit.start() - 40) : hit.end() + 40]
        for phrase in avoided
        for hit in re.finditer(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_a_page_has_no_phrase_that_the_word_list_replaces(path: Path) -> None:
    avoided = phrases(LIST.read_text(encoding="utf-8"))
    assert uses(path.read_text(encoding="utf-8"), avoided) == []


def test_the_list_has_the_terms_of_the_field() -> None:
    rows = LIST.read_text(encoding="utf-8").split("\n## Words\n")[1]
    assert len(phrases(LIST.read_text(encoding="utf-8"))) > 30
    for word in ("sharded", "replicated", "scalar", "minimise", "discard", "fused", "upcast", "in place"):
        assert word in rows


def test_a_phrase_over_a_line_end_is_found_and_one_in_code_is_not() -> None:
    page = "A leaf lies\nin parts.\n\n```python\nlies in parts\n```\n\nIt relies in parts."
    assert uses(page, ["lies in parts"]) == ["A leaf lies in parts. It relies in parts."]


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_examples_are_fenced(path: Path) -> None:
    """A bare `>>>` is a block quote to Markdown."""
    outside = re.sub(r"^( *)```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in outside.splitlines() if line.lstrip().startswith(">>>")] == []
