"""lines: the lines of fzero that only a run on CUDA executes, found by rule, and which of them a run has executed.

A statement is one of them if
1. it is in a branch that a test on CUDA opens: the body of `if backend.of(x.device).has_kernels` (the facts of
   `FACTS`), `if torch.cuda.is_available()`, `if self.recording is not None` (the words of `MARKS`); the `else`
   of, or what follows, a test that is negated and leaves; a line with a conditional expression on such a test, or that
   compares with "cuda" or asks `is_cuda`;
2. it names something of `torch.cuda` beside `is_available`;
3. it is in a function or class that only such statements name, found again and again until no more are; `ALSO` are
   those whose names others have too;
4. it is in a function of `fzero/kernels` that launches a kernel, or that only such functions name. (The kernels
   themselves are compiled and interpreted by test_kernels.py.)

Definitions, docstrings and what is in a class but in no function are not statements here: they run when a module is
imported.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
# facts of CUDA in `fzero.backend`
FACTS = {"on_streams", "records_graphs", "locks_pages", "has_kernels", "disk_by_host", "norms_alike"}
MARKS = {"cuda", "nccl", "is_cuda", "recordable", "recording", *FACTS}
ALSO = {"fzero/runtime/cuda_graphs.py": {"record"}}
OTHER = {"_Host"}  # in the other arm of a line that counts
LAUNCHES = {"launch", "exact"}
_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
_BLOCKS = (*_DEFINITIONS, ast.If, ast.For, ast.While, ast.With, ast.Try)


@dataclass(frozen=True)
class Line:
    """A statement: its file, the function it is in, its text (of a compound one its head), and where it is now."""

    file: str
    inside: str
    text: str
    first: int
    last: int

    @property
    def key(self) -> str:
        return f"{self.file} {self.inside}: {self.text}"


def _words(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.Constant) and one.value in ("cuda", "nccl"):
            yield one.value


def _opens(test: ast.expr) -> bool | None:
    """Whether a test holds on CUDA (True) or elsewhere (False); None for one that asks something else."""
    if not MARKS & set(_words(test)):
        return None
    text = ast.unparse(test)
    return not (text.startswith("not ") or "!= 'cuda'" in text)


def _names_cuda(node: ast.stmt) -> bool:
    found = (x for x in ast.walk(node) if isinstance(x, ast.Attribute) and x.attr != "is_available")
    return any(ast.unparse(x.value) == "torch.cuda" for x in found)


def _compares(node: ast.stmt) -> bool:
    asked = [x for x in ast.walk(node) if isinstance(x, ast.Compare)]
    said = any(isinstance(x, ast.Attribute) and x.attr in {"is_cuda", *FACTS} for x in ast.walk(node))
    return said or any({"cuda", "nccl"} & set(_words(x)) for x in asked)


def _speaks(node: ast.stmt) -> bool:
    """Whether a statement is CUDA's by its own words."""
    if isinstance(node, ast.With):
        return any("torch.cuda." in ast.unparse(item) for item in node.items)
    if isinstance(node, _BLOCKS):
        return False
    tests = [x.test for x in ast.walk(node) if isinstance(x, ast.IfExp)]
    return any(_opens(test) is not None for test in tests) or _names_cuda(node) or _compares(node)


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _runs_later(node: Any) -> list[ast.stmt]:
    """The statements of a function or class that do not run when it is defined."""
    return [x for x in node.body if isinstance(x, _DEFINITIONS)] if isinstance(node, ast.ClassDef) else node.body


class _File:
    """One file's statements, and which of them are CUDA's."""

    def __init__(self, path: Path) -> None:
        self.name = str(path.relative_to(ROOT))
        text = path.read_text()
        self.tree = ast.parse(text)
        self.speaks = any(mark in text for mark in MARKS)  # of CUDA: else no statement is by its own words
        self.definitions: dict[str, tuple[ast.stmt, str]] = {}  # by name: the node, the names around it
        self.found: dict[Line, ast.stmt] = {}
        self.named: dict[str, list[int]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Name, ast.Attribute)):
                self.named.setdefault(node.id if isinstance(node, ast.Name) else node.attr, []).append(node.lineno)
        self._walk(self.tree.body, "", False)

    def _walk(self, body: list[ast.stmt], inside: str, only: bool) -> None:
        for node in body:
            if isinstance(node, _DEFINITIONS):
                if not any("jit" in ast.unparse(d) for d in node.decorator_list):
                    where = f"{inside}.{node.name}".lstrip(".")
                    self.definitions[where] = node, inside
                    self._walk(_runs_later(node), where, only)
                continue
            after = self._statement(node, inside, only)
            only = only or after

    def _statement(self, node: ast.stmt, inside: str, only: bool) -> bool:
        """Whether what follows is CUDA's alone."""
        opens = _opens(node.test) if self.speaks and isinstance(node, ast.If) else None
        mine = only or (self.speaks and _speaks(node))
        if mine and inside and not _is_docstring(node) and not isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)):
            self.add(node, inside)
        for field in ("body", "orelse", "handlers", "finalbody"):
            for part in [getattr(node, field, None)]:
                if isinstance(part, list) and part:
                    inner = only or (opens is True and field == "body") or (opens is False and field == "orelse")
                    nested = [s for h in part for s in h.body] if field == "handlers" else part
                    self._walk(nested, inside, inner)
        return opens is False and isinstance(node, ast.If) and _leaves(node.body)

    def add(self, node: ast.stmt, inside: str) -> None:
        if isinstance(node, ast.Try):  # has no line of its own
            return
        first, last = node.lineno, node.end_lineno or node.lineno
        text = " ".join(ast.unparse(node).split())
        if isinstance(node, _BLOCKS):
            last = node.body[0].lineno - 1 if node.body[0].lineno > first else first
            text = ast.unparse(node).splitlines()[0]
        self.found[Line(self.name, inside, text, first, max(first, last))] = node

    def take(self, where: str) -> None:
        """A whole function or class is CUDA's."""
        node: Any = self.definitions[where][0]
        self._walk(_runs_later(node), where, True)

    def references(self, name: str) -> Iterator[int]:
        """The lines that name something outside its own definition and outside imports."""
        if name not in self.named:
            return
        own = [d for where, (d, _) in self.definitions.items() if where.rpartition(".")[2] == name]
        for number in self.named.get(name, ()):
            if not any(d.lineno <= number <= (d.end_lineno or 0) for d in own):
                yield number


@cache
def cuda_lines() -> list[Line]:
    """By the rules above, in order."""
    files = [_File(path) for path in sorted((ROOT / "fzero").rglob("*.py"))]
    taken: set[tuple[str, str]] = set()
    while True:
        lines = {one.name: {n for line in one.found for n in range(line.first, line.last + 1)} for one in files}
        new = [(one, where) for one in files for where in one.definitions if (one.name, where) not in taken
               and _is_cudas(one, where, files, lines)]  # fmt: skip
        if not new:
            return sorted((line for one in files for line in one.found), key=lambda x: (x.file, x.first))
        for one, where in new:
            taken.add((one.name, where))
            one.take(where)


def _is_cudas(file: _File, where: str, files: list[_File], lines: dict[str, set[int]]) -> bool:
    node, around = file.definitions[where]
    name = where.rpartition(".")[2]
    if name in ALSO.get(file.name, ()):
        return True
    if "/kernels/" in file.name and LAUNCHES & {
        c.func.id for c in ast.walk(node) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)
    }:
        return name not in LAUNCHES or name == "launch"
    if (
        around
        or name in OTHER
        or name.startswith("__")
        or (not name.startswith(("_", "N")) and "/kernels/" not in file.name)
    ):
        return False
    found = [(one.name, n) for one in files for n in one.references(name)]
    return bool(found) and all(n in lines[at] for at, n in found)


KEPT = "FZERO_STANDIN_LINES"  # a file with the lines that the starting process has found already


def keep_lines(path: Path) -> dict[str, str]:
    """Writes the lines to a file: the environment that makes another process read them there."""
    path.write_text(json.dumps([astuple(line) for line in cuda_lines()]))
    return {KEPT: str(path)}


def kept_lines() -> list[Line]:
    kept = os.environ.get(KEPT)
    return cuda_lines() if kept is None else [Line(*row) for row in json.loads(Path(kept).read_text())]


# --- what runs --------------------------------------------------------------------------------------------------------


class Watch(importlib.abc.MetaPathFinder):
    """Notes which lines run, under the name in `now`: from `install` on, a module of fzero that is imported calls
    `note` before each of them. (A trace function would be called for every frame of torch too, which takes thrice the
    time.)"""

    def __init__(self) -> None:
        self.wanted: dict[str, dict[int, Line]] = {}
        for line in kept_lines():
            self.wanted.setdefault(str(ROOT / line.file), {})[line.first] = line
        self.now = ""
        self.ran: dict[str, set[str]] = {}

    def install(self) -> Watch:
        assert "fzero" not in sys.modules
        builtins.note_line = self.note  # type: ignore[attr-defined]
        sys.meta_path.insert(0, self)
        return self

    def note(self, key: str) -> None:
        self.ran.setdefault(key, set()).add(self.now)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.startswith("fzero") else None
        if spec is None or spec.origin not in self.wanted:
            return None
        spec.loader = _Noting(self.wanted[spec.origin], name, spec.origin)
        return spec


class _Noting(SourceFileLoader):
    """Loads a module with a call of `note_line` before each statement that begins on one of these lines."""

    def __init__(self, wanted: dict[int, Line], *where: str) -> None:
        super().__init__(*where)
        self.wanted = wanted

    def get_code(self, name: str) -> CodeType:
        tree = ast.parse(Path(self.path).read_bytes(), self.path)
        for node in list(ast.walk(tree)):
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if isinstance(body, list):
                    setattr(node, field, [new for old in body for new in (*self._note(old), old)])
        return compile(tree, self.path, "exec")

    def _note(self, node: ast.stmt) -> list[ast.stmt]:
        line = self.wanted.get(node.lineno)
        if line is None or isinstance(node, (*_DEFINITIONS, ast.Import, ast.ImportFrom)) or _is_docstring(node):
            return []
        call = ast.Expr(ast.Call(ast.Name("note_line", ast.Load()), [ast.Constant(line.key)], []))
        return [ast.fix_missing_locations(ast.copy_location(call, node))]
