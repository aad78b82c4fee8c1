"""The package: one version in all files, extras that are pinned, and an import that needs no extra."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS

import fzero

ROOT = Path(__file__).parents[2]
EXTRAS = ("transformers", "accelerate", "peft", "rich", "matplotlib", "yaml", "deepspeed", "datasets", "ray", "IPython")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def test_there_is_one_version(project: dict[str, Any]) -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert project["version"] == fzero.__version__
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [fzero.__version__]
    assert re.findall(r"^license: (.+)$", citation, re.MULTILINE) == [project["license"]]


def test_every_library_that_make_installs_is_pinned(project: dict[str, Any]) -> None:
    """pip would take the newest of what has no line in constraints.txt."""
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    wanted = {
        re.split(r"[>=<;\[ ]", requirement)[0]
        for extra, requirements in project["optional-dependencies"].items()
        for requirement in requirements
        if extra != "config"
    }
    assert wanted - pinned == set()


def test_the_oldest_that_are_tried_are_the_oldest_that_are_allowed(project: dict[str, Any]) -> None:
    """`make test-oldest` installs them: a floor that nobody runs is not kept."""
    asked = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    allowed = dict(requirement.split(">=") for requirement in asked)
    text = (ROOT / "tests" / "oldest.txt").read_text(encoding="utf-8")
    tried = dict(re.findall(r"^([\w-]+)==(.+)$", text, re.MULTILINE))
    assert tried.keys() == allowed.keys()
    assert [name for name in allowed if f"{tried[name]}.".startswith(f"{allowed[name]}.") is False] == []


def test_fzero_and_its_command_import_without_any_extra() -> None:
    """In a process that cannot import what only extras install: with what the documents name, and without Triton."""
    fzeros = r"(?<!ops\.)\bfzero\.(?!md\b)([a-z_]+)\b(?!\.(?:py|md|toml))"
    texts = [path.read_text(encoding="utf-8") for path in (*DOCS, ROOT / "README.md")]
    named = sorted({*fzero.__all__, *(name for text in texts for name in re.findall(fzeros, text))})
    script = f"""
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {EXTRAS}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Absent())
        import fzero
        assert "triton" not in sys.modules
        sys.modules["triton"] = None
        from fzero import cli
        from fzero.kernels import philox
        missing = [name for name in {named} if not hasattr(fzero, name)]
        assert not missing, missing
        assert set(fzero.__all__) <= set(dir(fzero))
        assert cli.main(["version"]) == 0
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_pages_and_texts_need_is_in_the_package() -> None:
    """Files that are no Python, beside the modules that read them: the wheel takes the folder as it is."""
    for name in ("explain/explain.css", "explain/explain.js", "profile/page.css", "profile/page.js", "py.typed"):
        assert (ROOT / "fzero" / name).is_file()
