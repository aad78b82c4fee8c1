"""The table of files in each room's README names every module of the room, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "fzero"
ROOMS = sorted(path.parent for path in ROOT.rglob("README.md"))
HEAD = re.compile(r"^\| (?:file|module)[^|]* \|", re.MULTILINE)


def table(text: str) -> set[str]:
    """What the first column of the tables of files names, without `.py`, the folder `x/` as `x/`."""
    names: set[str] = set()
    for head in HEAD.finditer(text):
        rows = text[head.start() :].split("\n\n")[0].splitlines()[2:]
        cells = [row.split("|")[1] for row in rows]
        names |= {name.removesuffix(".py") for cell in cells for name in re.findall(r"`([\w/.]+)`", cell)}
    return {name if name.endswith("/") else name.rpartition("/")[2] for name in names}


def modules(room: Path) -> set[str]:
    """The modules of a room and of its folders without a README of their own, and the folders that have one."""
    there: set[str] = set()
    for path in room.rglob("*.py"):
        inner = next(folder for folder in path.parents if folder == room or (folder / "README.md").exists())
        there |= {f"{inner.name}/"} if inner != room else {path.stem}
    return there - {"__init__", "__main__"}


def differences(room: Path) -> list[str]:
    """A line for each module that the README does not name, and for each name without a module."""
    named, there = table((room / "README.md").read_text(encoding="utf-8")), modules(room)
    named -= {"__init__", "__main__"}
    others = {f"{path.name}/" if path.is_dir() else path.name for path in room.iterdir()}  # may be named
    return sorted(
        [f"{name} is not named" for name in there - named if not name.endswith("/")]
        + [f"{name} is named, and is not there" for name in named - there - others]
    )


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(ROOT).as_posix())
def test_a_readme_names_the_files_of_its_room(room: Path) -> None:
    assert differences(room) == []


def test_every_room_has_a_readme() -> None:
    """`_torch_compat` is listed by version in its own docstrings; folders inside a room are rows of its README."""
    rooms = {path for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert {room.name for room in rooms - set(ROOMS)} <= {"_torch_compat"}


def test_a_module_without_a_row_and_a_row_without_a_module_are_found(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "# room\n\n| file | does |\n|---|---|\n| `one`, `gone.py` | this |\n\n`other`\n"
    )
    for name in ("__init__", "one", "two"):
        (tmp_path / f"{name}.py").write_text("")
    assert differences(tmp_path) == ["gone is named, and is not there", "two is not named"]
