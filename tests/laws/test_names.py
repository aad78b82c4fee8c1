"""A name in `fzero/` means one thing: no two modules have one file name, and no two top-level classes one name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2] / "fzero"


def twins(root: Path) -> dict[str, tuple[str, ...]]:
    """The files of each name that two have: of modules (but `__init__` and `__main__`), and of top-level classes."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        classes = [x.name for x in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(x, ast.ClassDef)]
        module = [] if path.stem in ("__init__", "__main__") else [path.stem]
        for name in module + classes:
            files[name].append(path.relative_to(root).as_posix())
    return {name: tuple(found) for name, found in files.items() if len(found) > 1}


def test_no_two_modules_and_no_two_classes_have_one_name() -> None:
    assert twins(ROOT) == {}


def test_a_twin_is_found(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name in ("__init__", "__main__", "step"):
            (tmp_path / folder / f"{name}.py").write_text(
                "class Walk:\n    class Inner: ...\n" if name == "step" else ""
            )
    pair = ("one/step.py", "two/step.py")
    assert twins(tmp_path) == {"step": pair, "Walk": pair}
