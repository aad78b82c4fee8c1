"""The pages of the documentation: which there are, their code, their links, their sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs"
DOCS = sorted(path for path in FOLDER.rglob("*.md") if "generated" not in path.parts)  # those are made by `make docs`
FENCE = re.compile(r"^( *)(`{3,})(\S*)[^\n]*\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def page_id(path: Path) -> str:
    """`docs/start/train.md` as `start/train`."""
    return path.relative_to(FOLDER if path.is_relative_to(FOLDER) else ROOT).with_suffix("").as_posix()


def blocks(text: str, language: str) -> list[str]:
    """The fenced code of a language, in the order of the page."""
    return [match[4] for match in FENCE.finditer(text) if match[3] == language]


def without_code(text: str) -> str:
    """A page without its fenced code."""
    return FENCE.sub("", text)


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and myst-parser make them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", without_code(text), re.MULTILINE):
        base = slug = re.sub(r"[^\w\- ]", "", re.sub(r"`", "", heading).lower()).replace(" ", "-")
        number = 0
        while slug in anchors:
            number += 1
            slug = f"{base}-{number}"
        anchors.add(slug)
    return anchors


def dead_links(path: Path) -> Iterator[str]:
    """The relative links of a page whose file or heading is not there."""
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "code", without_code(path.read_text(encoding="utf-8")))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path if not file else (path.parent / file).resolve()
        if "generated" in target.parts and FOLDER in target.parents:
            continue  # `make docs` makes it, and checks it
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and target.suffix == ".md" and anchor not in slugs(target.read_text(encoding="utf-8")):
            yield f"{link}: there is no such heading"


def listed(path: Path) -> Iterator[Path]:
    """The pages in the toctrees of a page."""
    for match in FENCE.finditer(path.read_text(encoding="utf-8")):
        if match[3] == "{toctree}":
            lines = [line.strip() for line in match[4].splitlines()]
            yield from ((path.parent / f"{line}.md").resolve() for line in lines if line and not line.startswith(":"))


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's paragraphs and lists; inline code is one word, and tables are left out."""
    text = re.sub(r"^(?:\||:::| {4,}\S).*$", "", without_code(text), flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=#)", text):
        plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", " ".join(paragraph.split())))
        yield from re.split(r"(?<=[.!?:;])\s+", plain)


def words(sentence: str) -> int:
    """How many words a sentence has."""
    return len(re.findall(r"[\w'/.,-]*\w[\w'/-]*", sentence))
