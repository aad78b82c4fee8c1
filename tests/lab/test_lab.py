"""`lab/` stays out of what users install: fzero never imports it, the wheel lacks it, and no command names it."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

import fzero
from fzero import cli
from lab.fuzz.__main__ import main as fuzz
from lab.mutate.__main__ import main as mutate

ROOT = Path(__file__).parents[2]


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).partition(".")[0])
    return names


def test_no_file_of_fzero_imports_it() -> None:
    files = sorted((ROOT / "fzero").rglob("*.py"))
    assert len(files) > 200
    named = [file for file in files if re.search(r"\b(lab|tests)\b", file.read_text(encoding="utf-8"))]
    assert [str(file) for file in named if imported(file) & {"lab", "tests"}] == []
    assert "fzero" in imported(ROOT / "lab" / "commands.py"), "and the search finds an import"


def test_the_wheel_has_fzero_alone_and_the_source_archive_has_both() -> None:
    """The archive has the tests, which import `lab`."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert built["wheel"] == {"packages": ["fzero"]}
    assert not {"/fzero", "/lab", "/tests"} & set(built["sdist"]["exclude"])
    assert "include" not in built["sdist"], "all that git has but what is left out"
    assert not (ROOT / "fzero" / "lab").exists()


@pytest.mark.parametrize("name", ["fuzz", "mutate"])
def test_the_cli_and_the_package_do_not_have_them(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        cli.main([name])
    assert f"there is no command {name!r}" in capsys.readouterr().err
    assert not hasattr(fzero, name)
    monkeypatch.setattr(sys, "argv", ["lab", "--help"])
    monkeypatch.delitem(sys.modules, f"lab.{name}.__main__")  # as `python -m` finds it
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"lab.{name}", run_name="__main__", alter_sys=True)
    assert end.value.code == 0
    assert f"python -m lab.{name}" in capsys.readouterr().out


def test_an_error_of_the_user_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz(["--jobs", "2"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("python -m lab.fuzz: --jobs needs --out FILE")
    assert shown.err.count("\n") == 1


def test_it_breaks_programs_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutate(["--count", "1", "--each", "0", "--unbroken", "1", "--hierarchy"]) == 0
    assert "unbroken programs: 1, refused: 0" in capsys.readouterr().out
