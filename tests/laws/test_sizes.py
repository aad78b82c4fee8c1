"""No function of more than 60 lines, no class of more than 250, no file of more than 400: each is read at a glance."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fzero

ROOT = Path(fzero.__file__).parent
MOST = {ast.FunctionDef: 60, ast.AsyncFunctionDef: 60, ast.ClassDef: 250}
MOST_OF_A_FILE = 400


def too_long(name: str, source: str) -> Iterator[str]:
    """What is longer than it may be, by its place."""
    if (lines := source.count("\n")) > MOST_OF_A_FILE:
        yield f"{name}: {lines} lines"
    for node in ast.walk(ast.parse(source)):
        for kind, most in MOST.items():
            if isinstance(node, kind) and (lines := (node.end_lineno or 0) - node.lineno + 1) > most:
                yield f"{name}:{node.lineno}: {getattr(node, 'name', '')} has {lines} lines"


def test_nothing_is_longer_than_it_may_be() -> None:
    found = [line for path in sorted(ROOT.rglob("*.py")) for line in too_long(path.name, path.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
        ("class C:\n" + "    x = 1\n" * 250, "C has 251 lines"),
        ("x = 1\n" * 401, "401 lines"),
    ],
)
def test_what_is_too_long_is_seen(source: str, said: str) -> None:
    assert [line for line in too_long("m.py", source) if said in line]
    shorter = "".join(source.splitlines(keepends=True)[:-1])
    assert not list(too_long("m.py", shorter))
