"""A private name stays in its folder: nothing in fzero imports a `_name` of another folder."""

from __future__ import annotations

import ast
from pathlib import Path

import fzero

PACKAGE = Path(fzero.__file__).parent
SHARED = {"_torch_compat", "_version"}  # folders and files that every floor may import


def borrowed(folder: str, text: str) -> list[str]:
    """The private names of other folders that a module imports."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fzero."):
            _, owner, *inner = f"{node.module}.".split(".")
            parts = [part for part in [*inner, *(alias.name for alias in node.names)] if part.startswith("_")]
            if owner != folder and owner not in SHARED and parts:
                names.append(f"{node.module}: {', '.join(parts)}")
    return names


def test_no_private_name_crosses_a_folder() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.stem not in SHARED]
    assert len(files) > 200
    crossed = {}
    for path in files:
        folder = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if names := borrowed(folder, path.read_text()):
            crossed[str(path)] = names
    assert crossed == {}


def test_a_borrowed_private_name_is_seen() -> None:
    assert borrowed("profile", "from fzero.api import _agreed, step") == ["fzero.api: _agreed"]
    assert borrowed("functional", "from fzero.random._key_rules import is_key") == [
        "fzero.random._key_rules: _key_rules"
    ]
    assert borrowed("random", "from fzero.random._key_rules import is_key") == []
    assert borrowed("data", "from fzero._torch_compat import FakeTensorMode") == []
