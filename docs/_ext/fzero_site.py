"""Pages of the site that are made from the code: the API by its public names, and the READMEs of the rooms.

They are written to `docs/generated/` before Sphinx reads its sources, and git ignores that folder. After the build the
inventory must hold every public name: a name without a docstring, or on no page, is a warning, and so an error.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
GENERATED = DOCS / "generated"
API = {  # module: the heading of its page
    "fzero": "fzero",
    "fzero.optim": "fzero.optim: optimizers and schedules",
    "fzero.random": "fzero.random: keys and draws",
    "fzero.data": "fzero.data: batches",
    "fzero.sparse": "fzero.sparse: attention over some pairs of tokens",
    "fzero.interop": "fzero.interop: modules, files and configurations of others",
    "fzero.checkpoint": "fzero.checkpoint: saving, in detail",
    "fzero.hardware": "fzero.hardware: machines as data",
}
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)]*)?\)")
LAST_BLANK = re.compile(r"(^```python\n>>> (?:(?!```).)*?)\n\n```", re.MULTILINE | re.DOTALL)


def public_names() -> dict[str, list[str]]:
    """By module, the names that it makes public, without modules; a name of two modules is listed with the first."""
    names: dict[str, list[str]] = {}
    known: set[int] = set()
    for module in API:
        there = importlib.import_module(module)
        listed = getattr(there, "__all__", None) or [n for n in vars(there) if not n.startswith("_")]
        new = [
            n for n in listed if not isinstance(getattr(there, n), ModuleType) and id(getattr(there, n)) not in known
        ]
        names[module] = sorted(new)
        known |= {id(getattr(there, n)) for n in new}
    return names


def undocumented() -> list[str]:
    """Public classes and functions without a docstring of their own."""
    there = {f"{m}.{n}": getattr(importlib.import_module(m), n) for m, names in public_names().items() for n in names}
    return [
        name
        for name, thing in there.items()
        if (inspect.isclass(thing) or inspect.isroutine(thing)) and not thing.__doc__
    ]


def api_page(module: str, heading: str, names: list[str]) -> str:
    """A page with the docstrings of a module and of its public names."""
    there = importlib.import_module(module)
    lines = [f"# {heading}", "", "```{eval-rst}", f".. py:module:: {module}", "```", ""]
    for name in names:
        thing = getattr(there, name)
        if inspect.isclass(thing):
            directive = f".. autoclass:: {module}.{name}\n   :members:\n   :show-inheritance:"
        elif inspect.isroutine(thing):
            directive = f".. autofunction:: {module}.{name}"
        else:  # the docstring of a value is that of its type
            directive = f".. py:data:: {name}\n   :value: {thing!r}"
        lines += [f"## {name}", "", "```{eval-rst}", directive, "```", ""]
    return "\n".join(lines)


def relinked(text: str, source: Path, page: Path) -> str:
    """The text of `source` with its relative links made those of `page`; a README's link becomes that of its page."""

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        if not target.exists() or not target.is_relative_to(ROOT):
            return match[0]
        readme = target / "README.md" if target.is_dir() else target
        target = next((GENERATED / name for name, file in copied().items() if file == readme), target)
        return f"]({os.path.relpath(target, page.parent)}{match[2] or ''})"

    return LINK.sub(moved, text)


def rooms() -> list[Path]:
    """The folders of `fzero/` that have a README, and the folders beside it."""
    beside = [ROOT / name for name in ("benchmarks", "lab", "tests")]
    return [*sorted(path.parent for path in (ROOT / "fzero").rglob("README.md")), *beside]


@functools.cache
def copied() -> dict[str, Path]:
    """By the page in `docs/generated/`, the file that it is made from."""
    pages = {f"rooms/{page_name(room)}.md": room / "README.md" for room in rooms()}
    return {**pages, "changelog.md": ROOT / "CHANGELOG.md", "contributing.md": ROOT / "CONTRIBUTING.md"}


def relink_page(app: Sphinx, name: str, content: list[str]) -> None:
    """Links of a page of `docs/` to files of the repository that are pages here, and no blank line at a fence's end."""
    content[0] = LAST_BLANK.sub(r"\1\n```", content[0])
    if not name.startswith("generated/"):
        page = DOCS / f"{name}.md"
        content[0] = relinked(content[0], page, page)


def page_name(room: Path) -> str:
    """`fzero/plan` as `plan`, `fzero/interop/config` as `interop-config`."""
    return "-".join(room.relative_to(ROOT).parts).removeprefix("fzero-")


def generate(app: Sphinx) -> None:
    """Writes the pages; a file that has its text already keeps its time, so a second build is quick."""
    pages = {f"api/{m}.md": api_page(m, API[m], names) for m, names in public_names().items()}
    for name, source in copied().items():
        pages[name] = relinked(source.read_text(encoding="utf-8"), source, GENERATED / name)
    for name, text in pages.items():
        path = GENERATED / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in GENERATED.rglob("*.md"):
        if path.relative_to(GENERATED).as_posix() not in pages:
            path.unlink()


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A docstring as reStructuredText. Of an argument, "name: text" becomes a field."""
    code, names = False, arguments(obj)
    out: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        code = paragraph.lstrip().startswith(">>>") or paragraph.startswith("    ")
        out += ["", *(paragraph.split("\n") if code else fields(escaped(paragraph), names))]
    lines[:] = out[1:]


def arguments(obj: Any) -> set[str]:
    """The names of a callable's arguments."""
    try:
        return set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return set()


def escaped(paragraph: str) -> str:
    """Text without what reStructuredText alone would read: bars, stars, and code that a letter follows."""
    parts = re.split(r"(`[^`]+`)", paragraph)
    text = [p if n % 2 else re.sub(r"([|*])", r"\\\1", p) for n, p in enumerate(parts)]
    return "".join(f"\\ {p}" if n and n % 2 == 0 and p[:1].isalnum() else p for n, p in enumerate(text))


def fields(paragraph: str, names: set[str]) -> list[str]:
    """The lines of a paragraph; from its first "name: text" of an argument on, a field for each."""
    if not names or "\n-" in paragraph or paragraph.startswith(("-", "1.")):
        return paragraph.split("\n")
    one = "(?:" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")"
    head = re.compile(rf"(?:^|(?<=[.!?)] ))({one}(?:, {one})*): ")
    text = " ".join(paragraph.split())
    starts = list(head.finditer(text))
    if not starts:
        return paragraph.split("\n")
    before = text[: starts[0].start()].strip()
    ends = [*(m.start() for m in starts[1:]), len(text)]
    made = []
    for m, end in zip(starts, ends, strict=True):
        named = m[1].replace(", ", ",\N{ZERO WIDTH SPACE}")  # Sphinx takes what is before a space for a type
        made.append(f":param {named}: {text[m.end() : end].strip()}")
    return [*([before, ""] if before else []), *made]


def check_names(app: Sphinx, error: Exception | None) -> None:
    """Every public name is in the inventory, and has a docstring."""
    if error is not None:
        return
    from sphinx.util import logging

    there = app.env.domaindata["py"]["objects"]
    log = logging.getLogger(__name__)
    for module, names in public_names().items():
        for name in names:
            if f"{module}.{name}" not in there:
                log.warning("the public name %s.%s is on no page", module, name)
    for name in undocumented():
        log.warning("the public name %s has no docstring", name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", generate)
    app.connect("source-read", relink_page)
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("build-finished", check_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
