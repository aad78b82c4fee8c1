"""The folder of the documentation's versions: what is in the switch, and where the front page leads."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from pages import FOLDER


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER / "_ext"))
    return importlib.import_module("site_versions")


def test_versions_are_added_and_listed_newest_first(site: ModuleType, tmp_path: Path) -> None:
    for version in ("0.2.0", "0.10.0rc1", "0.9.1", "0.10.0"):
        built = tmp_path / f"built-{version}"
        (built / ".doctrees").mkdir(parents=True)
        (built / "index.html").write_text(version)
        names = site.add(built, tmp_path / "site", version)
    assert names == ["0.10.0", "0.10.0rc1", "0.9.1", "0.2.0"]
    (tmp_path / "site" / "notes").mkdir()
    (tmp_path / "site" / "notes" / "index.html").write_text("no version")
    assert site.versions(tmp_path / "site") == names
    text = (tmp_path / "site" / "versions.js").read_text()
    assert json.loads(text.partition(" = ")[2].rstrip(";\n")) == names
    assert 'url=0.10.0/index.html"' in (tmp_path / "site" / "index.html").read_text()
    assert not (tmp_path / "site" / "0.2.0" / ".doctrees").exists()


def test_a_version_that_is_built_again_takes_the_place_of_the_older(site: ModuleType, tmp_path: Path) -> None:
    built = tmp_path / "built"
    built.mkdir()
    for page in ("old", "new"):
        (built / "index.html").write_text(page)
        (built / f"{page}.html").write_text(page)
        site.add(built, tmp_path / "site", "1.0")
        (built / f"{page}.html").unlink()
    assert sorted(p.name for p in (tmp_path / "site" / "1.0").iterdir()) == ["index.html", "new.html"]


@pytest.mark.parametrize(("version", "said"), [("../up", "'../up' is not a version"), ("1.0", "holds no site")])
def test_what_is_refused(site: ModuleType, tmp_path: Path, version: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        site.add(tmp_path, tmp_path / "site", version)
