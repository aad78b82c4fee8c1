"""Puts a built site into the folder of its version, beside those of other versions: `make docs-site`.

    SITE/0.1.0/...      a copy of build/docs
    SITE/versions.js    the versions that are there, newest first: each page of each version reads it for its switch
    SITE/index.html     leads to the newest

A version that is added later appears in the switch of the older ones, because they read the same file.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

VERSION = re.compile(r"\d+(\.\d+)*([a-z]+\d*)?")


def versions(site: Path) -> list[str]:
    """The versions whose folders hold a front page, the newest first. A pre-release comes before its release."""

    def age(name: str) -> tuple[list[int], bool, str]:
        numbers = re.match(r"[\d.]+", name)[0]  # type: ignore[index]  # VERSION matched
        return [int(n) for n in numbers.split(".")], numbers == name, name

    names = [page.parent.name for page in site.glob("*/index.html") if VERSION.fullmatch(page.parent.name)]
    return sorted(names, key=age, reverse=True)


def add(built: Path, site: Path, version: str) -> list[str]:
    """Copies a site to its folder, in the place of an older copy, and writes what all share. Returns the versions.

    Raises ValueError for a name that is no version, and for a folder that holds no site.
    """
    if not VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is not a version, such as 1.2.0 or 1.3.0rc1")
    if not (built / "index.html").is_file():
        raise ValueError(f"{built} holds no site: run `make docs` first")
    shutil.rmtree(site / version, ignore_errors=True)
    shutil.copytree(built, site / version, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    names = versions(site)
    (site / "versions.js").write_text(f"window.siteVersions = {json.dumps(names)};\n", encoding="utf-8")
    newest = f"{names[0]}/index.html"
    head = f'<meta charset="utf-8"><title>fzero</title><meta http-equiv="refresh" content="0; url={newest}">'
    page = f'<!doctype html>{head}<a href="{newest}">fzero {names[0]}</a>\n'
    (site / "index.html").write_text(page, encoding="utf-8")
    return names


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from fzero import __version__

    print("versions:", *add(Path(sys.argv[1]), Path(sys.argv[2]), __version__))
